"""Workloads, jobs, runs and cells: a fresh process measures one job, with one run per turn; the runs make a cell.

A workload is a model folder, prompts, lengths, and the cost of the model; `build_workload.py` writes `workload.json`.
The scheduler and the peers in separate environments import this module, so it needs plain Python only: a child's peak
memory starts at its parent's size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self, get_args

Peer = Literal["ours", "transformers", "vllm", "trl", "trl-checkpointing"]
Quantity = Literal["generation", "step"]
PEERS: tuple[Peer, ...] = get_args(Peer)


@dataclass(frozen=True)
class Work:
    """The tokens that go through the model to sample some responses.

    Attributes:
        fed_tokens: Tokens that go through the layers: prompts, and response tokens except the last ones.
        attended: Sum over these tokens of the positions that they attend to, including themselves.
        predictions: Tokens that go through the head: one per prompt, and every fed response token.
    """

    fed_tokens: int
    attended: int
    predictions: int

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """Add up the work of several prompts."""
        listed = list(works)
        return cls(
            sum(w.fed_tokens for w in listed), sum(w.attended for w in listed), sum(w.predictions for w in listed)
        )


@dataclass(frozen=True)
class Workload:
    """The workload of all peers, and the numbers that describe it.

    Attributes:
        setting: `full`, `low`, `big-full`, `big-low`, `shipped` or `trained`.
        folder: Holds `model/` (Hugging Face format with tokenizer) and this, as `workload.json`.
        domain: The reward: `parity` (of the sum of the response's token ids) or `countdown`.
        prompts: `id`, `text`, `token_ids`, `reference` of every prompt, in the order of use.
        max_new_tokens: Length limit of a response.
        eos_token_id: The end-of-sequence token.
        fixed_length: Whether every response has exactly `max_new_tokens`: the end token lies outside of the vocabulary.
        entropy_nats: Measured mean entropy of sampled tokens.
        head_scale: Factor on the language model head that gave this entropy.
        num_layers: Decoder layers.
        query_width: Heads times head size.
        layer_parameters: Weights of the layers in matrix products.
        head_parameters: Weights of the head.
    """

    setting: str
    folder: str
    domain: str
    prompts: list[dict[str, Any]]
    max_new_tokens: int
    eos_token_id: int
    fixed_length: bool
    entropy_nats: float
    head_scale: float
    num_layers: int
    query_width: int
    layer_parameters: int
    head_parameters: int

    @property
    def model_dir(self) -> Path:
        """The Hugging Face folder."""
        return Path(self.folder) / "model"

    @property
    def name(self) -> str:
        """The setting and the length limit: the workload of one row."""
        return f"{self.setting}-{self.max_new_tokens}"

    def prompts_of(self, turn: int, prompts_per_step: int) -> list[dict[str, Any]]:
        """Return the prompts of a turn."""
        return self.prompts[turn * prompts_per_step : (turn + 1) * prompts_per_step]

    def write(self) -> None:
        """Write `workload.json` into the folder."""
        text = json.dumps(asdict(self), indent=1)
        (Path(self.folder) / "workload.json").write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read `workload.json` of a folder."""
        return cls(**json.loads((Path(folder) / "workload.json").read_text(encoding="utf-8")))

    def flops(self, work: Work) -> float:
        """Count the floating-point operations of the matrix products of one forward pass.

        Args:
            work: The work.

        Returns:
            2 per weight and token (none for embeddings; the head only for predictions), and 4 per layer, query channel
            and position attended to.
        """
        products = self.layer_parameters * work.fed_tokens + self.head_parameters * work.predictions
        return 2.0 * products + 4.0 * self.num_layers * self.query_width * work.attended


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

    def gflops_per_s(self, workload: Workload, part: str) -> float | None:
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


@dataclass(frozen=True)
class Group:
    """The responses of one prompt.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        responses: Token ids of each response, an end token included.
    """

    num_prompt_tokens: int
    responses: list[list[int]]


def sampling_run(seconds: float, cpu_seconds: float, groups: Sequence[Group]) -> Run:
    """Return the run of a peer that sampled these responses."""
    return Run(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        sampled_tokens=sum(len(response) for group in groups for response in group.responses),
        unique_tokens=sum(num_distinct_prefixes(group.responses) for group in groups),
        work=Work.total(
            flat_work(group.num_prompt_tokens, [len(response) for response in group.responses]) for group in groups
        ),
        parts={"generation": seconds},
    )


def flat_work(num_prompt_tokens: int, lengths: Sequence[int]) -> Work:
    """Count the work of sampling the responses of one prompt one by one, with the prompt computed once.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        lengths: Tokens of each response, >= 1. The last token is drawn and not fed.
    """
    fed = sum(length - 1 for length in lengths)
    attended = sum(num_prompt_tokens * (n - 1) + (n - 1) * n // 2 for n in lengths)
    prompt_attended = num_prompt_tokens * (num_prompt_tokens + 1) // 2
    return Work(num_prompt_tokens + fed, prompt_attended + attended, 1 + fed)


def num_distinct_prefixes(responses: Sequence[Sequence[int]]) -> int:
    """Count the distinct non-empty prefixes of responses, as a check that peers sample from one distribution."""
    ordered = sorted(tuple(response) for response in responses)
    shared = sum(_common_length(a, b) for a, b in pairwise(ordered))
    return sum(len(response) for response in ordered) - shared


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))
