"""Evaluation, during training and in `brorl eval`: sample, verify, count, summarize, and optionally store.

Input: batches of prompts, with one engine call per batch. Output: counts per prompt, and pass@k over any subset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import TypeAlias

import numpy as np
from transformers import PreTrainedModel

from brorl.activity import Observe, Stage, unobserved
from brorl.algorithms.groups import Group
from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k_of_each
from brorl.format import Estimate
from brorl.prompts.prompt import Prompt, fingerprint
from brorl.rollout.engine import Sampler, SampleTask
from brorl.runs.step_record import EvaluatedPrompts, EvaluationRecord
from brorl.sampling import SamplingParams
from brorl.verdict import is_failure, is_timeout
from brorl.verification.grade import Grader


@dataclass(frozen=True)
class PromptCounts:
    """Counts for the n responses to one prompt."""

    prompt_id: str
    source: str
    domain: str  # selects the verifier for the responses
    num_samples: int  # n responses, duplicates included
    num_correct: int  # correct responses, 0 to `num_verified`
    num_truncated: int  # truncated responses, 0 to n
    num_distinct: int  # distinct responses, each of which is verified once
    sampled_tokens: int  # tokens in all responses
    unique_tokens: int  # sampled nodes of the tree: tokens that the engine had to compute
    verifier_timeouts: int  # distinct responses whose verification timed out; they count as incorrect
    verifier_failures: int  # distinct responses whose verification failed otherwise; they count as incorrect
    num_unverified: int = 0  # responses left unverified by infrastructure failures, 0 to n; excluded from pass@k
    calling_turns: int = 0  # turns that called tools, in all responses
    given_tokens: int = 0  # tool result tokens: given nodes of the tree

    @property
    def num_verified(self) -> int:
        """Number of responses with a verdict; pass@k is estimated from these."""
        return self.num_samples - self.num_unverified


@dataclass(frozen=True)
class BatchCounts:
    """The counts for an evaluated batch."""

    prompts: tuple[PromptCounts, ...]  # one per prompt
    seconds: float  # sampling and verification time


@dataclass(frozen=True)
class Summary:
    """Results over a set of prompts."""

    num_prompts: int  # number of prompts, P
    num_samples: int  # responses per prompt, n
    # k -> pass@k: the mean of unbiased estimates over prompts, with its interval. Prompts with fewer than k verified
    # responses are excluded; a k for which this excludes every prompt is missing.
    pass_at: dict[int, Estimate]
    solved: int  # prompts with at least one correct response
    tokens_per_response: float  # mean response length, in tokens
    truncation_rate: float  # fraction of truncated responses, 0 to 1
    verifier_timeouts: int  # distinct responses whose verification timed out
    verifier_failures: int  # distinct responses whose verification failed otherwise
    num_distinct: int  # distinct responses
    sampled_tokens: int  # tokens in all responses
    unique_tokens: int  # sampled nodes of all trees: tokens that the engine had to compute
    seconds: float | None  # sampling and verification time; None if unknown
    num_unverified: int = 0  # responses left unverified by infrastructure failures; excluded from pass@k
    left_out: dict[int, int] = field(default_factory=dict)  # k -> number of excluded prompts, if not 0
    calling_turns: int = 0  # turns that called tools
    given_tokens: int = 0  # tool result tokens: given nodes of all trees

    @property
    def turns(self) -> float:
        """Mean number of turns per response."""
        return 1 + self.calling_turns / (self.num_samples * self.num_prompts)


_TOTALS = (
    "verifier_timeouts", "verifier_failures", "num_distinct", "sampled_tokens", "unique_tokens", "num_unverified",
    "calling_turns", "given_tokens",
)  # fmt: skip


def count_responses(group: Group) -> PromptCounts:
    """Count a verified group's correct, truncated and distinct responses, and its tokens."""
    prompt = group.prompt
    tree = group.tree
    reasons = [verdict.reason for verdict in group.verdicts]
    return PromptCounts(
        prompt_id=prompt.id,
        source=prompt.source,
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


def summarize(prompts: Sequence[PromptCounts], ks: Sequence[int], seconds: float | None) -> Summary:
    """Summarize counts per prompt. All prompts must have the same number of responses."""
    sizes = {prompt.num_samples for prompt in prompts}
    if len(sizes) != 1:
        raise ValueError(
            f"expected prompts with the same number of samples, got {sorted(sizes) or 'no prompts'}; summarize the "
            "prompts of one evaluation"
        )
    n = sizes.pop()
    correct_P = np.array([prompt.num_correct for prompt in prompts], np.int64)
    verified_P = np.array([prompt.num_verified for prompt in prompts], np.int64)
    value_KP = {k: pass_at_k_of_each(correct_P, verified_P, k) for k in ks}

    total = {name: sum(getattr(prompt, name) for prompt in prompts) for name in (*_TOTALS, "num_truncated")}
    return Summary(
        num_prompts=len(prompts),
        num_samples=n,
        pass_at={k: mean_with_interval(value_P) for k, value_P in value_KP.items() if value_P.size},
        solved=int((correct_P > 0).sum()),
        tokens_per_response=total["sampled_tokens"] / (n * len(prompts)),
        truncation_rate=total.pop("num_truncated") / (n * len(prompts)),
        seconds=seconds,
        left_out={k: correct_P.size - value_P.size for k, value_P in value_KP.items() if value_P.size < correct_P.size},
        **total,
    )


def evaluation_record(batch: BatchCounts, ks: Sequence[int]) -> EvaluationRecord | None:
    """Return an evaluation's record, or None if there is a k for which no prompt has k verified responses."""
    prompts = batch.prompts
    summary = summarize(prompts, ks, batch.seconds)
    if len(summary.pass_at) < len(ks):
        return None
    lost = tuple(prompt.num_unverified for prompt in prompts)
    sources = sorted({prompt.source for prompt in prompts})
    by_source = {s: summarize([p for p in prompts if p.source == s], ks, None).pass_at for s in sources}
    by_source = {s: pass_at for s, pass_at in by_source.items() if len(pass_at) == len(ks)}
    return EvaluationRecord(
        pass_at=summary.pass_at,
        num_prompts=summary.num_prompts,
        num_samples=summary.num_samples,
        solved=summary.solved,
        truncation_rate=summary.truncation_rate,
        verifier_timeouts=summary.verifier_timeouts,
        verifier_failures=summary.verifier_failures,
        unique_tokens=summary.unique_tokens,
        sampled_tokens=summary.sampled_tokens,
        seconds=batch.seconds,
        num_unverified=summary.num_unverified if any(lost) else None,
        left_out=summary.left_out if any(lost) else None,
        turns=summary.turns if summary.calling_turns else None,
        given_tokens=summary.given_tokens if summary.calling_turns else None,
        by_source=by_source if len(sources) > 1 else {},
        prompts=EvaluatedPrompts(
            num_correct=tuple(prompt.num_correct for prompt in prompts),
            sampled_tokens=tuple(prompt.sampled_tokens for prompt in prompts),
            num_unverified=lost if any(lost) else None,
        ),
    )


@dataclass(frozen=True)
class PromptBatch:
    """The prompts for one engine call."""

    prompts: tuple[Prompt, ...]
    seed: int  # sampling seed
    source: str = ""  # dataset of the prompts; empty for a run's held-out prompts, which may come from several

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts. Scores are comparable only if their prompts have the same hash."""
        return fingerprint(self.prompts)


Store: TypeAlias = Callable[[Sequence[Group], BatchCounts], None]  # stores a batch's responses


@dataclass(frozen=True)
class Evaluator:
    """Samples, verifies and counts responses, in the same way for every batch."""

    grader: Grader
    sampling: SamplingParams
    num_rollouts: int  # n responses per prompt
    observe: Observe = unobserved  # called at the start of each stage

    def evaluate(self, sampler: Sampler, batch: PromptBatch, store: Store | None = None) -> BatchCounts:
        """Sample, verify and count responses to a batch of prompts, and store them if `store` is given."""
        started = perf_counter()
        self.observe(Stage("evaluating", f"{len(batch.prompts)} prompts of {batch.source}" if batch.source else ""))
        token_ids = [prompt.token_ids for prompt in batch.prompts]
        trees = sampler.sample(SampleTask(token_ids, self.num_rollouts, self.sampling, batch.seed))
        self.observe(Stage("evaluating", f"verifying {sum(t.num_responses for t in trees):,} distinct responses"))
        groups = self.grader.verify(batch.prompts, trees)
        counts = BatchCounts(tuple(map(count_responses, groups)), perf_counter() - started)
        if store is not None:
            store(groups, counts)
        return counts


_SEED_OFFSET = 1_000_003  # makes evaluation and training draw different random numbers


def held_out_batch(prompts: Sequence[Prompt], seed: int) -> PromptBatch | None:
    """Return a run's held-out prompts as one batch, the same in every evaluation, or None if there are none."""
    return PromptBatch(tuple(prompts), seed + _SEED_OFFSET) if prompts else None


def split_into_batches(prompts_of: Mapping[str, Sequence[Prompt]], size: int, seed: int) -> list[PromptBatch]:
    """Split each dataset's prompts into batches. A batch does not depend on later prompts or other datasets."""
    batches: list[PromptBatch] = []
    for name, prompts in prompts_of.items():
        for number, start in enumerate(range(0, len(prompts), size)):
            digest = blake2b(f"evaluation {seed}, part {number} of {name}".encode(), digest_size=8).digest()
            batches.append(PromptBatch(tuple(prompts[start : start + size]), int.from_bytes(digest, "little"), name))
    return batches


_VALUES_PER_TENSOR = 65_536


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of each tensor's name, shape and fewer than 131,072 evenly spaced values."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _VALUES_PER_TENSOR)].double().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.astype("<f8").tobytes())
    return digest.hexdigest()


def coverage_note(evaluations: Sequence[EvaluationRecord]) -> list[str]:
    """Return a sentence if pass@k at the largest k fell, and its intervals before and after do not overlap."""
    if len(evaluations) < 2:
        return []
    before_at = evaluations[0].pass_at
    after_at = evaluations[-1].pass_at
    k = max((k for k in before_at if k in after_at), default=1)
    if k == 1 or after_at[k].high >= before_at[k].low:
        return []
    return [
        f"Coverage fell: held-out pass@{k} went from {before_at[k].value:.3f} to {after_at[k].value:.3f}, beyond "
        "the intervals. To keep more of it, lower optimizer.learning_rate, train for fewer steps, or count rare "
        "successes more (docs/how-to/broaden.md)."
    ]
