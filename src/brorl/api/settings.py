"""Settings from Python: a recipe's name, a file, a mapping or a config, with overrides, as one checked config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from brorl.config.reading import make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError

ConfigOrPath: TypeAlias = str | Path | Mapping[str, Any] | TrainConfig


def resolve_config(config_or_path: ConfigOrPath, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return the checked config of a recipe with some settings replaced.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file, nested settings, or a config.
        overrides: Settings that take precedence, nested (`{"evaluation": {"every": 5}}`) or by dotted name
            (`{"evaluation.every": 5}`). `budget.limit` without `steps` also replaces the recipe's `steps`.

    Raises:
        UserError: If there is no such recipe, or a setting is wrong.
    """
    replaced = _plain(overrides)
    if isinstance(config_or_path, TrainConfig):
        if not replaced:
            return config_or_path
        config_or_path = config_or_path.model_dump(mode="json")
    if isinstance(config_or_path, Mapping):
        return make_config(_plain(config_or_path), replaced, recipe_name(config_or_path))
    if isinstance(config_or_path, str | Path):
        return make_config(read_recipe(str(config_or_path)), replaced, str(config_or_path))
    raise UserError(
        "the first argument should be a recipe's name, the path of a YAML file, a mapping of settings or a "
        f"TrainConfig, not {type(config_or_path).__name__}"
    )


def recipe_name(config_or_path: ConfigOrPath) -> str:
    """Return the name of a recipe for messages and folders: as given, or `settings` where Python gave the values."""
    return str(config_or_path) if isinstance(config_or_path, str | Path) else "settings"


def _plain(value: Any) -> Any:
    """Return a value as YAML would give it: paths as text, mappings as dicts."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
