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
    """The parts that learn.

    Attributes:
        source: Gives each step its groups.
        objective: Groups to advantages, in phases.
        learner: Groups and advantages to an updated model.
        seed: Seed of the run.
    """

    source: GroupSource
    objective: Objective
    learner: Learner
    seed: int


@dataclass(frozen=True)
class Measurements:
    """The parts that measure; they do not change the training.

    Attributes:
        diagnostics: Measures each step.
        benchmark: Held-out prompts; None evaluates nothing.
        monitor: Finds the best evaluation and signs of collapse.
    """

    diagnostics: Diagnostics
    benchmark: Benchmark | None
    monitor: Monitor


@dataclass(frozen=True)
class Outputs:
    """The parts that write.

    Attributes:
        directory: The run's files.
        tokenizer: Saved with every checkpoint.
        keep_checkpoints: Regular checkpoints to keep; 0 for all.
        grader: Gives the texts and rewards of responses that are stored.
        report: Receives every line of the metrics.
        observe: Receives each step, and each phase of it, when it begins.
    """

    directory: RunDirectory
    tokenizer: PreTrainedTokenizerBase
    keep_checkpoints: int
    grader: Grader
    report: Callable[[Record], None]
    observe: Observe = unobserved


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run.

    Attributes:
        algorithm: The parts that learn.
        schedule: When the run ends, is evaluated, and is saved.
        measurements: The parts that measure.
        outputs: The parts that write.
        clock: Adds up the seconds of each phase of a step; the parts share it.
    """

    algorithm: Algorithm
    schedule: Schedule
    measurements: Measurements
    outputs: Outputs
    clock: Stopwatch
