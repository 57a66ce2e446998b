"""What the name of a model refers to, without importing transformers: a shipped model, a folder, or a hub id."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from brorl.errors import UserError
from brorl.paths import split_revision

_FOLDERS = {"quickstart": "quickstart_model", "plateau": "plateau_model"}


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped model; None for other names, and where a folder of that name takes precedence."""
    return Path(str(files("brorl").joinpath(_FOLDERS[name]))) if name in _FOLDERS and not Path(name).exists() else None


def check_folder(name: str) -> None:
    """Check that the folder of a model exists, if its name cannot be a hub id.

    Raises:
        UserError: If it does not, or is a file.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"model {name} is a file; set model to the Hugging Face folder that contains it")
    if name.startswith((".", "/", "~")) or split_revision(name)[0].count("/") > 1:
        raise UserError(f"model folder {name} does not exist; set model to a folder, a hub id, or quickstart")
