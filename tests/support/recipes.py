"""Recipes of small parts: settings without the name of their section."""

from typing import Any

from brorl.config.settings import TrainConfig
from brorl.training.settings import OptimizerSettings

_SECTIONS = ("optimizer", "engine", "sampling", "reference", "dynamic_sampling", "cluster")
_ONE_UPDATE = TrainConfig(optimizer=OptimizerSettings(mini_batches=1))


def recipe(base: TrainConfig = _ONE_UPDATE, **changes: Any) -> TrainConfig:
    """Return a recipe with other settings; no conflict between them is an error."""
    update: dict[str, Any] = {}
    for name, value in changes.items():
        if name in type(base).model_fields:  # before engine.dtype
            update[name] = value
        else:
            section = next(s for s in _SECTIONS if name in type(getattr(base, s)).model_fields)
            update[section] = update.get(section, getattr(base, section)).model_copy(update={name: value})
    return base.model_copy(update=update)
