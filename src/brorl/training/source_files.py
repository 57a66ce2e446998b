"""Files outside the run directory that a resumed run reads again: the adapters' base model and the user's functions.

A base model on the hub is identified by its commit. Modules that the user's functions import are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from brorl.config.settings import TrainConfig
from brorl.model.source import find_model
from brorl.storage import function_file, size_and_sum

_BASE = "base model"
_CONFIGS = ("config.json", "generation_config.json")


def fingerprints(config: TrainConfig, model: str) -> dict[str, str]:
    """Return the size and checksum of each file, under a name that stays the same if the base model moves.

    `model` is the model or checkpoint whose weights are loaded.
    """
    sums = {}
    for name, file in _files(config, model).items():
        with suppress(OSError):  # reported where the file is used
            sums[name] = size_and_sum(file)
    return sums


def changed_files(before: Mapping[str, str], config: TrainConfig, model: str) -> list[str]:
    """Return the path and name of each file that has changed since `before`, the `fingerprints` when the run began."""
    files = _files(config, model)
    now = fingerprints(config, model)
    changed = [name for name, sums in before.items() if now.get(name) != sums]
    return [f"{files[name]} ({name})" if name in files else name for name in changed]


def _files(config: TrainConfig, model: str) -> dict[str, Path]:
    functions = {setting: function_file(path) for setting, path in config.own_functions.items()}
    files = {setting: file for setting, file in functions.items() if file is not None}
    if config.adapters is None:  # a checkpoint contains all weights
        return files
    base = Path(find_model(model).path)
    weights = [*base.glob("*.safetensors")] or [*base.glob("*.bin")]
    configs = [base / name for name in _CONFIGS if (base / name).exists()]
    return files | {f"{_BASE}: {file.name}": file for file in sorted([*weights, *configs])}
