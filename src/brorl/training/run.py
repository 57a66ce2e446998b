"""The parts of a run, in four groups: the algorithm, the schedule, the measurements, the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from brorl.activity import Observe, Stopwatch, unobserved
from brorl.evaluation.benchmark import Benchmark
from brorl.runs.run_directory import Record, RunDirectory
from brorl.training.diagnostics import Diagnostics
from brorl.training.learner import Learner
from brorl.training.monitor import Monitor
from brorl.training.objective import Objective
from brorl.training.schedule import Schedule
from brorl.training.source import GroupSource
from brorl.verification.grade import Grader


@dataclass(frozen=True)
class Algorithm:
    """The parts that learn."""

    source: GroupSource  # gives each step its groups
    objective: Objective  # groups to advantages, in phases
    learner: Learner  # groups and advantages to an updated model
    seed: int  # seed of the run
    averages: bool = False  # whether the learner averages its weights


@dataclass(frozen=True)
class Measurements:
    """The parts that measure; they do not change the training."""

    diagnostics: Diagnostics  # measures each step
    benchmark: Benchmark | None  # held-out prompts; None evaluates nothing
    monitor: Monitor  # finds the best evaluation and signs of collapse


@dataclass(frozen=True)
class Outputs:
    """The parts that write."""

    directory: RunDirectory  # the run's files
    tokenizer: PreTrainedTokenizerBase  # saved with every checkpoint
    keep_checkpoints: int  # regular checkpoints to keep; 0 for all
    grader: Grader  # gives the texts and rewards of responses that are stored
    report: Callable[[Record], None]  # receives every metrics record
    observe: Observe = unobserved  # receives each step, and each phase of it, when it begins


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run."""

    algorithm: Algorithm  # the parts that learn
    schedule: Schedule  # when the run ends, is evaluated, and is saved
    measurements: Measurements  # the parts that measure
    outputs: Outputs  # the parts that write
    clock: Stopwatch  # adds up the seconds of each phase of a step; the parts share it
