"""Evaluation on held-out prompts during training: samples and verifies trees, counts, and estimates pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from brorl.activity import Observe, Phase, unobserved
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k_of_each
from brorl.format import Estimate
from brorl.prompts.prompt import Prompt, fingerprint
from brorl.rollout.engine import Sampler
from brorl.sampling import SamplingParams
from brorl.verdict import is_failure, is_timeout
from brorl.verification.grade import Grader


@dataclass(frozen=True)
class PromptResult:
    """Counts over the n responses to one prompt."""

    prompt_id: str
    data_set: str
    domain: str  # decides which verifier checks the responses
    num_samples: int  # n responses, duplicates included
    num_correct: int  # correct responses, 0 to `num_verified`
    num_truncated: int  # truncated responses, 0 to n
    num_distinct: int  # distinct responses, each of which is verified once
    sampled_tokens: int  # tokens in all responses
    unique_tokens: int  # sampled nodes of the tree: tokens that the engine had to compute
    verifier_timeouts: int  # distinct responses whose verification timed out; they count as incorrect
    verifier_failures: int  # distinct responses whose verification failed otherwise; they count as incorrect
    num_unverified: int = 0  # responses, 0 to n, that infrastructure failures left unverified; they do not count
    calling_turns: int = 0  # turns that called tools, in all responses
    given_tokens: int = 0  # tokens of results: given nodes of the tree

    @property
    def num_verified(self) -> int:
        """Number of responses with a verdict; pass@k is estimated from them."""
        return self.num_samples - self.num_unverified


@dataclass(frozen=True)
class Summary:
    """Results over some prompts."""

    num_prompts: int  # number of prompts, P
    num_samples: int  # responses per prompt, n
    # k -> pass@k: the mean of unbiased estimates over prompts, with its interval. Prompts with fewer than k verified
    # responses do not count; a k that leaves no prompt is missing.
    pass_at: dict[int, Estimate]
    solved: int  # prompts with at least one correct response
    tokens_per_response: float  # mean number of tokens of a response
    truncation_rate: float  # fraction of truncated responses, 0 to 1
    verifier_timeouts: int  # distinct responses whose verification timed out
    verifier_failures: int  # distinct responses whose verification failed otherwise
    num_distinct: int  # distinct responses
    sampled_tokens: int  # tokens in all responses
    unique_tokens: int  # sampled nodes of all trees: tokens that the engine had to compute
    seconds: float | None  # time for sampling, verifying and storing; None if it is unknown
    num_unverified: int = 0  # responses that infrastructure failures left unverified; they do not count
    left_out: dict[int, int] = field(default_factory=dict)  # k -> number of prompts that do not count, if any
    calling_turns: int = 0  # turns that called tools
    given_tokens: int = 0  # tokens of results: given nodes of all trees

    @property
    def turns(self) -> float:
        """Mean number of turns of a response."""
        return 1 + self.calling_turns / (self.num_samples * self.num_prompts)


_TOTALS = (
    "verifier_timeouts", "verifier_failures", "num_distinct", "sampled_tokens", "unique_tokens", "num_unverified",
    "calling_turns", "given_tokens",
)  # fmt: skip


def count_responses(group: Group) -> PromptResult:
    """Count a verified group's correct, truncated and distinct responses, and its tokens."""
    prompt, tree, reasons = group.prompt, group.tree, [verdict.reason for verdict in group.verdicts]
    return PromptResult(
        prompt_id=prompt.id,
        data_set=prompt.source,
        domain=prompt.domain,
        num_samples=tree.num_rollouts,
        num_correct=group.num_correct,
        num_truncated=tree.num_truncated,
        num_distinct=tree.num_responses,
        sampled_tokens=tree.num_sampled_tokens,
        unique_tokens=tree.num_unique_tokens,
        verifier_timeouts=sum(map(is_timeout, reasons)),
        verifier_failures=sum(map(is_failure, reasons)),
        num_unverified=group.num_unverified,
        calling_turns=tree.num_turns - tree.num_rollouts,
        given_tokens=tree.num_given_tokens,
    )


def summarize(results: Sequence[PromptResult], ks: Sequence[int], seconds: float | None) -> Summary:
    """Summarize the results of prompts, which must have equal numbers of responses."""
    numbers = {result.num_samples for result in results}
    if len(numbers) != 1:
        raise ValueError(
            f"expected prompts with one number of samples, got {sorted(numbers) or 'no prompt'}; summarize prompts of "
            "one evaluation"
        )
    n = numbers.pop()
    correct_P = np.array([result.num_correct for result in results], np.int64)
    verified_P = np.array([result.num_verified for result in results], np.int64)
    value_KP = {k: pass_at_k_of_each(correct_P, verified_P, k) for k in ks}

    total = {name: sum(getattr(result, name) for result in results) for name in (*_TOTALS, "num_truncated")}
    return Summary(
        num_prompts=len(results),
        num_samples=n,
        pass_at={k: mean_with_interval(value_P) for k, value_P in value_KP.items() if value_P.size},
        solved=int((correct_P > 0).sum()),
        tokens_per_response=total["sampled_tokens"] / (n * len(results)),
        truncation_rate=total.pop("num_truncated") / (n * len(results)),
        seconds=seconds,
        left_out={k: correct_P.size - value_P.size for k, value_P in value_KP.items() if value_P.size < correct_P.size},
        **total,
    )


_SEED_OFFSET = 1_000_003  # evaluation draws other random numbers than training
_VALUES_OF_A_TENSOR = 65_536
_RECORDED = (
    "pass_at", "num_prompts", "num_samples", "solved", "truncation_rate", "verifier_timeouts", "verifier_failures",
    "unique_tokens", "sampled_tokens", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """Evaluates on held-out prompts, the same way each time."""

    prompts: Sequence[Prompt]
    grader: Grader
    sampling: SamplingParams
    num_rollouts: int  # responses per prompt, n
    ks: tuple[int, ...]  # values of k for pass@k, each 1 to n
    seed: int  # sampling seed, the same for every evaluation
    observe: Observe = unobserved  # called at the start of each phase

    @classmethod
    def from_recipe(
        cls, config: TrainConfig, prompts: Sequence[Prompt], grader: Grader, observe: Observe = unobserved
    ) -> Benchmark | None:
        """Make the evaluation of a run's held-out prompts; return None if there are none."""
        if not prompts:
            return None
        settings = config.evaluation
        seed = config.seed + _SEED_OFFSET
        return cls(
            prompts, grader, config.evaluated_sampling, settings.rollouts_per_prompt, settings.ks, seed, observe=observe
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts. Scores on different prompts cannot be compared."""
        return fingerprint(self.prompts)

    def answer(self, sampler: Sampler) -> tuple[list[Group], float]:
        """Sample and verify responses to all prompts; return the groups, in order, and the wall time in seconds."""
        started = perf_counter()
        self.observe(Phase("evaluating"))
        token_ids = [p.token_ids for p in self.prompts]
        trees = sampler.sample(token_ids, self.num_rollouts, self.sampling, self.seed)
        self.observe(Phase("evaluating", f"verifying {sum(t.num_responses for t in trees):,} distinct responses"))
        groups = self.grader.verify(self.prompts, trees)
        return groups, perf_counter() - started

    def record(self, groups: Sequence[Group], seconds: float) -> dict[str, Any] | None:
        """Return the section `evaluation` of the metrics (docs/reference/metrics.md).

        Return None if there is a k for which no prompt has k verified responses.
        """
        results = list(map(count_responses, groups))
        summary = summarize(results, self.ks, seconds)
        overall = asdict(summary)
        if len(summary.pass_at) < len(self.ks):
            return None
        lost = [result.num_unverified for result in results]
        sources = sorted({result.data_set for result in results})
        by_source = {s: summarize([r for r in results if r.data_set == s], self.ks, None) for s in sources}
        by_source = {s: summary for s, summary in by_source.items() if len(summary.pass_at) == len(self.ks)}
        names = (*_RECORDED, "num_unverified", "left_out") if any(lost) else _RECORDED
        called = {"turns": summary.turns, "given_tokens": summary.given_tokens} if summary.calling_turns else {}
        return (
            {name: overall[name] for name in names}
            | called
            | {
                "by_source": {s: asdict(one)["pass_at"] for s, one in by_source.items()} if len(sources) > 1 else {},
                "prompts": {
                    "num_correct": [result.num_correct for result in results],
                    "sampled_tokens": [result.sampled_tokens for result in results],
                    **({"num_unverified": lost} if any(lost) else {}),
                },
            }
        )


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the name, the shape and fewer than 131,072 evenly spaced values of each tensor."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _VALUES_OF_A_TENSOR)].double().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.astype("<f8").tobytes())
    return digest.hexdigest()


def coverage_note(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence if pass@k of the largest k fell, and the intervals before and after do not overlap."""
    if len(evaluations) < 2:
        return []
    before_at, after_at = evaluations[0]["pass_at"], evaluations[-1]["pass_at"]
    k = max((k for k in before_at if k in after_at), key=int, default=1)
    if int(k) == 1 or after_at[k]["high"] >= before_at[k]["low"]:
        return []
    return [
        f"Coverage fell: held-out pass@{k} went from {before_at[k]['value']:.3f} to {after_at[k]['value']:.3f}, beyond "
        "the intervals. To keep more of it, lower optimizer.learning_rate, train for fewer steps, or count rare "
        "successes more (docs/how-to/broaden.md)."
    ]
