"""Evaluation: samples held-out prompts as trees, verifies them, and reports pass@k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from brorl.activity import Observe, Phase, unobserved
from brorl.evaluation.mean_interval import mean_with_interval
from brorl.evaluation.pass_at_k import Estimate, pass_at_k
from brorl.prompts.prompt import Prompt, fingerprint
from brorl.rollout.engine import Sampler
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from brorl.verify.grade import grade
from brorl.verify.verifier import TIMEOUT, Verdict, Verifier, is_failure


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        pass_at: Estimate of pass@k for each k asked for.
        num_prompts: Number of prompts.
        num_samples: Responses per prompt.
        solved: Prompts with at least one correct response.
        truncated_share: Share of responses that were cut.
        verifier_timeouts: Distinct responses whose verification took too long; they count as incorrect.
        verifier_failures: Distinct responses whose verification failed otherwise; they count as incorrect.
        unique_tokens: Tokens computed.
        sampled_tokens: Tokens of all responses.
        seconds: Wall time.
        by_source: The same estimates for the prompts of each source; empty if there is one.
        prompts: For each prompt, in order, the number of its correct responses (`num_correct`) and the tokens of all
            its responses (`sampled_tokens`).
    """

    pass_at: dict[int, Estimate]
    num_prompts: int
    num_samples: int
    solved: int
    truncated_share: float
    verifier_timeouts: int
    verifier_failures: int
    unique_tokens: int
    sampled_tokens: int
    seconds: float
    by_source: dict[str, dict[int, Estimate]]
    prompts: dict[str, list[int]]


@dataclass(frozen=True)
class Answers:
    """The responses of one evaluation, P prompts in the benchmark's order.

    Attributes:
        trees: The responses to each prompt.
        verdicts: For each prompt the verdict of each distinct response.
        seconds: Wall time of sampling and verifying.
    """

    trees: Sequence[RolloutTree]
    verdicts: Sequence[Sequence[Verdict]]
    seconds: float


@dataclass(frozen=True)
class Benchmark:
    """A set of held-out prompts and how to evaluate on it.

    Attributes:
        prompts: The prompts.
        verifiers: Verifier of each domain.
        decode: Token ids to text.
        sampling: How responses are sampled.
        num_samples: Responses per prompt, n.
        ks: Which pass@k to report, each at most n.
        seed: Seed of the sampling, the same for every evaluation.
        accept_truncated: Verify truncated responses too, rather than count them as incorrect.
        observe: Gets each phase of an evaluation when it begins.
    """

    prompts: Sequence[Prompt]
    verifiers: Mapping[str, Verifier]
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    num_samples: int
    ks: tuple[int, ...]
    seed: int
    accept_truncated: bool = False
    observe: Observe = unobserved

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts: scores of other prompts are not to be compared."""
        return fingerprint(self.prompts)

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Sample, verify and summarise."""
        return self.summarise(self.answer(sampler))

    def answer(self, sampler: Sampler) -> Answers:
        """Sample and verify."""
        started = perf_counter()
        self.observe(Phase("evaluating"))
        token_ids = [p.token_ids for p in self.prompts]
        trees = sampler.sample(token_ids, self.num_samples, self.sampling, self.seed)
        self.observe(Phase("evaluating", f"verifying {sum(t.num_responses for t in trees):,} distinct responses"))
        verdicts = grade(self.prompts, trees, self.verifiers, self.decode, self.accept_truncated)
        return Answers(trees, verdicts, perf_counter() - started)

    def summarise(self, answers: Answers) -> Evaluation:
        """Count the correct responses and estimate pass@k."""
        trees, verdicts = answers.trees, answers.verdicts
        correct_P = np.array([
            sum(int(count) for count, v in zip(t.leaf_count, vs, strict=True) if v.correct)
            for t, vs in zip(trees, verdicts, strict=True)
        ])  # fmt: skip
        truncated = sum(int(t.leaf_count[~t.finished].sum()) for t in trees)
        source_P = np.array([p.source for p in self.prompts])
        reasons = [verdict.reason for verdicts_L in verdicts for verdict in verdicts_L]
        sources = sorted({p.source for p in self.prompts})
        return Evaluation(
            pass_at=self._pass_at(correct_P),
            num_prompts=len(self.prompts),
            num_samples=self.num_samples,
            solved=int((correct_P > 0).sum()),
            truncated_share=truncated / (len(self.prompts) * self.num_samples),
            verifier_timeouts=reasons.count(TIMEOUT),
            verifier_failures=sum(map(is_failure, reasons)),
            unique_tokens=sum(t.num_unique_tokens for t in trees),
            sampled_tokens=sum(t.num_sampled_tokens for t in trees),
            seconds=answers.seconds,
            by_source={s: self._pass_at(correct_P[source_P == s]) for s in sources} if len(sources) > 1 else {},
            prompts={"num_correct": correct_P.tolist(), "sampled_tokens": [t.num_sampled_tokens for t in trees]},
        )

    def _pass_at(self, correct_P: NDArray[np.int64]) -> dict[int, Estimate]:
        return {k: mean_with_interval(pass_at_k(correct_P, self.num_samples, k)) for k in self.ks}
