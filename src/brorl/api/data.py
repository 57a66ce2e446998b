"""`data`: what the sources of a recipe become; also the body of `brorl data`. It loads no model and writes nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.api.settings import ConfigOrPath, resolve_config
from brorl.config.reading import QUESTION_FILES
from brorl.errors import UserError
from brorl.paths import exists, is_file, is_folder

if TYPE_CHECKING:
    from brorl.api.data_result import DataResult

SHOWN = 10


def data(
    config_or_path: ConfigOrPath = "quickstart", *, show: int = SHOWN, progress: bool = True, **overrides: Any
) -> DataResult:
    """Read and check the sources of a recipe, and count their questions, lengths, domains and dropped rows.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file or a run directory, nested settings, or a config;
            or a file or folder of questions, which is read with the default columns and domain.
        show: Number of prompts in the result, 0 or more, spread over the sources.
        progress: Show the current work.
        overrides: Settings that replace those of the recipe, nested or by dotted name.

    Returns:
        The counts and the prompts. Lengths are in tokens if the tokenizer of the recipe's model can be loaded. They are
        in characters otherwise, and for a file of questions without `model` in the overrides.

    Raises:
        UserError: If a setting is wrong, a source cannot be read, a domain has no verifier, or no response can match a
            reference answer.
    """
    if show < 0:
        raise UserError(f"--show: expected a number of at least 0, not {show}")

    from brorl.console.screen import Screen

    with Screen(f"brorl {brorl.__version__}", silent=not progress) as screen:
        if isinstance(config_or_path, str | Path) and is_file(Path(config_or_path) / "config.yaml"):
            config_or_path = Path(config_or_path) / "config.yaml"  # of a run
        file = _questions_file(config_or_path)
        try:
            config = resolve_config(config_or_path if file is None else _recipe_of(file), overrides)

            from brorl.assemble.data import check_first_rows

            check_first_rows(config)

            from brorl.api.data_result import describe_data  # imports torch

            result = describe_data(config, show, file is None or "model" in overrides, screen.observe)
        except UserError as error:
            if file is None:
                raise
            raise UserError(_of_file(str(error), file)) from error
    return result if file is None else replace(result, notes=(*result.notes, _hint(file)))


def _questions_file(path: ConfigOrPath) -> str | None:
    """Return the path of a file or folder of questions that stands in place of a recipe; None for a recipe.

    Raises:
        UserError: If it does not exist.
    """
    if not isinstance(path, str | Path):
        return None
    local = Path(path).expanduser()
    if not str(path).strip():
        raise UserError("RECIPE is empty; give the path of a YAML file or a built-in name")
    if not is_folder(local) and local.suffix.lower() not in QUESTION_FILES:
        return str(path) if local.suffix.lower() == ".json" and _is_list(local) else None
    if not exists(local):
        raise UserError(f"there is no file or folder {path} (working folder {Path.cwd()}); fix RECIPE")
    return str(path)


def _is_list(file: Path) -> bool:
    """Return whether a JSON file holds a list, and not the settings of a recipe."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(1024).lstrip().startswith((b"[", b"\xef\xbb\xbf["))
    return False


def _of_file(message: str, file: str) -> str:
    """Return an error of a file of questions, in which no setting of a recipe can be wrong."""
    message = message.replace("data.sources[].path", "RECIPE")
    return f"{message} ({_hint(file)})" if "data.sources[]" in message else message


def _recipe_of(file: str) -> dict[str, Any]:
    """Return a recipe with the questions of a file and no evaluation, so that no question is held out."""
    return {"data": {"sources": [file], "held_out_fraction": 0.0}, "evaluation": {"num_prompts": 0}}


def _hint(file: str) -> str:
    return (
        f"{file} is read with the columns prompt and answer and the domain math; for others, write a recipe such as "
        f"data: {{sources: {{path: {file}, domain: NAME, answer_column: NAME}}}}, or run: brorl init {file}"
    )
