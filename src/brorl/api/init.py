"""`brorl init`: write a first recipe for a data file, with a comment on every setting. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from brorl.api.first_recipe import make_first_recipe
from brorl.config.reading import make_config, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.errors import StorageError, UserError, option
from brorl.model.settings import check_folder, shipped_folder
from brorl.prompts.file_questions import read_commas, read_source
from brorl.prompts.guess import guess_meaning
from brorl.runs import RUNS
from brorl.storage import is_file, is_folder
from brorl.tools.file_functions import FileFunctions


def init(
    data_file: str,
    *,
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
        data_file: JSONL, JSON, CSV or Parquet file, or a folder or pattern of such files.
        output: Recipe to write.
        model: Model folder or hub id (default: a small Qwen model; quickstart for countdown puzzles).
        prompt_column: Column of the question (default: guessed).
        answer_column: Column of the reference answer (default: guessed).
        options_column: Column of the multiple-choice options; may be repeated, for one column per option (default:
            guessed).
        first_option: Index of the first option, 0 or 1, if the answer is an index (default: found in the data).
        domain: Verifier: math, science, countdown, or a name for your own (default: guessed).
        tools: A Python file; its functions with types and a docstring become tools (default: none).

    Raises:
        UserError: If the data does not fit, or `output` exists.
    """
    if model is not None:
        _check_model(model)
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} already exists; choose a different name with {option('output')}")
    columns: dict[str, Any] = {
        "prompt_column": prompt_column, "answer_column": answer_column, "domain": domain,
        "options_column": options_column, "first_option": first_option,
    }  # fmt: skip
    functions = FileFunctions({}, {}) if tools is None else FileFunctions.of(tools)
    guess = guess_meaning(data_file, **columns)
    reading = read_commas(read_source(guess.source), {guess.domain})
    recipe = make_first_recipe(data_file, model, guess, reading, functions.tools)
    _write(output, recipe.text(str(output)))
    print("\n".join([*functions.lines(), *recipe.summary(output)]))  # noqa: T201


def _check_model(model: str) -> None:
    """Reject a model name that matches or nearly matches a local folder that contains no model."""
    if shipped_folder(model) is not None:
        return
    folder = Path(model).expanduser()
    argument = option("model", model)
    if folder.is_dir() and not is_file(folder / "config.json"):
        checkpoints = sorted(folder.glob("checkpoints/*/config.json"))
        fix = f"give {option('model', checkpoints[-1].parent)}" if checkpoints else "give the folder that has it"
        raise UserError(f"{argument}: the folder has no config.json, so it is not a model; {fix}")
    check_folder(model)
    above = folder.parent
    if not folder.exists() and "@" not in model and (above == RUNS or (above != Path() and is_folder(above))):
        folders = sorted(path.name for path in above.iterdir() if path.is_dir()) if is_folder(above) else []
        near = get_close_matches(folder.name, folders, 1)
        meant = f"did you mean {above / near[0]}?" if near else "fix the name"
        raise UserError(
            f"{argument}: there is no folder {model}, and {above} is a folder here; {meant} (for a model on the "
            "hub, add @main)"
        )


def _write(output: Path, text: str) -> TrainConfig:
    """Check a recipe and write it."""
    config = make_config(parse_yaml(text, str(output)), {}, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {output}: {error.strerror}; change {option('output')}") from error
    return config
