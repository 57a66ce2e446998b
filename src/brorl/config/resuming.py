"""What may change when a run is resumed, and what may not.

In: the settings when a run began, and those now. Out: the first setting that may not change, and did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from brorl.config.reading import settings_of
from brorl.config.settings import TrainConfig

CHANGEABLE_ON_RESUME = (
    "steps",
    "checkpoint_every",
    "keep_checkpoints",
    "store_rollouts_every",
    "report",
    "device",
    "verification.workers",
    "budget.limit",
    "budget.marks",
    "engine.memory_gib",
    "engine.nodes_per_pass",
    "engine.gradient_checkpointing",
    "engine.threads",
    "tracking.to",
    "tracking.project",
    "tracking.run_name",
)
_SOURCES = ("data.sources", "evaluation.sources")


class Change(NamedTuple):
    """A setting that may not change, and did.

    Attributes:
        name: Its dotted name.
        before: Its value at the start of the run.
        now: Its value now.
    """

    name: str
    before: Any
    now: Any


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that may not change, by dotted name, as JSON holds them.

    The run directory and the files of prompts may have moved: a checkpoint recognizes its prompts by their content.
    """
    settings = config.model_dump(mode="json")
    fixed = {}
    for name, _ in settings_of(TrainConfig):
        if name in (*CHANGEABLE_ON_RESUME, "output_dir"):
            continue
        value: Any = settings
        for key in name.split("."):
            value = value[key]
        if name in _SOURCES:
            value = [{key: item for key, item in source.items() if key != "path"} for source in value]
        fixed[name] = value
    return fixed


def first_change(before: Mapping[str, Any], config: TrainConfig) -> Change | None:
    """Return the first setting that may not change and did.

    Args:
        before: What `fixed_settings` returned when the run began; settings that came later are not compared.
        config: The settings now.
    """
    changes = (Change(name, before.get(name, now), now) for name, now in fixed_settings(config).items())
    return next((change for change in changes if change.before != change.now), None)
