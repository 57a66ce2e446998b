"""The parts of a run, and where it starts: from its last checkpoint, or from the model in its settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from brorl.activity import Observe, Stopwatch, unobserved
from brorl.config.reading import CHANGEABLE_ON_RESUME, first_change, fixed_settings
from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option
from brorl.evaluation.evaluator import Evaluator, PromptBatch
from brorl.format import shell_command
from brorl.runs.checkpoint import (
    INITIAL_STATE,
    TrainerState,
    complete_checkpoints,
    find_damage,
    is_checkpoint,
    last_checkpoint,
    load_state,
    mark_best,
    read_state,
    read_step,
)
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import StepRecord
from brorl.training.collector import Collector
from brorl.training.diagnostics import Diagnostics
from brorl.training.learner import Learner
from brorl.training.schedule import Schedule
from brorl.training.source_files import changed_files
from brorl.verification.grade import Grader

if TYPE_CHECKING:
    from brorl.tools.toolbox import Toolbox


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run."""

    config: TrainConfig  # the recipe
    # learning
    collector: Collector  # gives each step its groups
    learner: Learner  # updates the model from groups and advantages
    schedule: Schedule  # the current advantages, and when to evaluate, pause, end and reset the reference
    # measurement, which does not affect training
    diagnostics: Diagnostics  # measures each step
    evaluator: Evaluator  # evaluates on the held-out prompts
    held_out: PromptBatch | None  # the held-out prompts; None for no evaluation
    # output
    directory: RunDirectory  # the run's files
    tokenizer: PreTrainedTokenizerBase  # saved with every checkpoint
    grader: Grader  # decodes and rewards stored responses
    report: Callable[[StepRecord], None]  # receives the record of every step
    toolbox: Toolbox | None = None  # parses the tool calls in responses; None without tools
    observe: Observe = unobserved  # called when a step or one of its stages begins
    # adds up the seconds of each stage of a step; shared by the parts
    clock: Stopwatch = field(default_factory=Stopwatch)


def find_start(config: TrainConfig, directory: RunDirectory) -> Path | None:
    """Return the checkpoint that a run resumes from, or None for a new run. Raise an error if neither is possible."""
    checkpoint = last_checkpoint(directory.checkpoints)
    _check_resumable(config, directory, checkpoint)
    if not checkpoint:
        check_start(config)
    return checkpoint


def check_start(config: TrainConfig) -> None:
    """Check that the model is a checkpoint if it must provide the optimizer state."""
    if config.optimizer.from_checkpoint and not is_checkpoint(Path(config.model)):
        raise UserError(
            f"optimizer.from_checkpoint needs a checkpoint, but model = {config.model} is not one; set model to "
            "RUN/checkpoints/step-..., or optimizer.from_checkpoint: false"
        )


def restore(run: TrainingRun, checkpoint: Path | None) -> TrainerState:
    """Restore the parts and files of a run to a checkpoint; None means the start."""
    config, directory, learner = run.config, run.directory, run.learner
    try:
        state = load_state(checkpoint) if checkpoint else INITIAL_STATE
    except UserError as error:
        raise UserError(f"{error}; {_go_back(directory)}") from error
    if config.steps is not None and state.step > config.steps:
        raise UserError(
            f"the run has already made {state.step} steps, but steps = {config.steps}; raise {option('steps')}"
        )
    if not checkpoint and config.optimizer.from_checkpoint:
        _take_optimizer(learner, config.model)
    try:
        if state.learner is not None:
            learner.load_state_dict(state.learner)
        run.collector.load_state(state.collector)
        if run.held_out is not None and state.held_out not in (None, run.held_out.fingerprint):
            raise ValueError(
                "the held-out questions have changed since the run began; restore the data, or start a new run"
            )
    except ValueError as error:  # the data or model has changed since the checkpoint
        raise UserError(f"{directory.path} cannot be resumed: {error}") from error
    run.collector.publish(learner.weights(), version=state.step)
    directory.rewind(state.step if checkpoint else -1, state.collector.attempts)
    for record in directory.read_metrics():
        run.schedule.add(record)
    best = run.schedule.evaluations.best_step
    if best is not None:  # the program may have been killed before it created the link
        mark_best(directory.checkpoints, best)
    return state


def _take_optimizer(learner: Learner, model: str) -> None:
    """Load the optimizer state from the checkpoint that `model` names."""
    try:
        state = read_state(Path(model)).learner
        if state is not None:
            learner.load_optimizer_state(state)
    except (UserError, ValueError) as error:
        raise UserError(f"{error}; set optimizer.from_checkpoint: false") from error


def _check_resumable(config: TrainConfig, directory: RunDirectory, checkpoint: Path | None) -> None:
    """Reject a run that can no longer resume with its settings or files. Accept a new run."""
    begun = directory.read_begun()
    before = begun.get("settings", {})
    changed = first_change(before, config)
    if changed is not None:
        now = fixed_settings(config)[changed]
        raise UserError(
            f"{changed} was {before[changed]} when the run began, but {directory.config_file} now has {now}; change it "
            f"back to resume, or start a new run: {_start_anew(directory)}. These settings can change: "
            f"{', '.join(CHANGEABLE_ON_RESUME)}"
        )
    if checkpoint is None and begun.get("has_checkpoint", any(record.step for record in directory.read_metrics())):
        raise UserError(
            f"{directory.checkpoints} no longer has a complete checkpoint; restore the checkpoints to resume, or "
            f"start a new run: {_start_anew(directory)}"
        )
    if checkpoint is None:
        return
    if differing := changed_files(begun.get("files", {}), config, str(checkpoint)):
        verb = "has" if len(differing) == 1 else "have"
        raise UserError(
            f"{', '.join(differing)} {verb} changed since the run began; to resume, restore what {checkpoint.name} was "
            f"trained with, or start a new run: {_start_anew(directory)}"
        )
    step = read_step(checkpoint)
    missing = {*range(step + 1)} - {record.step for record in directory.read_metrics() if record.attempt is None}
    if missing:
        raise UserError(
            f"{directory.metrics_file} has no line for step {min(missing)}, although {checkpoint} was saved after it; "
            "restore the file, or repeat the steps: remove the checkpoints of that step and later ones, then rerun the "
            "command"
        )
    damage = find_damage(checkpoint)
    if damage:
        raise UserError(f"checkpoint {checkpoint} is damaged: {damage}; {_go_back(directory)}")


def _go_back(directory: RunDirectory) -> str:
    """Return the command that resumes without the unusable last checkpoint."""
    *earlier, last = complete_checkpoints(directory.checkpoints)
    if earlier:
        repeat = f"rm -r {shlex.quote(str(last))} && {shell_command('resume', directory.path)}"
        return f"resume from {earlier[-1].name} with: {repeat}"
    return f"there is no earlier one; start a new run: {_start_anew(directory)}"


def _start_anew(directory: RunDirectory) -> str:
    """Return the command that starts a new run with the settings of this one."""
    return shell_command("train", directory.config_file, "--output_dir", "null")
