"""Rows and functions that Python gives, as files and settings: `train(data=rows, reward=function)`.

The files are in a folder of the caller. A run keeps them in its directory, so that it can be resumed from there.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from brorl.api.first_recipe import guesses, make_starter, recipe_text, settings_of_data
from brorl.api.given_function import importable_path, source_of
from brorl.api.recipe import resolve_checkpoint, resolve_config
from brorl.config.reading import ConfigOrPath, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.format import counted
from brorl.prompts.files import read_source
from brorl.prompts.guess import guess_meaning
from brorl.runs import RUNS
from brorl.storage import replace_file, storage_errors
from brorl.wording import in_recipe, source_words

FOLDER = "given"
"""Folder of these files in a run directory."""
_ROWS = "rows.jsonl"
_DOMAIN = "own"  # of rows with a function of their own
_COLUMNS = "reward_columns"  # the reference answer, where functions read several columns
Reward: TypeAlias = Callable[..., object]
Rewards: TypeAlias = "Reward | Mapping[str, Reward | tuple[Reward, float]]"


class Term(NamedTuple):
    """A function of the reward: the first decides whether a response is correct, the others are added."""

    name: str
    function: Reward
    weight: float


class Given(NamedTuple):
    """The settings of a call with rows and functions, whose files are in a folder."""

    recipe: ConfigOrPath  # the recipe, which is a first one for the rows where none was given
    config: TrainConfig  # its settings with all overrides
    lines: tuple[str, ...]  # what was guessed of the rows


class _Rows(NamedTuple):
    recipe: dict[str, Any]  # a first recipe for them
    source: dict[str, Any]  # their entry of data.sources
    lines: tuple[str, ...]  # what was guessed


def resolve_given(
    config_or_path: ConfigOrPath | None, overrides: Mapping[str, Any], reward: Rewards | None, folder: Path
) -> Given:
    """Return the settings of a recipe with rows among the overrides and functions, which are written as files.

    Args:
        config_or_path: The recipe; None is the one that `brorl init` writes for the rows, and quickstart without rows.
        overrides: Settings. `data` may be rows: a `datasets.Dataset`, a list of dicts, a data frame or a table.
        reward: The functions of the reward, for every domain of the training data.
        folder: Gets the files.

    Raises:
        UserError: If a setting is wrong, the rows or the functions cannot be used, or there is no clear guess.
    """
    recipe, rest = config_or_path, dict(overrides)
    lines: tuple[str, ...] = ()
    terms = () if reward is None else terms_of(reward)
    if _is_rows(rest.get("data")):
        rows, model = _rows_of(rest.pop("data")), rest.get("model")
        needed = _required_columns(terms[0].function) if terms else []
        rows, answer = _with_answers(rows, needed)
        file = folder.absolute() / _ROWS
        _write(file, _text(rows))
        found = _guessed(file, None if model is None else str(model), answer, _DOMAIN if terms else None)
        _check_columns(terms, found.source["answer_column"] if terms else "", rows[0])
        lines = found.lines
        if recipe is None:
            recipe = found.recipe
        else:
            rest = {"data.sources": [found.source], **rest}
    recipe = "quickstart" if recipe is None else recipe
    config = resolve_config(recipe, rest)
    if terms:
        config = resolve_config(config, _reward_settings(terms, config, folder))
    return Given(recipe, config, lines)


def rows_to_evaluate(data: Any, checkpoint: str | Path) -> tuple[str, tuple[str, ...]]:
    """Store rows in `runs/evaluations`, named by their content; see `brorl.train` for `data`.

    The columns are those of the rows that the run of the checkpoint was trained on, and else guessed.

    Returns:
        The rows as a value of `data` of an evaluation, and lines that say what was guessed.

    Raises:
        UserError: If these are no rows, or there is no clear guess.
    """
    recipe = resolve_checkpoint(str(checkpoint)).recipe
    sources = [] if recipe is None else read_recipe(recipe).get("data", {}).get("sources", [])
    trained = next((source for source in sources if source.get("domain") == _DOMAIN), None)
    answer, needed = None if trained is None else trained["answer_column"], []
    if trained is not None and answer == _COLUMNS:
        with storage_errors(Path(trained["path"])):
            first, _, _ = Path(trained["path"]).read_text("utf-8", "surrogatepass").partition("\n")
        needed = list(json.loads(json.loads(first)[_COLUMNS]))
    text = _text(_with_answers(_rows_of(data), needed)[0])
    name = f"rows-{blake2b(text, digest_size=4).hexdigest()}"
    file = (RUNS / "evaluations" / f"{name}.jsonl").absolute()
    _write(file, text)
    found = _guessed(file, None, answer, None if trained is None else _DOMAIN)
    return json.dumps({**found.source, "name": name}), found.lines


def moved(config: TrainConfig, old: Path, new: Path) -> TrainConfig:
    """Return a config whose files of one folder are in another, to which they are copied."""
    files = sorted(old.iterdir()) if old.is_dir() else []
    for file in files:
        _write(new / file.name, file.read_bytes())
    settings = _replaced(config.model_dump(mode="json"), f"{old.absolute()}/", f"{new.absolute()}/")
    return TrainConfig.model_validate(settings) if files else config


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return new + value.removeprefix(old) if value.startswith(old) else value
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return [_replaced(item, old, new) for item in value] if isinstance(value, list | tuple) else value


def _write(file: Path, content: bytes) -> None:
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def _is_rows(data: object) -> bool:
    """Whether a value is rows, and not the settings of the section `data`."""
    if isinstance(data, Mapping):
        return any(hasattr(value, "to_list") for value in data.values())  # datasets.DatasetDict, which has no rows
    return not isinstance(data, str | Path | None) and not hasattr(data, "model_dump")


def _rows_of(data: Any) -> list[dict[str, Any]]:
    rows: list[Any] = []
    if hasattr(data, "iloc"):  # pandas.DataFrame, where nothing is NaN
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
    elif hasattr(data, "to_pylist") or hasattr(data, "to_list"):  # pyarrow.Table, datasets.Dataset
        rows = data.to_pylist() if hasattr(data, "to_pylist") else data.to_list()
    elif isinstance(data, Iterable) and not isinstance(data, bytes | Mapping):
        rows = list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"data: expected a datasets.Dataset, a list of dicts, a data frame or a table with at least one row, got "
            f"{type(data).__name__}; choose a split of a DatasetDict, such as dataset['train']"
        )
    return [dict(row) for row in rows]


def _text(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as JSON Lines."""
    lines = []
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            try:
                _json(value)
            except (TypeError, ValueError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"data: row {number} has {name!r} of type {type(value).__name__}, which JSON does not have "
                    f"({error}); remove the column, or write it as text or numbers"
                ) from error
        lines.append(_json({str(name): value for name, value in row.items()}) + "\n")
    return "".join(lines).encode("utf-8", "surrogatepass")


def _json(value: Any) -> str:
    """Return a value as JSON, in which scalars and arrays of numpy are numbers and lists."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=lambda array: array.tolist())


def _guessed(file: Path, model: str | None, answer: str | None, domain: str | None) -> _Rows:
    """Guess what the columns of rows mean, as `brorl init` does."""
    path = str(file)
    try:
        with source_words(_of_rows):
            guess = guess_meaning(path, None, answer, domain)
            if domain is not None:  # its function gets the column as it is
                guess = guess._replace(source=guess.source.model_copy(update={"answer_after": None}))
            starter = make_starter(path, model, guess, read_source(guess.source), "")
    except UserError as error:
        raise UserError(str(error).replace(path, "data")) from None  # the caller has given no file
    recipe = parse_yaml(recipe_text(starter, path), path)
    recipe.pop("verification", None)  # the functions are given
    (source,) = settings_of_data(starter)["data.sources"]
    return _Rows(recipe, source, (f"data: {counted(len(starter.reading.questions), 'question')}", *guesses(starter)))


def _of_rows(key: str, value: object) -> str:
    """Return a setting of rows, whose columns have names that are recognized."""
    if key == "domain":
        return "a recipe with domain: math" if value == "math" else "reward=FUNCTION"
    return f"the column name {key.removesuffix('_column')}" if key.endswith("_column") else in_recipe(key, value)


def _with_answers(rows: list[dict[str, Any]], needed: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows with the columns that a function needs as their reference answer, and its column.

    The column is None where it has to be guessed.
    """
    if len(needed) < 2:
        return rows, next((name for name in needed if name in rows[0]), None)
    for number, row in enumerate(rows, 1):
        if missing := [name for name in needed if name not in row]:
            raise UserError(
                f"reward: the function needs the column {missing[0]!r}, and row {number} of the data has none "
                f"(columns: {', '.join(map(str, row))}); rename the parameter or the column"
            )
    return [{**row, _COLUMNS: _json({name: row[name] for name in needed})} for row in rows], _COLUMNS


def _check_columns(terms: Sequence[Term], answer: str, row: Mapping[str, Any]) -> None:
    """Refuse a further function that needs another column than the answer, which all functions get."""
    given = list(json.loads(row[_COLUMNS])) if answer == _COLUMNS else [answer]
    for term in terms[1:]:
        needed = _required_columns(term.function)
        if len(given) > 1:
            fits = len(needed) != 1 and {*needed} <= {*given}
        else:  # one column, by its name or another one
            fits = len(needed) < 2 and all(name == answer or name not in row for name in needed)
        if not fits:
            raise UserError(
                f"reward: {term.name} needs {', '.join(needed)}, and {terms[0].name}, the first function, "
                f"{', '.join(given)}; all functions get the same columns: give each of them the same parameters"
            )


def _required_columns(function: Reward) -> list[str]:
    """Return the columns without which a reward function with TRL's signature cannot be called."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if "completions" not in parameters:
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = ("completions", "prompts", "completion_ids", "trainer_state")
    return [
        name for name, one in parameters.items()
        if name not in known and one.kind in kinds and one.default is inspect.Parameter.empty
    ]  # fmt: skip


def terms_of(reward: Rewards) -> tuple[Term, ...]:
    """Return the functions of a reward with their names and weights, the first one first.

    Raises:
        UserError: If it is no function and no mapping of names to functions with or without weights.
    """
    entries = {getattr(reward, "__name__", "reward"): reward} if callable(reward) else reward
    if not isinstance(entries, Mapping) or not entries:
        raise UserError(
            f"reward: expected a function or a mapping of names to functions, got {reward!r:.80}; give several as "
            "{'right': f, 'brief': (g, 0.2)}"
        )
    terms = []
    for name, entry in entries.items():
        function, weight = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, 1.0)
        if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(
                f"reward: expected a function or (function, weight) as {name!r}, got {entry!r:.80}; give several as "
                "{'right': f, 'brief': (g, 0.2)}"
            )
        terms.append(Term(str(name), function, float(weight)))
    if not terms[0].weight > 0:
        raise UserError(f"reward: the first term, {terms[0].name}, decides what is correct; give it a weight above 0")
    return tuple(terms)


def _reward_settings(terms: Sequence[Term], config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Return the settings of a reward, which is the weighted sum of its terms, for every domain of the training data.

    The first one is the verifier; its weight is a factor of all, by which the others are divided.
    """
    first, *others = terms
    domains = [_domain(source) for source in config.data.sources]
    functions = config.verification.functions | dict.fromkeys(domains, _path(first, folder))
    settings: dict[str, Any] = {"verification.functions": functions}
    if others:
        own = {term.name: {"function": _path(term, folder), "weight": term.weight / first.weight} for term in others}
        settings |= {"rewards.terms": own, "rewards.partial_credit": True}
    if first.weight != 1:
        settings["rewards.domain_weights"] = config.rewards.domain_weights | dict.fromkeys(domains, first.weight)
    return settings


def _domain(source: Any) -> str:
    if getattr(source, "layout", None) or getattr(source, "domain_column", None):
        raise UserError(
            f"reward: the rows of {source.label} name their domains; name the function for each of them instead: "
            "verification={'functions': {'math': 'rewards.py:reward'}}"
        )
    return str(getattr(source, "domain", source.kind))


def _path(term: Term, folder: Path) -> str:
    """Return the path of a function; one that is in no file is written into one."""
    path = importable_path(term.function)
    if path is None:
        text = source_of(term.function)
        file = folder / f"reward_{blake2b(text.encode(), digest_size=4).hexdigest()}.py"
        _write(file, text.encode())
        path = f"{file.absolute()}:{term.function.__name__}"
    return path
