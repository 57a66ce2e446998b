"""The lines that a run prints before its first step: model, batch, learning rate, and the run it continues from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import brorl
from brorl.config.reading import parse_yaml
from brorl.config.settings import TrainConfig
from brorl.distributed.settings import ClusterSettings
from brorl.format import counted
from brorl.model.load import choose_device
from brorl.runs.checkpoint import is_checkpoint, read_step
from brorl.training.run import TrainingRun


def announcement(config: TrainConfig, run: TrainingRun, step: int) -> list[str]:
    """Return the lines.

    Args:
        config: The run's settings.
        run: The parts of the run.
        step: Steps that the run has done.
    """
    learner = run.algorithm.learner
    trained, parameters = learner.num_parameters(only_trainable=True), learner.num_parameters()
    of_all = "" if trained == parameters else f", {trained:,} of them trained"
    clip, lineage = config.loss.clip, lineage_of(config.model)
    lines = [
        f"brorl {brorl.__version__}: {config.model} ({parameters:,} parameters{of_all}) on "
        f"{_device(config)}, "
        f"N = {_rollouts(config)} rollouts x {config.prompts_per_step} prompts a step, "
        f"{run.algorithm.source.num_prompts:,} training prompts",
        f"learning rate {_learning_rate(config)}, {config.optimizer.mini_batches} updates a step, "
        f"{config.loss.kind} clip {clip.low:g}/{clip.high:g}; run directory {run.outputs.directory.path}",
    ]
    if lineage:
        lines.append(_stage(lineage, config.optimizer.from_checkpoint))
    return [*lines, f"resuming after step {step}"] if step else lines


def placement_lines(settings: ClusterSettings, num_machines: int) -> list[str]:
    """Return a line about the processes of a run on a cluster.

    Args:
        settings: The settings of the cluster.
        num_machines: Machines of the cluster.
    """
    kinds = [
        (settings.rollout_workers, "rollout worker", settings.gpus_per_rollout_worker),
        (settings.learner_ranks, "learner rank", settings.gpus_per_learner_rank),
        (settings.verifier_workers, "verifier worker", 0),
    ]
    parts = []
    for number, kind, gpus in kinds:
        each = counted(settings.cpus_per_worker, "CPU thread") + (f", {counted(gpus, 'GPU')}" if gpus else "")
        parts += [f"{counted(number, kind)} ({each} each)"] if number else []
    shared = "; rollout workers and learner ranks share GPUs" if settings.placement == "colocated" else ""
    return [f"cluster of {counted(num_machines, 'machine')}: {', '.join(parts)}{shared}"]


def _device(config: TrainConfig) -> str:
    """Return the device of the learner."""
    if config.cluster.enabled:
        return "cuda" if config.cluster.gpus_per_learner_rank else "cpu"
    return str(choose_device(config.device))


def lineage_of(model: str) -> dict[str, Any] | None:
    """Return the run and step that a model is a checkpoint of; None if it is not a checkpoint."""
    checkpoint = Path(model)
    if not is_checkpoint(checkpoint):
        return None
    checkpoint = checkpoint.resolve()
    lineage: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_step(checkpoint)}
    parent = checkpoint.parent.parent / "config.yaml"
    settings = parse_yaml(parent.read_text("utf-8"), str(parent)) if parent.is_file() else {}
    known = ("rollouts_per_prompt", "prompts_per_step", "model")
    return lineage | {name: settings[name] for name in known if name in settings}


def _stage(lineage: dict[str, Any], from_checkpoint: bool) -> str:
    before = ""
    if "rollouts_per_prompt" in lineage:
        before = f" of a run with N = {lineage['rollouts_per_prompt']} x {lineage['prompts_per_step']} prompts"
    optimizer = "with its optimizer's state" if from_checkpoint else "with a new optimizer"
    return f"continuing from step {lineage['step']}{before}, {optimizer}"


def _learning_rate(config: TrainConfig) -> str:
    """Return the learning rate, and the formula where it is scaled with the batch."""
    optimizer, rate = config.optimizer, config.learning_rate
    if not optimizer.reference_batch:
        return f"{rate:.2e}"
    return (
        f"{rate:.2e} = {optimizer.learning_rate:.2e} x sqrt({config.samples_per_step:,} / "
        f"{optimizer.reference_batch:,} samples a step)"
    )


def _rollouts(config: TrainConfig) -> str:
    adaptive, number = config.adaptive, config.rollouts_per_prompt
    if not adaptive.enabled:
        return str(number)
    return f"adaptive {adaptive.pilot_rollouts}..{adaptive.max_rollouts} (on average at most {number})"
