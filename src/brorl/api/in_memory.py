"""Turn in-memory rows and functions into files and settings: `train(data=rows, reward=function, tools=[function])`.

Rows become JSON Lines. A function defined in an imported file is referenced by path; any other function is pickled. The
caller passes a folder for the files. A run keeps them in its directory so it can be resumed.
"""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import cloudpickle

from brorl.api.arguments import resolve_checkpoint, resolve_config
from brorl.config.reading import ConfigOrPath, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, first_line
from brorl.format import counted
from brorl.prompts.arrow import arrow_rows, printed
from brorl.runs import RUNS
from brorl.storage import replace_file, storage_errors
from brorl.verification.sandbox.inside.calling import columns_of_verl, required_columns

FOLDER = "given"
"""The subfolder of a run directory that contains these files."""
_DOMAIN = "own"  # domain of rows verified by a given function
_COLUMNS = "reward_columns"  # the reference answer with all columns, if the functions read several
_SEVERAL = "give several as {'right': f, 'brief': (g, 0.2)}"
Reward: TypeAlias = Callable[..., object]
Rewards: TypeAlias = "Reward | Mapping[str, Reward | tuple[Reward, float]]"


class Term(NamedTuple):
    """One function of the reward. The first term decides whether a response is correct; the others are added."""

    name: str
    function: Reward
    weight: float


class ResolvedRecipe(NamedTuple):
    """A recipe with its in-memory rows and functions stored in files."""

    recipe: ConfigOrPath  # the given recipe, or a first recipe for the rows
    config: TrainConfig  # its settings with all overrides
    lines: tuple[str, ...]  # lines about the guesses


def resolve_in_memory(
    recipe: ConfigOrPath | None, overrides: Mapping[str, Any], reward: Rewards | None, folder: Path
) -> ResolvedRecipe:
    """Write the given rows and functions to a folder, and return settings that refer to the files.

    The recipe defaults to what `brorl init` writes for the rows, or to quickstart without rows. In the overrides,
    `data` may be rows, and `tools` a list of functions.
    """
    settings = dict(overrides)
    if isinstance(settings.get("tools"), list | tuple):
        settings["tools.functions"] = _tool_paths(settings.pop("tools"), folder)
    terms = () if reward is None else terms_of(reward)
    lines: tuple[str, ...] = ()
    if _is_rows(settings.get("data")):
        rows = _rows_of(settings.pop("data"))
        first, lines = _recipe_of_rows(rows, terms, settings, folder.absolute() / "rows.jsonl")
        if recipe is None:
            recipe = first
        else:
            settings = {"data.sources": first["data.sources"], **settings}
    recipe = "quickstart" if recipe is None else recipe
    config = resolve_config(recipe, settings)
    if terms:
        config = resolve_config(config, _reward_settings(terms, config, folder))
    return ResolvedRecipe(recipe, config, lines)


def _recipe_of_rows(
    rows: list[dict[str, Any]], terms: Sequence[Term], settings: Mapping[str, Any], file: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write rows to a file; return a first recipe for it, with one source, and lines about the guesses."""
    needed = _needed_columns(terms[0].function, rows) if terms else []
    text, answer = _text(rows, needed)
    _write(file, text)
    model = settings.get("model")
    tools = settings.get("tools.functions", {})
    first, lines = _guessed(file, None if model is None else str(model), answer, bool(terms), tools)
    (source,) = first["data.sources"]
    _check_columns(terms, needed if len(needed) > 1 else [source["answer_column"]], rows[0])
    return first, lines


def rows_to_evaluate(data: Any, checkpoint: str | Path) -> tuple[str, tuple[str, ...]]:
    """Store rows in `runs/evaluations` under a name made from their content, and return `data` for an evaluation.

    Columns have the same roles as in the rows that trained the checkpoint's run. If it was not trained on rows, the
    roles are guessed, and the returned lines describe the guesses.
    """
    recipe = resolve_checkpoint(str(checkpoint)).recipe
    sources = [] if recipe is None else read_recipe(recipe).get("data", {}).get("sources", [])
    trained = next((source for source in sources if source.get("domain") == _DOMAIN), None)
    answer = None if trained is None else trained["answer_column"]
    needed = []
    if trained is not None and answer == _COLUMNS:
        with storage_errors(Path(trained["path"])):
            first, _, _ = Path(trained["path"]).read_text("utf-8", "surrogatepass").partition("\n")
        needed = list(json.loads(json.loads(first)[_COLUMNS]))
    text, _ = _text(_rows_of(data), needed)
    name = f"rows-{blake2b(text, digest_size=4).hexdigest()}"
    file = (RUNS / "evaluations" / f"{name}.jsonl").absolute()
    _write(file, text)
    recipe_of_rows, lines = _guessed(file, None, answer, trained is not None, {})
    (source,) = recipe_of_rows["data.sources"]
    return json.dumps({**source, "name": name}), lines


def moved(config: TrainConfig, old: Path, new: Path) -> TrainConfig:
    """Copy a folder's files to a new folder, and return the config with their new paths."""
    files = sorted(old.iterdir()) if old.is_dir() else []
    text = json.dumps(config.model_dump(mode="json"))
    for file in files:
        _write(new / file.name, file.read_bytes())
        before, after = (json.dumps(str(path.absolute() / file.name))[1:-1] for path in (old, new))
        text = text.replace(before, after)
    return TrainConfig.model_validate(json.loads(text)) if files else config


def _write(file: Path, content: bytes) -> None:
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def _is_rows(data: object) -> bool:
    """Return whether `data` contains rows rather than settings of the `data` section."""
    if isinstance(data, Mapping):
        return any(hasattr(value, "to_list") for value in data.values())  # True for a datasets.DatasetDict
    return not isinstance(data, str | Path | None) and not hasattr(data, "model_dump")


def _rows_of(data: Any) -> list[dict[str, Any]]:
    rows: list[Any] = []
    if hasattr(data, "iloc"):  # pandas.DataFrame, where NaN means a missing value
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
        kinds = {name: str(kind) for name, kind in data.dtypes.items()}
        rows = [{name: printed(value, kinds[name]) for name, value in row.items()} for row in rows]
    elif hasattr(data, "to_batches"):  # pyarrow.Table
        rows = [row.values for row in arrow_rows(data.to_batches(), "data", None, None)]
    elif hasattr(data, "to_list"):  # datasets.Dataset
        is_own = data.format["type"] == "custom"  # the rows come from a user function
        batches = [] if is_own else data.with_format("arrow").iter(batch_size=1024)
        rows = list(data) if is_own else [row.values for row in arrow_rows(batches, "data", None, None)]
    elif isinstance(data, Iterable) and not isinstance(data, bytes | Mapping):
        rows = list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"data: expected a datasets.Dataset, a list of dicts, a data frame or a table with at least one row, got "
            f"{type(data).__name__}; choose a split of a DatasetDict, such as dataset['train']"
        )
    return [dict(row) for row in rows]


def _text(rows: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> tuple[bytes, str | None]:
    """Return rows as JSON Lines, and the name of the answer column (None: guess it).

    If a function needs several columns, they are combined as an object in a new column.
    """
    lines = []
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            try:
                _json(value)
            except (TypeError, ValueError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"data: row {number} has {name!r} of type {type(value).__name__}, which JSON cannot represent "
                    f"({error}); remove the column, or convert it to text or numbers"
                ) from error
        missing = [name for name in needed if name not in row] if len(needed) > 1 else []
        if missing:
            raise UserError(
                f"reward: the function needs the column {missing[0]!r}, which row {number} of the data does not have "
                f"(columns: {', '.join(map(str, row))}); rename the parameter or the column"
            )
        more = {_COLUMNS: _json({name: row[name] for name in needed})} if len(needed) > 1 else {}
        lines.append(_json({**{str(name): value for name, value in row.items()}, **more}) + "\n")
    answer = _COLUMNS if len(needed) > 1 else next((name for name in needed if name in rows[0]), None)
    return "".join(lines).encode("utf-8", "surrogatepass"), answer


def _json(value: Any) -> str:
    """Return a value as JSON; numpy and torch scalars and arrays become numbers and lists."""

    def plain(array: Any) -> Any:
        return printed(array.tolist(), str(array.dtype))

    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain)


def _guessed(
    file: Path, model: str | None, answer: str | None, has_function: bool, tools: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a first recipe for the rows in a file, with one source, and lines about the guesses."""
    from brorl.api.first_recipe import make_first_recipe  # needed only for rows
    from brorl.prompts.file_questions import read_commas, read_source
    from brorl.prompts.guess import guess_meaning

    path = str(file)
    try:
        guess = guess_meaning(path, None, answer, _DOMAIN if has_function else None)
        if has_function:  # the function gets the column unchanged
            guess = guess._replace(source=guess.source.model_copy(update={"answer_after": None}))
        reading = read_commas(read_source(guess.source), {guess.domain})
        first = make_first_recipe(path, model, guess, reading, tools)
    except UserError as error:  # the caller passed rows, not this file
        advice = "rows have no settings: rename their columns, or give `reward=FUNCTION`"
        raise UserError(f"{str(error).replace(path, 'data')}; {advice}") from None
    recipe = {name: value for name, value in first.settings.items() if name != "verification.functions"}
    return recipe, (f"data: {counted(len(first.reading.questions), 'question')}", *first.guesses())


def _check_columns(terms: Sequence[Term], first: Sequence[str], row: Mapping[str, Any]) -> None:
    """Reject a later function that needs columns other than `first`, those of the first function."""
    for term in terms[1:]:
        needed = required_columns(term.function)
        if needed and ((len(needed) > 1) != (len(first) > 1) or not {*needed} & {*row} <= {*first}):
            raise UserError(
                f"reward: {term.name} needs {', '.join(needed)}, but {terms[0].name}, the first function, "
                f"needs {', '.join(first)}; all functions get the same columns: give them the same parameters"
            )


def _needed_columns(function: Reward, rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns that a function needs. For a verl function, flatten rows in verl's format."""
    columns = columns_of_verl(function)
    if not columns or not {*columns[1:]} & {*rows[0]}:
        return required_columns(function)
    for row in rows:
        truth = row.get("reward_model")
        if "ground_truth" not in row and isinstance(truth, Mapping) and "ground_truth" in truth:
            row["ground_truth"] = truth["ground_truth"]
    return [name for name in columns if name == "ground_truth" or name in rows[0]]


def terms_of(reward: Rewards) -> tuple[Term, ...]:
    """Return the terms of a reward in order. The reward is a function or `{"right": f, "brief": (g, 0.2)}`."""
    entries = {getattr(reward, "__name__", "reward"): reward} if callable(reward) else reward
    if not isinstance(entries, Mapping) or not entries:
        raise UserError(
            f"reward: expected a function or a mapping of names to functions, got {reward!r:.80}; {_SEVERAL}"
        )
    terms = []
    for name, entry in entries.items():
        function, weight = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, 1.0)
        if not callable(function) or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(
                f"reward: expected a function or (function, weight) for {name!r}, got {entry!r:.80}; {_SEVERAL}"
            )
        terms.append(Term(str(name), function, float(weight)))
    if not terms[0].weight > 0:
        raise UserError(f"reward: the first term, {terms[0].name}, decides what is correct; give it a weight above 0")
    return tuple(terms)


def _reward_settings(terms: Sequence[Term], config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Return settings that set every training domain's reward to the weighted sum of the terms.

    The first term is the verifier. Its weight scales the whole reward, so the other weights are divided by it.
    """
    first, *added = terms
    for source in config.data.sources:
        if getattr(source, "layout", None) or getattr(source, "domain_column", None):
            raise UserError(
                f"reward: the rows of {source.label} name their own domains; name a function for each of them: "
                "verification={'functions': {'math': 'rewards.py:reward'}}"
            )
    domains = [str(getattr(source, "domain", source.kind)) for source in config.data.sources]
    functions = config.verification.functions | dict.fromkeys(domains, _path(first.function, folder, "reward"))
    settings: dict[str, Any] = {"verification.functions": functions}
    if added:
        added_terms = {
            term.name: {"function": _path(term.function, folder, "reward"), "weight": term.weight / first.weight}
            for term in added
        }
        settings |= {"rewards.terms": added_terms, "rewards.partial_credit": True}
    if first.weight != 1:
        settings["rewards.domain_weights"] = config.rewards.domain_weights | dict.fromkeys(domains, first.weight)
    return settings


def _tool_paths(tools: Sequence[Any], folder: Path) -> dict[str, str]:
    """Return the paths of tool functions, by name."""
    paths: dict[str, str] = {}
    for tool in tools:
        if not callable(tool) or inspect.isclass(tool) or inspect.ismethod(tool):
            raise UserError(
                f"tools: expected a list of functions, but it contains {tool!r:.80}; define each tool with `def`"
            )
        name = _name_of(tool)
        if not name.isidentifier():
            raise UserError(f"tools: {name} has no name that a response could call; define it with `def`")
        if name in paths:
            raise UserError(f"tools: two functions have the name {name}; rename one of them")
        if inspect.isfunction(tool) and file_path(tool) is None:  # a pickle loses the names in string annotations
            tool.__annotations__ = get_type_hints(tool, include_extras=True)
        paths[name] = _path(tool, folder, "tools")
    return paths


def _path(function: Callable[..., object], folder: Path, argument: str) -> str:
    """Return the path of a function, either in its module's file or in a pickle written to the folder."""
    path = file_path(function)
    if path is None:
        content = pickled(function, argument)
        file = folder / f"{argument}_{blake2b(content, digest_size=4).hexdigest()}.pkl"
        _write(file, content)
        path = f"{file.absolute()}:{_name_of(function)}"
    return path


def file_path(function: Callable[..., object]) -> str | None:
    """Return `file.py:function` for a top-level definition in a module outside any package, else None."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    name = getattr(function, "__qualname__", "")
    if module is None or file is None or module.__name__ == "__main__" or module.__package__:
        return None
    value: Any = module
    for attribute in name.split("."):
        value = getattr(value, attribute, None)
    return f"{Path(file).absolute()}:{name}" if value is function and file.endswith(".py") else None


def pickled(function: Callable[..., object], argument: str = "reward") -> bytes:
    """Return a function and everything it captures as bytes, to be read by `load` in trusted workers.

    Definitions in imported modules are pickled by reference. The bytes include the folders of `sys.path`, so workers
    can import these modules even if the run resumes from a different working directory.

    Raises:
        UserError: If the function cannot be pickled; the error names the captured object at fault.
    """
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # a captured object's `__reduce__` can raise anything
        raise UserError(
            f"{argument}: {_unpicklable(function, error)}; worker processes get a copy of the function: make the "
            "object inside the function, or import the function from a file"
        ) from error
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    return pickle.dumps({"python": sys.version_info[:2], "folders": folders, "function": content})


def _unpicklable(function: Callable[..., object], error: Exception) -> str:
    """Explain which captured object prevents a function from being pickled."""
    waiting, seen = [function], [function]
    while waiting:
        user = waiting.pop()
        for name, value in _captured(user).items():
            problem = _pickling_problem(value)
            if problem is not None and not inspect.isfunction(value):
                kind = type(value).__name__
                return f"{_name_of(user)} uses {name!r} of type {kind}, which cannot be pickled ({problem})"
            if problem is not None and value not in seen:  # something this function captures is at fault
                waiting.append(value)
                seen.append(value)
    return f"{_name_of(function)} cannot be pickled ({first_line(error)})"


def _captured(function: Callable[..., object]) -> dict[str, Any]:
    """Return the variables pickled with a function, or the attributes of any other callable."""
    if not inspect.isfunction(function):
        return dict(getattr(function, "__dict__", {}))
    parameters = inspect.signature(function).parameters.values()
    outer = inspect.getclosurevars(function)
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    return {**defaults, **outer.globals, **outer.nonlocals}


def _pickling_problem(value: Any) -> str | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return first_line(error)
    return None


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
