"""The pilot of a plan: a few rollouts of a few training prompts, graded. The draws have their own seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brorl.activity import Stopwatch
from brorl.algorithms.groups import Group
from brorl.errors import UnverifiedResponsesError
from brorl.prompts.prompt import Prompt
from brorl.seeds import seed_sequence
from brorl.training.local_parts import LocalParts
from brorl.tree import fraction_cut

_SEED_TAG = 0x9140  # keeps the pilot's draws apart from those of training


def generator_of(parts: LocalParts, purpose: int) -> np.random.Generator:
    """Return a generator for one purpose of the pilot, a function of the run's seed alone."""
    return np.random.default_rng(seed_sequence(parts.config.seed, _SEED_TAG, purpose))


@dataclass(frozen=True)
class SampledGroups:
    """Groups of one call of the engine, with the time of each phase."""

    groups: list[Group]  # the groups all of whose rollouts were verified: a plan compares groups of one size
    num_incomplete: int  # number of prompts that were left out
    clock: Stopwatch  # the time of each phase


@dataclass(frozen=True)
class PilotSummary:
    """Means over the pilot's rollouts."""

    num_prompts: int
    num_rollouts: int  # rollouts of each
    accuracy: float  # fraction of correct rollouts
    entropy: float  # minus the mean log-prob of the sampled tokens, nats per token
    mean_length: float  # tokens per rollout
    truncation_rate: float  # fraction of rollouts that reached the length limit
    duplicate_rate: float  # fraction of rollouts that repeat another rollout of their prompt
    tokens_per_second: float  # sampled tokens per second of generation

    @classmethod
    def of(cls, groups: Sequence[Group], generation_seconds: float) -> PilotSummary:
        """Summarize the groups of a pilot, each with the same number of rollouts."""
        trees = [g.tree for g in groups]
        rollouts = sum(t.num_rollouts for t in trees)
        tokens = sum(t.num_sampled_tokens for t in trees)
        return cls(
            num_prompts=len(groups),
            num_rollouts=trees[0].num_rollouts,
            accuracy=sum(g.num_correct for g in groups) / rollouts,
            entropy=-sum(float((t.count * t.logprob).sum()) for t in trees) / tokens,
            mean_length=tokens / rollouts,
            truncation_rate=fraction_cut(trees),
            duplicate_rate=1 - sum(t.num_responses for t in trees) / rollouts,
            tokens_per_second=tokens / generation_seconds,
        )


def sample(parts: LocalParts, prompts: Sequence[Prompt], num_rollouts: int, seed: int) -> SampledGroups:
    """Sample and grade N rollouts of each prompt as a step does; the seed is that of the draws.

    Raises:
        UnverifiedResponsesError: If no prompt has all of its rollouts verified.
    """
    clock = Stopwatch(now=parts.config.engine.now)
    with clock("generation"):
        trees = parts.engine.sample([p.token_ids for p in prompts], num_rollouts, parts.config.sampling.params, seed)
    with clock("verification"):
        groups = parts.grader.verify(prompts, trees)
    complete = [parts.grader.rewarded(group, step=1) for group in groups if not group.num_unverified]
    if not complete:
        reasons = Counter(v.reason for group in groups for v in group.verdicts if v.unverified)
        raise UnverifiedResponsesError(
            f"each of the {len(prompts)} prompts of a call has rollouts that could not be verified (most often: "
            f"{reasons.most_common(1)[0][0]}); free memory and processes, then rerun the command"
        )
    return SampledGroups(complete, len(prompts) - len(complete), clock)
