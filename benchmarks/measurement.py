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
    """The tokens that go through the model to sample some responses."""

    fed_tokens: int  # tokens that go through the layers: prompts, and response tokens except the last ones
    attended: int  # sum over these tokens of the positions that they attend to, including themselves
    predictions: int  # tokens that go through the head: one per prompt, and every fed response token
    positions: int = 0  # passes through the weights of a decoding: the prompt, and each position that is fed
    cached: int = 0  # stored tokens whose keys and values are read: prompts once per position, paths once per token

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """Add up the work of several prompts."""
        listed = list(works)
        return cls(
            sum(w.fed_tokens for w in listed),
            sum(w.attended for w in listed),
            sum(w.predictions for w in listed),
            max((w.positions for w in listed), default=0),
            sum(w.cached for w in listed),
        )


@dataclass(frozen=True)
class Workload:
    """The workload of all peers, and the numbers that describe it."""

    setting: str  # `full`, `low`, `big-full`, `big-low`, `shipped` or `trained`
    folder: str  # holds `model/` (Hugging Face format with tokenizer) and this, as `workload.json`
    domain: str  # the reward: `parity` (of the sum of the response's token ids), `countdown` or `math`
    prompts: list[dict[str, Any]]  # `id`, `text`, `token_ids`, `reference` of every prompt, in the order of use
    max_new_tokens: int  # length limit of a response
    eos_token_id: int  # the end-of-sequence token
    # whether every response has exactly `max_new_tokens`: the end token lies outside of the vocabulary
    fixed_length: bool
    entropy_nats: float  # measured mean entropy of sampled tokens
    head_scale: float  # factor on the language model head that gave this entropy
    num_layers: int  # decoder layers
    query_width: int  # heads times head size
    cache_width: int  # numbers per token in the keys and values of a layer
    layer_parameters: int  # weights of the layers in matrix products
    head_parameters: int  # weights of the head

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

        Returns:
            2 per weight and token (none for embeddings; the head only for predictions), and 4 per layer, query channel
            and position attended to.
        """
        products = self.layer_parameters * work.fed_tokens + self.head_parameters * work.predictions
        return 2.0 * products + 4.0 * self.num_layers * self.query_width * work.attended

    def least_seconds(self, work: Work, quantity: Quantity, gflops_per_s: float, gbytes_per_s: float) -> float:
        """Return the seconds of the arithmetic at the highest rate, and of the reading at that of memory, in float32.

        A step has the arithmetic of four forward passes, one of them for sampling. Sampling reads the weights once per
        position, and keys and values as `Work.cached` counts them; nothing else is counted as reading.
        """
        passes = 1 if quantity == "generation" else 4
        weights = work.positions * (self.layer_parameters + self.head_parameters)
        read = 4.0 * (weights + work.cached * self.num_layers * self.cache_width)
        return passes * self.flops(work) / (gflops_per_s * 1e9) + read / (gbytes_per_s * 1e9)


@dataclass(frozen=True)
class Job:
    """One measurement in a fresh process."""

    peer: Peer  # the measured package
    quantity: Quantity  # sampling alone, or a whole training step
    workload_folder: str  # folder of the workload
    num_rollouts: int  # rollouts per prompt, N
    prompts_per_step: int  # prompts per turn, P
    num_turns: int  # most runs, warm-up included
    micro_batch: int  # TRL's per-device batch size
    device: str = "cpu"  # in PyTorch; on `cuda` a training computes in bfloat16


@dataclass(frozen=True)
class Run:
    """One turn of a job."""

    seconds: float  # wall time
    cpu_seconds: float  # processor time of this process, independent of other processes
    sampled_tokens: int  # tokens of all N rollouts
    unique_tokens: int | None = None  # distinct prefixes among them; None if the peer does not report its tokens
    work: Work | None = None  # tokens that went through the model for sampling; None if not counted
    parts: dict[str, float] = field(default_factory=dict)  # seconds of the parts of a step, if the peer reports them
    facts: dict[str, float] = field(default_factory=dict)  # other numbers, such as the mean reward

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Make a run from its JSON record."""
        work = record.get("work")
        return cls(**(record | {"work": Work(**work) if work else None}))


@dataclass(frozen=True)
class Cell:
    """All runs of one job without its warm-up turns, and the memory of its process."""

    job: Job
    runs: list[Run]  # the counted runs
    warmups: list[Run]  # the turns before them
    baseline_bytes: int  # resident set after the imports and the loading of the model
    peak_bytes: int  # largest resident set of the process (`ru_maxrss`)
    error: str | None = None  # the error of a job without runs

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
    """The responses of one prompt."""

    num_prompt_tokens: int  # tokens of the prompt
    responses: list[list[int]]  # token ids of each response, an end token included


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
    """Count the work of sampling the responses of one prompt one by one, with the prompt computed once."""
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
