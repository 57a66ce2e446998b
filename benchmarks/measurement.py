"""Jobs, runs and cells: a fresh process measures one job, with one run per turn; the runs make a cell of a table.

The scheduler imports this module and never torch, because a child's peak memory starts at its parent's size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, Self

from workload import Work, Workload

Peer = Literal["ours", "transformers", "vllm", "trl", "trl-checkpointing"]
Quantity = Literal["generation", "step"]


@dataclass(frozen=True)
class Job:
    """One measurement in a fresh process.

    Attributes:
        peer: The measured package.
        quantity: Sampling alone, or a whole training step.
        workload_folder: Folder of the workload.
        num_rollouts: Rollouts per prompt, N.
        prompts_per_step: Prompts per turn, P.
        num_turns: Most runs, warm-up included.
        micro_batch: TRL's per-device batch size.
    """

    peer: Peer
    quantity: Quantity
    workload_folder: str
    num_rollouts: int
    prompts_per_step: int
    num_turns: int
    micro_batch: int


@dataclass(frozen=True)
class Run:
    """One turn of a job.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Processor time of this process, independent of other processes.
        sampled_tokens: Tokens of all N rollouts.
        unique_tokens: Distinct prefixes among them; None if the peer does not report its tokens.
        work: Tokens that went through the model for sampling; None if not counted.
        parts: Seconds of the parts of a step, if the peer reports them.
        facts: Other numbers, such as the mean reward.
    """

    seconds: float
    cpu_seconds: float
    sampled_tokens: int
    unique_tokens: int | None = None
    work: Work | None = None
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Make a run from its JSON record."""
        work = record.get("work")
        return cls(**(record | {"work": Work(**work) if work else None}))


@dataclass(frozen=True)
class Cell:
    """All runs of one job without its warm-up turns, and the memory of its process.

    Attributes:
        job: The job.
        runs: The counted runs.
        warmups: The turns before them.
        baseline_bytes: Resident set after the imports and the loading of the model.
        peak_bytes: Largest resident set of the process (`ru_maxrss`).
        error: The error of a job without runs.
    """

    job: Job
    runs: list[Run]
    warmups: list[Run]
    baseline_bytes: int
    peak_bytes: int
    error: str | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Make a cell from its JSON record."""
        runs = {name: [Run.of(run) for run in record[name]] for name in ("runs", "warmups")}
        return cls(**(record | runs | {"job": Job(**record["job"])}))

    @property
    def seconds(self) -> float:
        """Median seconds of a run."""
        return median(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        """Median processor seconds of a run."""
        return median(run.cpu_seconds for run in self.runs)

    @property
    def rollouts_per_s(self) -> float:
        """Median rollouts per second."""
        return self.job.num_rollouts * self.job.prompts_per_step / self.seconds

    @property
    def unique_fraction(self) -> float | None:
        """Median of unique over sampled tokens; None if unknown."""
        fractions = [run.unique_tokens / run.sampled_tokens for run in self.runs if run.unique_tokens]
        return median(fractions) if fractions else None

    @property
    def above_baseline_bytes(self) -> int:
        """Peak resident set above the baseline."""
        return self.peak_bytes - self.baseline_bytes

    def part(self, name: str) -> float | None:
        """Median seconds of a part of the step, None if the peer does not report it."""
        seconds = [run.parts[name] for run in self.runs if name in run.parts]
        return median(seconds) if seconds else None

    def fact(self, name: str) -> float | None:
        """Median of one of the other numbers, None if the peer does not report it."""
        values = [run.facts[name] for run in self.runs if name in run.facts]
        return median(values) if values else None

    def gflops_per_s(self, workload: Workload, part: Literal["generation", "training"]) -> float | None:
        """Return the median rate of arithmetic of a part in 1e9 operations per second.

        Args:
            workload: The workload of the job.
            part: Sampling, which is a forward pass over the work, or learning, which is a forward and a backward pass
                over the same work: three times its operations, since each product has two in its backward pass.

        Returns:
            The rate, None if the work or the time of the part is unknown.
        """
        passes = 1 if part == "generation" else 3
        rates = [
            passes * workload.flops(run.work) / run.parts[part] / 1e9
            for run in self.runs
            if run.work is not None and part in run.parts
        ]
        return median(rates) if rates else None
