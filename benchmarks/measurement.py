"""What is measured: one job per fresh process, one run per turn, and the cell of a table they make.

Light on purpose: the process that schedules the benchmark imports this and never torch, so that a
child's peak memory (which starts at its parent's size) is its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

Peer = Literal["ours", "transformers", "trl", "trl-checkpointing"]
Quantity = Literal["generation", "step"]


@dataclass(frozen=True)
class Workload:
    """What every peer is given: a model folder, prompts, lengths and what the model costs.

    Attributes:
        name: `full`, `low`, `shipped` or `trained`.
        folder: Holds `model/` (Hugging Face format with tokenizer) and this, as `workload.json`.
        domain: Which reward: `parity` (of the sum of the response's token ids) or `countdown`.
        prompts: `id`, `text`, `token_ids`, `reference` of every prompt, in the order of use.
        max_new_tokens: Length limit of a response; exactly its length where `eos_token_id` lies
            outside of the vocabulary and so is never drawn.
        eos_token_id: The end-of-sequence token.
        entropy_nats: Mean entropy of the tokens sampled, measured.
        head_scale: Factor on the language model head that gave this entropy.
        num_layers: Decoder layers.
        query_width: Heads times head size.
        matmul_parameters: Weights a token is multiplied with, the head included, embeddings not.
    """

    name: str
    folder: str
    domain: str
    prompts: list[dict[str, Any]]
    max_new_tokens: int
    eos_token_id: int
    entropy_nats: float
    head_scale: float
    num_layers: int
    query_width: int
    matmul_parameters: int

    @property
    def model_dir(self) -> Path:
        """The Hugging Face folder."""
        return Path(self.folder) / "model"

    def prompts_of(self, turn: int, prompts_per_step: int) -> list[dict[str, Any]]:
        """Return the prompts of a turn."""
        return self.prompts[turn * prompts_per_step : (turn + 1) * prompts_per_step]

    def write(self) -> None:
        """Write `workload.json` into the folder."""
        text = json.dumps(asdict(self), indent=1)
        (Path(self.folder) / "workload.json").write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read what `write` wrote."""
        return cls(**json.loads((Path(folder) / "workload.json").read_text(encoding="utf-8")))

    def flops(self, num_tokens: int, context_tokens: int) -> float:
        """Count the floating-point operations of the forward pass over sampled tokens.

        Args:
            num_tokens: Tokens.
            context_tokens: Sum over them of the positions they attend to, themselves included.

        Returns:
            2 per weight and token, and 4 per layer, query channel and position attended to. The
            prompt's own forward pass is counted for nobody.
        """
        attention = 4 * self.num_layers * self.query_width * context_tokens
        return 2.0 * self.matmul_parameters * num_tokens + attention


@dataclass(frozen=True)
class Job:
    """One measurement, made in a process of its own.

    Attributes:
        peer: Who is measured.
        quantity: What: sampling alone, or a whole training step.
        workload_folder: Where the workload lies.
        num_rollouts: Rollouts per prompt, N.
        prompts_per_step: Prompts per turn, P.
        num_turns: Runs, warm-up included.
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
        cpu_seconds: Time of the processor in this process, which other processes do not stretch.
        sampled_tokens: Tokens of all N rollouts.
        sampled_context: Sum over them of the positions attended to, the prompt included.
        unique_tokens: The same over distinct prefixes; None for peers, which know none.
        unique_context: As `sampled_context`, over distinct prefixes.
        parts: Seconds of the parts of a step, where the peer tells them.
        facts: Other numbers worth keeping, such as the mean reward.
    """

    seconds: float
    cpu_seconds: float
    sampled_tokens: int = 0
    sampled_context: int = 0
    unique_tokens: int | None = None
    unique_context: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """All runs of one job without its warm-up turns, and what memory its process took.

    Attributes:
        job: The job.
        runs: The runs that count.
        warmups: The turns before them.
        baseline_bytes: Resident set with everything imported and the model loaded.
        peak_bytes: Largest resident set of the process's life (`ru_maxrss`).
        error: Why there are no runs, if there are none.
    """

    job: Job
    runs: list[Run]
    warmups: list[Run]
    baseline_bytes: int
    peak_bytes: int
    error: str | None = None

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
        """Median of unique over sampled tokens; None for a peer."""
        fractions = [
            run.unique_tokens / run.sampled_tokens
            for run in self.runs
            if run.unique_tokens is not None and run.sampled_tokens
        ]
        return median(fractions) if fractions else None

    def part(self, name: str) -> float:
        """Median seconds of a part of the step, 0 where the peer does not tell it."""
        return median(run.parts.get(name, 0.0) for run in self.runs)

    @property
    def above_baseline_bytes(self) -> int:
        """Peak resident set above what the loaded model and the libraries take."""
        return self.peak_bytes - self.baseline_bytes

    def gflops_per_s(self, workload: Workload, distinct: bool) -> float:
        """Return the median rate of arithmetic in 1e9 operations per second.

        Args:
            workload: The workload of the job.
            distinct: Count distinct prefixes once (what ours computes) or all sampled tokens.
        """
        rates = []
        for run in self.runs:
            tokens, context = run.sampled_tokens, run.sampled_context
            if distinct and run.unique_tokens is not None and run.unique_context is not None:
                tokens, context = run.unique_tokens, run.unique_context
            rates.append(workload.flops(tokens, context) / run.seconds / 1e9)
        return median(rates)
