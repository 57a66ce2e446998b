"""The settings that can change when a run is resumed, and those that cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl.config.reading import flat_settings
from brorl.config.settings import TrainConfig

CHANGEABLE_ON_RESUME = (
    "steps", "checkpoint_every", "keep_checkpoints", "store_rollouts_every", "report", "device", "verification.workers",
    "verification.batch_timeout_s", "verification.sandbox", "budget.limit", "budget.marks", "budget.pause_at",
    "engine.memory_gib", "engine.nodes_per_pass", "engine.gradient_checkpointing", "engine.attention", "engine.threads",
    "engine.vllm.max_rows", "engine.vllm.placement", "reference.offload", "optimizer.states", "cluster.nodes",
    "cluster.address", "cluster.rollout_workers", "cluster.learner_ranks", "cluster.verifier_workers",
    "cluster.placement", "cluster.gpus_per_rollout_worker", "cluster.gpus_per_learner_rank", "cluster.cpus_per_worker",
    "cluster.task_timeout_s", "cluster.learner_timeout_s", "cluster.join_timeout_s", "cluster.max_restarts",
    "tracking.to", "tracking.project", "tracking.run_name",
)  # fmt: skip


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change, by dotted name, as JSON values.

    The run directory and the files of prompts can move: a checkpoint compares its prompts by their content.
    """
    settings = flat_settings(config.model_dump(mode="json"))
    for name in (*CHANGEABLE_ON_RESUME, "output_dir"):
        del settings[name]
    # 8 bits round, and the other two are the same numbers in other places
    settings["optimizer.states"] = "8bit" if config.optimizer.states == "8bit" else "device or host"
    for name in ("data.sources", "evaluation.sources"):
        settings[name] = [{key: item for key, item in source.items() if key != "path"} for source in settings[name]]
    return settings


def first_change(before: Mapping[str, Any], config: TrainConfig) -> str | None:
    """Return the dotted name of the first setting that did change since the `fixed_settings` of the run's begin."""
    return next((name for name, now in fixed_settings(config).items() if before.get(name, now) != now), None)
