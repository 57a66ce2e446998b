"""Dynamic sampling with refill: samples prompts until a step has its groups, and loses none.

Groups beyond what a step needs are carried to the next one; their log-probs stay those of the policy that sampled them.
Every prompt gets the same number of rollouts, unless widening is asked for: then prompts whose pilot found only
correct or only incorrect rollouts get more, from a budget, and their draws become one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from brorl.activity import Observe, Round, unobserved
from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptSupply
from brorl.rollout.engine import Engine
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.theory.allocation import AdaptiveAllocation, allocate_rollouts, fit_prior
from brorl.theory.pass_rates import PassRates
from brorl.training.stopwatch import Stopwatch
from brorl.training.why_not_mixed import why_not_mixed
from brorl.tree import RolloutTree
from brorl.verify.grade import Grader
from brorl.verify.verifier import TIMEOUT, TRUNCATED, Verdict, is_failure

_ROUND_BITS = 20  # an attempt has fewer rounds than two to the power of this


class NoMixedGroupsError(RuntimeError):
    """No group had both correct and incorrect rollouts for as many rounds as the config allows.

    Attributes:
        kept: Groups that were found before, for a later step.
        collected: What was sampled all the same.
    """

    def __init__(self, message: str, kept: Sequence[Group], collected: Collected) -> None:
        super().__init__(message)
        self.kept, self.collected = tuple(kept), collected


@dataclass
class Collected:
    """What sampling gave in one step.

    Attributes:
        groups: Every group sampled in this step, kept or not.
        verdicts: For each of them the verdict of each distinct response.
        widened: For each of them whether it got more rollouts because of its outcomes: its share of correct rollouts
            is then a biased estimate of its pass rate, and nothing that assumes a fixed N holds for it.
        mixed: How many of them had mixed outcomes.
        all_correct: How many were all correct.
        rounds: Number of calls of the engine.
        attempt: How often the step had found nothing to learn from before.
        pilot_rollouts: Rollouts that every prompt got, where more could follow; None where N is fixed.
        pilot_correct: Number of correct rollouts of each pilot.
        keeps_all: Whether groups with one outcome are learned from too; dynamic sampling drops them.
    """

    groups: list[Group] = field(default_factory=list)
    verdicts: list[list[Verdict]] = field(default_factory=list)
    widened: list[bool] = field(default_factory=list)
    mixed: int = 0
    all_correct: int = 0
    rounds: int = 0
    attempt: int = 0
    pilot_rollouts: int | None = None
    pilot_correct: list[int] = field(default_factory=list)
    keeps_all: bool = False

    def summary(self) -> dict[str, Any]:
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
            "verifier_failures": sum(is_failure(reason) for reason in reasons),
            **self._dropped(),
            **self._by_source(),
            **self._widening_summary(),
        }

    def _dropped(self) -> dict[str, int]:
        """Return what dynamic sampling threw away: rollouts and tokens of the step's groups with one outcome.

        Surplus groups with both outcomes are carried to later steps; they are not part of it.
        """
        trees = [g.tree for g in self.groups if not (self.keeps_all or g.is_mixed)]
        return {
            "samples_dropped": sum(t.num_rollouts for t in trees),
            "sampled_tokens_dropped": sum(t.num_sampled_tokens for t in trees),
            "unique_tokens_dropped": sum(t.num_unique_tokens for t in trees),
        }

    def _by_source(self) -> dict[str, Any]:
        """Return what the sources of the prompts gave; nothing where there is one."""
        sources = sorted({g.prompt.source for g in self.groups})
        if len(sources) < 2:
            return {}
        return {
            "by_source": {source: _share([g for g in self.groups if g.prompt.source == source]) for source in sources}
        }

    def _widening_summary(self) -> dict[str, float]:
        """Return how rollouts were spread over prompts; nothing where N is fixed."""
        if self.pilot_rollouts is None:
            return {}
        rollouts_G = [g.tree.num_rollouts for g in self.groups]
        pilots = self.pilot_rollouts * len(self.groups)
        return {
            "adaptive": True,
            "pilot_rollouts": self.pilot_rollouts,
            "groups_pilot_mixed": sum(0 < k < self.pilot_rollouts for k in self.pilot_correct),
            "groups_widened": sum(self.widened),
            "groups_widened_mixed": sum(w and g.is_mixed for w, g in zip(self.widened, self.groups, strict=True)),
            "samples_pilot": pilots,
            "samples_widening": sum(rollouts_G) - pilots,
            "mean_rollouts": sum(rollouts_G) / max(len(rollouts_G), 1),
            "max_rollouts": max(rollouts_G, default=0),
        }


@dataclass(frozen=True)
class Collector:
    """Samples, verifies and keeps groups with mixed outcomes.

    Attributes:
        engine: Samples trees.
        stream: Where prompts come from.
        grader: Verifies and rewards responses.
        sampling: How responses are sampled.
        rollouts_per_prompt: N; with `widening` the size of the pilot.
        prompts_per_step: Number of groups a step trains on.
        dynamic_sampling: False keeps every group.
        max_tries: Give up after this many rounds in a row without a mixed group.
        seed: Seed of the run.
        widening: How far groups without mixed outcomes are widened; None for a fixed N.
        observe: Gets each round when it begins.
    """

    engine: Engine
    stream: PromptSupply
    grader: Grader
    sampling: SamplingParams
    rollouts_per_prompt: int
    prompts_per_step: int
    dynamic_sampling: bool
    max_tries: int
    seed: int
    widening: AdaptiveAllocation | None = None
    observe: Observe = unobserved

    def collect(
        self, step: int, carried: Sequence[Group], clock: Stopwatch, attempt: int = 0
    ) -> tuple[list[Group], list[Group], Collected]:
        """Fill one step.

        Args:
            step: The step; with the run's seed it decides all draws.
            carried: Groups left over by earlier steps; they are used first.
            clock: Where the time of generation and verification is added.
            attempt: How often the step has found nothing to learn from; each attempt has draws of its own.

        Returns:
            `prompts_per_step` groups to train on, the surplus, and what was sampled.

        Raises:
            NoMixedGroupsError: After `max_tries` rounds in a row without a mixed group.
        """
        pilot_rollouts = self.rollouts_per_prompt if self.widening else None
        collected = Collected(attempt=attempt, pilot_rollouts=pilot_rollouts, keeps_all=not self.dynamic_sampling)
        kept, tries, number = list(carried), 0, 0
        while len(kept) < self.prompts_per_step:
            number += 1
            self.observe(Round(step, number, len(kept), self.prompts_per_step))
            groups, verdicts = self._round(step, collected, self.prompts_per_step - len(kept), clock)
            mixed = [g for g in groups if g.is_mixed]
            collected.groups += groups
            collected.verdicts += verdicts
            collected.widened += [g.tree.num_rollouts > self.rollouts_per_prompt for g in groups]
            collected.mixed += len(mixed)
            collected.all_correct += sum(g.num_correct == g.tree.num_rollouts for g in groups)
            kept += mixed if self.dynamic_sampling else groups
            tries = 0 if mixed or not self.dynamic_sampling else tries + 1
            if tries == self.max_tries:
                why = why_not_mixed(groups, verdicts, self.max_tries, self.widening is not None)
                raise NoMixedGroupsError(why, kept, collected)
        return kept[: self.prompts_per_step], kept[self.prompts_per_step :], collected

    def _round(
        self, step: int, so_far: Collected, missing: int, clock: Stopwatch
    ) -> tuple[list[Group], list[list[Verdict]]]:
        """Sample as many prompts as should fill what is missing, going by the share of mixed groups in this step."""
        share = (so_far.mixed + 1) / (len(so_far.groups) + 1) if self.dynamic_sampling else 1.0
        prompts = self.stream.take(min(self.prompts_per_step, ceil(missing / share)))
        trees = self._sample(prompts, self.rollouts_per_prompt, step, so_far, clock)
        with clock("verification"):
            verdicts = self.grader.verdicts(prompts, trees)
        groups = [self.grader.group(p, t, vs, step) for p, t, vs in zip(prompts, trees, verdicts, strict=True)]
        if self.widening:
            self._widen(self.widening, groups, verdicts, step, so_far, clock)
        return groups, verdicts

    def _sample(
        self, prompts: Sequence[Prompt], num_rollouts: int, step: int, so_far: Collected, clock: Stopwatch
    ) -> list[RolloutTree]:
        """Call the engine, with a seed of its own."""
        so_far.rounds += 1
        draw = (so_far.attempt << _ROUND_BITS) + so_far.rounds
        seed = derived_seed(self.seed, step, draw)
        with clock("generation"):
            return self.engine.sample([p.token_ids for p in prompts], num_rollouts, self.sampling, seed)

    def _widen(
        self,
        widening: AdaptiveAllocation,
        groups: list[Group],
        verdicts: list[list[Verdict]],
        step: int,
        so_far: Collected,
        clock: Stopwatch,
    ) -> None:
        """Replace groups without mixed outcomes by wider ones, in place, while the round's budget lasts.

        The prior of pass rates is fitted to this step's pilots alone, so that a resumed run makes the same choices.
        """
        so_far.pilot_correct += [g.num_correct for g in groups]
        prior = fit_prior(self.rollouts_per_prompt, so_far.pilot_correct)
        budget = len(groups) * (widening.samples_per_prompt - self.rollouts_per_prompt)
        while choice := _choose(groups, budget, widening.max_rollouts, prior):
            for size in sorted({more for _, more in choice}):
                members = [g for g, more in choice if more == size]
                prompts = [groups[g].prompt for g in members]
                trees = self._sample(prompts, size, step, so_far, clock)
                with clock("verification"):
                    for g, tree in zip(members, trees, strict=True):
                        groups[g], verdicts[g] = self._merge(groups[g], verdicts[g], tree, step)
                budget -= size * len(members)

    def _merge(
        self, group: Group, verdicts: Sequence[Verdict], more: RolloutTree, step: int
    ) -> tuple[Group, list[Verdict]]:
        """Add rollouts to a group; only responses that it did not have are verified."""
        verdict_of = dict(zip(_responses(group.tree), verdicts, strict=True))
        responses = _responses(more)
        fresh = np.flatnonzero([r not in verdict_of for r in responses])
        if fresh.size:
            unseen, _ = more.select(fresh)
            judged = self.grader.verdicts([group.prompt], [unseen])[0]
            verdict_of.update(zip(_responses(unseen), judged, strict=True))
        tree = RolloutTree.merge([group.tree, more])
        merged = [verdict_of[r] for r in _responses(tree)]
        return self.grader.group(group.prompt, tree, merged, step), merged


def _share(groups: Sequence[Group]) -> dict[str, float]:
    samples = sum(g.tree.num_rollouts for g in groups)
    return {
        "groups": len(groups),
        "groups_mixed": sum(g.is_mixed for g in groups),
        "share_correct": sum(g.num_correct for g in groups) / samples,
    }


def _choose(groups: Sequence[Group], budget: int, max_rollouts: int, prior: PassRates) -> list[tuple[int, int]]:
    rollouts_G = [g.tree.num_rollouts for g in groups]
    return allocate_rollouts(rollouts_G, [g.num_correct for g in groups], budget, max_rollouts, prior)


def _responses(tree: RolloutTree) -> list[tuple[tuple[int, ...], bool]]:
    """Return what tells the distinct responses of a tree apart: their tokens, and whether they ended by themselves."""
    return [(tokens, done) for (tokens, _), done in zip(tree.responses(), tree.finished.tolist(), strict=True)]
