"""`brorl init`: a first recipe for the user's own data file, with a comment on every setting.

A config of TRL or verl becomes a recipe with its own numbers, and a taskset of `verifiers` a data file and its recipe.
Nothing is imported that needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brorl.api.first_recipe import FUNCTION_FILE, make_starter, recipe_text, settings_of_data, summary
from brorl.config.conversion import Conversion, convert
from brorl.config.reading import make_config, nested_settings, parse_yaml
from brorl.errors import StorageError, UserError
from brorl.prompts.files import read_source
from brorl.prompts.guess import guess_meaning
from brorl.storage import replace_file, storage_errors
from brorl.verification.domains.taskset import PREFIX, SCORE, read_taskset

_MOST_TASKS = 10_000  # of a taskset
_OPTIONS = ("prompt_column", "answer_column", "options_column", "first_option", "domain")  # of a source


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
    taskset_config: str | None = None,
) -> None:
    """Read the data, write the recipe, and print the guesses.

    Args:
        data_file: JSONL, JSON, CSV or Parquet file, or a folder or pattern of such files, or an installed taskset of
            the library verifiers: `verifiers:NAME` (default: the data of --from).
        trainer_config: A YAML config of TRL's GRPOTrainer or of verl, to be written as a recipe.
        output: Recipe to write.
        model: Model folder or hub id (default: a small Qwen model; quickstart for countdown puzzles).
        prompt_column: Column of the question (default: guessed).
        answer_column: Column of the reference answer (default: guessed).
        options_column: Column of the options of multiple choice; may be repeated, for one column per option (default:
            guessed).
        first_option: Index of the first option, 0 or 1, if the answer is an index (default: found in the data).
        domain: Verifier: math, science, countdown, or a name for your own (default: guessed).
        taskset_config: Settings of the taskset as YAML, such as {split: train}.

    Raises:
        UserError: If the data does not fit, or `output` exists.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} already exists; choose another name with --output")
    conversion = None if trainer_config is None else _conversion(Path(trainer_config).expanduser())
    own_model = {"model": model} if model else {}
    if conversion is not None and not own_model and "model" not in conversion.settings:
        raise UserError(f"{trainer_config} names no model; give it, such as --model Qwen/Qwen2.5-0.5B-Instruct")
    if data_file is None:
        if conversion is None or "data.sources" not in conversion.settings:
            named = "" if trainer_config is None else f": {trainer_config} names no data"
            raise UserError(f"give the file of your questions{named}, such as brorl init problems.jsonl")
        _write(output, _converted(conversion, str(output), own_model))
        print("\n".join(_conversion_summary(conversion, output)))  # noqa: T201
        return
    function = f"{FUNCTION_FILE}:check"
    if data_file.startswith(PREFIX):
        name, function = data_file.removeprefix(PREFIX), SCORE
        data_file = _write_tasks(name, taskset_config, output.parent)
        prompt_column, answer_column, domain = "prompt", "answer", name
    elif taskset_config is not None:
        raise UserError(f"--taskset-config is for tasksets, and {data_file} is a file; give {PREFIX}NAME, or remove it")
    try:
        guess = guess_meaning(data_file, prompt_column, answer_column, domain, options_column, first_option)
        if function == SCORE:  # answers are JSON
            source = guess.source.model_copy(update={"answer_after": None})
            guess = guess._replace(domain_reason="the rewards of the taskset", source=source)
        reading = read_source(guess.source)
    except UserError as error:  # it names settings of a recipe
        raise UserError(_as_options(str(error))) from error
    starter = make_starter(data_file, model, guess, reading, function)
    if conversion is None:
        _write(output, recipe_text(starter, str(output)))
        print("\n".join(summary(starter, output)))  # noqa: T201
        return
    _write(output, _converted(conversion, str(output), settings_of_data(starter) | own_model))
    print("\n".join(_conversion_summary(conversion, output)))  # noqa: T201


def _as_options(message: str) -> str:
    """Return an error about the settings of a source with the options of the command."""
    message = message.replace("data.sources[].path:", "DATA_FILE").replace("data.sources[].path", "DATA_FILE")
    for setting in _OPTIONS:
        option = f"--{setting.replace('_', '-')}"
        message = message.replace(f"data.sources[].{setting}:", option)
        message = re.sub(rf"(?<=give )data\.sources\[\]\.{setting}(?=$|;)", f"{option} NAME", message)
        message = message.replace(f"data.sources[].{setting}", option)
    return message


def _write(output: Path, text: str) -> None:
    """Check a recipe and write it."""
    make_config(parse_yaml(text, str(output)), {}, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {output}: {error.strerror}; choose another --output") from error


def _write_tasks(name: str, config: str | None, folder: Path) -> str:
    """Write the tasks of a taskset of `verifiers` into a data file beside the recipe, and return its path."""
    settings = {} if config is None else parse_yaml(config, "--taskset-config")
    if not isinstance(settings, dict):
        raise UserError(f"--taskset-config must be a mapping of settings, such as {{split: train}}, got {config!r}")
    file = folder / f"{Path(name).name}.jsonl"
    if file.exists():
        raise UserError(f"{file} already exists; remove it, or write the recipe into another folder with --output")
    rows = list(read_taskset(name, settings, _MOST_TASKS))
    with storage_errors(file, "run the command again"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    first = f"; they are its first {_MOST_TASKS:,}" if len(rows) == _MOST_TASKS else ""
    print(f"wrote {file}: {len(rows):,} tasks{first}")  # noqa: T201
    return str(file)


def _conversion(file: Path) -> Conversion:
    try:
        config = parse_yaml(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--from {file}: {getattr(error, 'strerror', None) or error}; give a YAML config") from error
    if not isinstance(config, dict):
        raise UserError(f"--from {file} is not a mapping of settings; give the YAML config of TRL or verl")
    return convert(config, str(file))


def _converted(conversion: Conversion, name: str, own: Mapping[str, Any]) -> str:
    """Return the recipe of another trainer's config as YAML; `own` has the settings that the data decides."""
    from io import StringIO

    from ruamel.yaml import YAML

    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(nested_settings({**conversion.settings, **own}, name), stream)
    lines = [f"# From a config of {conversion.trainer}. Check it: brorl check {name}. Train it: brorl train {name}"]
    lines += [f"# - {remark}" for remark in conversion.remarks]
    if conversion.without_counterpart:
        lines.append(f"# Without a counterpart, and left out: {', '.join(conversion.without_counterpart)}")
    return "\n".join([*lines, stream.getvalue()])


def _conversion_summary(conversion: Conversion, output: Path) -> list[str]:
    """Return what was converted, what was not, and the next commands."""
    left = conversion.without_counterpart
    return [
        f"wrote {output}, from a config of {conversion.trainer}: {len(conversion.settings)} settings",
        *(f"  {remark}" for remark in conversion.remarks),
        *([f"  without a counterpart, and left out: {', '.join(left)}"] if left else []),
        f"check the recipe: brorl check {output}",
        f"train with it: brorl train {output}",
    ]
