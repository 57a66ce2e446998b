"""The models that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

_FOLDERS = {"quickstart": "quickstart_model", "plateau": "plateau_model"}


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped model; None for other names, and where a folder of that name takes precedence."""
    return Path(str(files("brorl").joinpath(_FOLDERS[name]))) if name in _FOLDERS and not Path(name).exists() else None
