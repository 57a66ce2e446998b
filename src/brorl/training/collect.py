"""Dynamic sampling with refill: samples prompts until a step has its groups, and loses none.

Groups beyond what a step needs are carried to the next one; their log-probs are those of the policy that sampled them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from brorl.algorithms.dynamic_sampling import has_mixed_outcomes
from brorl.algorithms.groups import Group
from brorl.prompts import PromptStream
from brorl.rollout.engine import Engine
from brorl.sampling import SamplingParams
from brorl.training.stopwatch import Stopwatch
from brorl.verify.grade import TRUNCATED, grade
from brorl.verify.verifier import Verdict, Verifier

TIMEOUT = "timeout"


class NoMixedGroupsError(RuntimeError):
    """No group had both correct and incorrect rollouts for as many rounds as the config allows.

    Attributes:
        kept: Groups that were found before, for a later step.
    """

    def __init__(self, message: str, kept: Sequence[Group]) -> None:
        super().__init__(message)
        self.kept = tuple(kept)


@dataclass
class Collected:
    """What sampling gave in one step.

    Attributes:
        groups: Every group sampled in this step, kept or not.
        verdicts: For each of them the verdict of each distinct response.
        mixed: How many of them had mixed outcomes.
        all_correct: How many were all correct.
        rounds: Number of calls of the engine.
    """

    groups: list[Group] = field(default_factory=list)
    verdicts: list[list[Verdict]] = field(default_factory=list)
    mixed: int = 0
    all_correct: int = 0
    rounds: int = 0

    def summary(self) -> dict[str, float]:
        """Return the numbers for the metrics; sums over the groups sampled in this step."""
        trees = [g.tree for g in self.groups]
        rollouts = sum(t.num_rollouts for t in trees)
        reasons = [v.reason for vs in self.verdicts for v in vs]
        return {
            "rounds": self.rounds,
            "groups": len(self.groups),
            "groups_mixed": self.mixed,
            "groups_all_correct": self.all_correct,
            "samples": rollouts,
            "sampled_tokens": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens": sum(t.num_unique_tokens for t in trees),
            "distinct_responses": sum(t.num_responses for t in trees),
            "mean_length": sum(int((t.leaf_count * t.length).sum()) for t in trees) / max(rollouts, 1),
            "reward": sum(float((g.tree.leaf_count * g.reward_L).sum()) for g in self.groups) / max(rollouts, 1),
            "share_correct": sum(g.num_correct for g in self.groups) / max(rollouts, 1),
            "share_truncated": sum(int(t.leaf_count[~t.finished].sum()) for t in trees) / max(rollouts, 1),
            "responses_truncated": reasons.count(TRUNCATED),
            "verifier_timeouts": reasons.count(TIMEOUT),
        }


@dataclass(frozen=True)
class Collector:
    """Samples, verifies and keeps groups with mixed outcomes.

    Attributes:
        engine: Samples trees.
        stream: Where prompts come from.
        verifiers: Verifier of each domain.
        decode: Token ids of a response to its text.
        sampling: How responses are sampled.
        rollouts_per_prompt: N.
        prompts_per_step: Number of groups a step trains on.
        dynamic_sampling: False keeps every group.
        max_tries: Give up after this many rounds in a row without a mixed group.
        seed: Seed of the run.
    """

    engine: Engine
    stream: PromptStream
    verifiers: Mapping[str, Verifier]
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    rollouts_per_prompt: int
    prompts_per_step: int
    dynamic_sampling: bool
    max_tries: int
    seed: int

    def collect(
        self, step: int, carried: Sequence[Group], clock: Stopwatch
    ) -> tuple[list[Group], list[Group], Collected]:
        """Fill one step.

        Args:
            step: The step; with the run's seed it decides all draws.
            carried: Groups left over by earlier steps; they are used first.
            clock: Where the time of generation and verification is added.

        Returns:
            `prompts_per_step` groups to train on, the surplus, and what was sampled.

        Raises:
            NoMixedGroupsError: After `max_tries` rounds in a row without a mixed group.
        """
        kept, collected, tries = list(carried), Collected(), 0
        while len(kept) < self.prompts_per_step:
            groups, verdicts = self._round(step, collected, self.prompts_per_step - len(kept), clock)
            mixed = [g for g in groups if has_mixed_outcomes(g)]
            collected.groups += groups
            collected.verdicts += verdicts
            collected.mixed += len(mixed)
            collected.all_correct += sum(g.num_correct == g.tree.num_rollouts for g in groups)
            kept += mixed if self.dynamic_sampling else groups
            tries = 0 if mixed or not self.dynamic_sampling else tries + 1
            if tries == self.max_tries:
                raise NoMixedGroupsError(self._explanation(groups), kept)
        return kept[: self.prompts_per_step], kept[self.prompts_per_step :], collected

    def _round(
        self, step: int, so_far: Collected, missing: int, clock: Stopwatch
    ) -> tuple[list[Group], list[list[Verdict]]]:
        """Sample as many prompts as should fill what is missing, going by the share of mixed groups in this step."""
        share = (so_far.mixed + 1) / (len(so_far.groups) + 1) if self.dynamic_sampling else 1.0
        prompts = self.stream.take(min(self.prompts_per_step, ceil(missing / share)))
        so_far.rounds += 1
        seed = int(np.random.SeedSequence([self.seed, step, so_far.rounds]).generate_state(1, np.uint64)[0])
        with clock("generation"):
            trees = self.engine.sample([p.token_ids for p in prompts], self.rollouts_per_prompt, self.sampling, seed)
        with clock("verification"):
            verdicts = grade(prompts, trees, self.verifiers, self.decode)
        groups = [
            Group(p, t, np.array([v.correct for v in vs]), np.array([v.score for v in vs]))
            for p, t, vs in zip(prompts, trees, verdicts, strict=True)
        ]
        return groups, verdicts

    def _explanation(self, last: Sequence[Group]) -> str:
        solved = sum(g.num_correct > 0 for g in last)
        state = "all rollouts were correct" if solved == len(last) else "no rollout was correct"
        if 0 < solved < len(last):
            state = f"in {solved} of the last {len(last)} groups all rollouts were correct, in the others none"
        return (
            f"no group had both correct and incorrect rollouts in {self.max_tries} rounds in a row ({state}): "
            "there is nothing left to learn from these prompts with this N; try more rollouts_per_prompt, a higher "
            "sampling.temperature, or other prompts"
        )
