"""`brorl init`: writes a first recipe for the user's own data file, with a comment on every setting.

A config of TRL or verl becomes a recipe with the same numbers. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from brorl.api.arguments import check_cheaply
from brorl.api.first_recipe import FUNCTION_FILE, make_first_recipe
from brorl.config.conversion import Conversion
from brorl.config.from_trl import from_trl
from brorl.config.from_verl import from_verl
from brorl.config.reading import make_config, nested_settings, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.errors import StorageError, UserError, in_recipe, option, source_words
from brorl.format import counted, shell_command
from brorl.model.settings import check_folder, shipped_folder
from brorl.prompts.file_questions import read_commas, read_source
from brorl.prompts.guess import guess_meaning
from brorl.prompts.row_readers import is_local
from brorl.prompts.settings import FileSource
from brorl.runs import RUNS
from brorl.storage import dotted_items, is_file, is_folder
from brorl.tools.file_functions import FileFunctions

_OF_TRL = {
    "num_generations", "max_completion_length", "scale_rewards", "loss_type", "epsilon", "beta", "num_iterations",
    "steps_per_generation", "reward_funcs", "mask_truncated_completions",
}  # fmt: skip


def convert(config: Mapping[str, Any], source: str, num_prompts: int | None = None) -> Conversion:
    """Convert a config of TRL or verl, nested or by dotted name, as the table in from_trl_or_verl.md says.

    A setting that the config leaves out gets the other trainer's default where that differs from ours. `source` names
    the config in messages. `num_prompts` turns epochs into steps; it is None if the training data was not read.
    """
    given = dict(dotted_items(config))
    is_verl = any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in given)
    if not is_verl and not _OF_TRL & set(given):
        raise UserError(
            f"{source} is neither a config of TRL's GRPOTrainer (num_generations, ...) nor of verl "
            "(actor_rollout_ref, ...)"
        )
    try:
        return from_verl(given, num_prompts) if is_verl else from_trl(given, num_prompts)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source} has a value of a wrong type: {error}; give the resolved value") from error


def _read_trainer_config(file: Path) -> dict[str, Any]:
    try:
        config = parse_yaml(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{option('from', file)}: {getattr(error, 'strerror', None) or error}; give a YAML config"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{option('from', file)} is not a mapping of settings; give the YAML config of TRL or verl")
    return config


def with_data(conversion: Conversion, own: Mapping[str, Any]) -> Conversion:
    """Return a conversion with some settings replaced; for other data, `own` has all settings that depend on it."""
    if "data.sources" not in own:
        return replace(conversion, settings={**conversion.settings, **own})
    of_its_data = ("verification.functions", "evaluation.sources", "data.held_out_fraction")
    settings = {name: value for name, value in conversion.settings.items() if name not in of_its_data}
    if weights := settings.get("rewards.domain_weights"):
        (weight,) = weights.values()
        settings["rewards.domain_weights"] = {source.get("domain"): weight for source in own["data.sources"]}
    return replace(conversion, settings={**settings, **own})


def _write_conversion(conversion: Conversion, output: Path) -> list[str]:
    """Write the recipe, with remarks for the user at its top; return the remarks, the checks and the next commands.

    The checks need no model: they cover settings, files, and the rows of data on this machine.
    """
    from ruamel.yaml import YAML

    from brorl.training.questions import build_questions, check_split  # imports numpy

    trainer, left, others = conversion.trainer, conversion.without_counterpart, conversion.not_read
    stream, remarks = StringIO(), [*conversion.remarks]
    remarks += [f"without a counterpart, and left out: {', '.join(left)}"] if left else []
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(nested_settings(conversion.settings, str(output)), stream)
    top = [f"# From a config of {trainer}. Check it: brorl check {output}. Train it: brorl train {output}"]
    top += [f"# - {remark}" for remark in (*remarks, *([f"not read: {', '.join(others)}"] if others else []))]
    config = _write(output, "\n".join([*top, stream.getvalue()]))
    lines = [f"wrote {output}, from a config of {trainer}: {len(conversion.settings)} settings"]
    lines += [f"  {remark}" for remark in remarks]
    lines += [f"  {counted(len(others), 'other key')} not read; the recipe lists them at its top"] if others else []
    sources = (*config.data.sources, *config.evaluation.sources)
    far = [one.path for one in sources if isinstance(one, FileSource) and not is_local(one.path)]
    try:
        check_cheaply(config)
        if not far:
            check_split(config, build_questions(config))
        rows = f"brorl check reads {', '.join(dict.fromkeys(far))}" if far else "every row of the data can be used"
        lines.append(f"  checked: the settings fit together; {rows}")
    except UserError as error:
        lines.append(f"  fix before training: {error}")
    return [
        *lines,
        f"check the recipe: {shell_command('check', output)}",
        f"train with it: {shell_command('train', output)}",
    ]


def _num_prompts(sources: list[dict[str, Any]]) -> int | None:
    """Return the number of distinct questions; None if a source is not on this machine or cannot be read."""
    try:
        files = [FileSource(**source) for source in sources]
        if not files or not all(is_local(file.path) for file in files):
            return None
        return sum(len(read_source(file).questions) for file in files)
    except (UserError, ValueError):  # the checks report the problem
        return None


_OPTIONS = {  # setting of a source -> placeholder of its option in messages
    **dict.fromkeys(("prompt_column", "answer_column", "options_column", "domain"), "NAME"),
    "first_option": "N",
}


def init(
    data_file: str | None = None,
    *,
    trainer_config: str | Path | None = None,
    output: str | Path = "mine.yaml",
    model: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    options_column: Sequence[str] = (),
    first_option: int | None = None,
    domain: str | None = None,
    tools: str | None = None,
) -> None:
    """Read the data, write the recipe, and print the guesses.

    Args:
        data_file: JSONL, JSON, CSV or Parquet file, or a folder or pattern of such files (default: the data of
            --from).
        trainer_config: A YAML config of TRL's GRPOTrainer or of verl, to be written as a recipe.
        output: Recipe to write.
        model: Model folder or hub id (default: a small Qwen model; quickstart for countdown puzzles).
        prompt_column: Column of the question (default: guessed).
        answer_column: Column of the reference answer (default: guessed).
        options_column: Column of the options of multiple choice; may be repeated, for one column per option (default:
            guessed).
        first_option: Index of the first option, 0 or 1, if the answer is an index (default: found in the data).
        domain: Verifier: math, science, countdown, or a name for your own (default: guessed).
        tools: A Python file whose functions become tools, if they have types and a docstring (default: none).

    Raises:
        UserError: If the data does not fit, or `output` exists.
    """
    if model is not None:
        _check_model(model)
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} already exists; choose another name with {option('output')}")
    columns: dict[str, Any] = {
        "prompt_column": prompt_column, "answer_column": answer_column, "domain": domain,
        "options_column": options_column, "first_option": first_option,
    }  # fmt: skip
    function, first, conversion = f"{FUNCTION_FILE}:check", None, None
    found = FileFunctions({}, {}) if tools is None else FileFunctions.of(tools)
    if trainer_config is not None:
        given, name = _read_trainer_config(Path(trainer_config).expanduser()), str(Path(trainer_config).expanduser())
        conversion = convert(given, name)
        if not model and "model" not in conversion.settings:
            raise UserError(f"{name} names no model; give it, such as {option('model', 'Qwen/Qwen2.5-0.5B-Instruct')}")
        for of_domain, path in conversion.settings.get("verification.functions", {}).items():
            function, columns["domain"] = path, domain or of_domain
    if data_file is not None:
        with source_words(_as_option):
            guess = guess_meaning(data_file, **columns)
            reading = read_commas(read_source(guess.source), {guess.domain})
            first = make_first_recipe(data_file, model, guess, reading, function, found.tools)
    elif conversion is None or "data.sources" not in conversion.settings:
        source = "" if conversion is None else f": {name} names no data"
        raise UserError(f"give the file of your questions{source}, such as brorl init problems.jsonl")
    if conversion is not None:
        number = len(first.reading.questions) if first else _num_prompts(conversion.settings["data.sources"])
        own = {**(first.settings_of_data if first else {}), **({"model": model} if model else {})}
        own |= {"tools.functions": found.tools} if found.tools else {}
        lines = _write_conversion(with_data(convert(given, name, number), own), output)
    elif first is not None:
        _write(output, first.text(str(output)))
        lines = first.summary(output)
    print("\n".join([*found.lines(), *lines]))  # noqa: T201


def _check_model(model: str) -> None:
    """Refuse a model whose name is that of a folder here without a model, or that nearly is one."""
    if shipped_folder(model) is not None:
        return
    folder, given = Path(model).expanduser(), option("model", model)
    if folder.is_dir() and not is_file(folder / "config.json"):
        checkpoints = sorted(folder.glob("checkpoints/*/config.json"))
        fix = f"give {option('model', checkpoints[-1].parent)}" if checkpoints else "give the folder that has it"
        raise UserError(f"{given}: the folder has no config.json, which a model has; {fix}")
    with source_words(_as_option):
        check_folder(model)
    above = folder.parent
    if not folder.exists() and "@" not in model and (above == RUNS or (above != Path() and is_folder(above))):
        others = sorted(path.name for path in above.iterdir() if path.is_dir()) if is_folder(above) else []
        near = get_close_matches(folder.name, others, 1)
        meant = f"did you mean {above / near[0]}?" if near else "fix the name"
        raise UserError(
            f"{given}: there is no folder {model}, and {above} is a folder here; {meant} (for a model of the hub, add "
            "@main)"
        )


def _as_option(key: str, value: object) -> str:
    """Return the option or argument of `brorl init` that sets a setting of a source."""
    if key == "path":
        return "DATA_FILE" if value is None else f"DATA_FILE {value}"
    return (
        option(key.replace("_", "-"), _OPTIONS[key] if value is None else value)
        if key in _OPTIONS
        else in_recipe(key, value)
    )


def _write(output: Path, text: str) -> TrainConfig:
    """Check a recipe and write it."""
    config = make_config(parse_yaml(text, str(output)), {}, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {output}: {error.strerror}; choose another {option('output')}") from error
    return config
