"""Dynamic sampling with refill: samples prompts until a step has its groups, and loses none.

Surplus groups wait for the next step; their log-probs stay those of the policy that sampled them. Every prompt gets the
same number of rollouts, unless allocation is adaptive: then prompts whose first rollouts are all correct or all
incorrect get more, within a budget, and all rollouts of a prompt become one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from brorl.activity import Observe, Round, unobserved
from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptSupply
from brorl.rollout.engine import Engine, Sampler
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.theory.allocation import AdaptiveAllocation, allocate_rollouts, fit_prior
from brorl.theory.pass_rates import PassRates
from brorl.training.drawn import GradedPrompt, RetryPolicy
from brorl.training.source import Batch, Collected, SourceState
from brorl.training.stopwatch import Stopwatch
from brorl.tree import RolloutTree
from brorl.verification.grade import Grader
from brorl.verification.verifier import Verdict

_ROUND_BITS = 20  # an attempt has fewer rounds than two to the power of this


def prompts_of_round(
    prompts_per_step: int, missing: ArrayLike, kept: ArrayLike, sampled: ArrayLike
) -> NDArray[np.int64] | np.int64:
    """Return the prompts that should fill a step at the kept fraction so far, at most `prompts_per_step`.

    Args:
        prompts_per_step: Groups that a step trains on.
        missing: Groups that the step still needs.
        kept: Groups that earlier rounds of the step kept.
        sampled: Groups that they sampled.
    """
    fraction = np.add(kept, 1) / np.add(sampled, 1)
    return np.minimum(prompts_per_step, np.ceil(np.divide(missing, fraction))).astype(np.int64)


@dataclass
class Collector:
    """A source that samples when it is called: it samples, verifies and keeps mixed groups.

    Attributes:
        engine: Samples trees.
        stream: The training prompts.
        grader: Verifies and rewards responses.
        sampling: How responses are sampled.
        rollouts_per_prompt: N; with `adaptive` the first rollouts of every prompt.
        prompts_per_step: Number of groups that a step trains on.
        dynamic_sampling: False keeps every group.
        max_tries: Give up after this many rounds in a row without a mixed group.
        seed: Seed of the run.
        adaptive: How many more rollouts groups that are not mixed may get; None for a fixed N.
        keep_old_logprobs: Adds the old log-probs to groups that wait for a later step.
        clock: Adds up the seconds of generation, verification and training.
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
    adaptive: AdaptiveAllocation | None = None
    keep_old_logprobs: Callable[[Sequence[Group]], list[Group]] = list
    clock: Stopwatch = field(default_factory=Stopwatch)
    observe: Observe = unobserved

    def __post_init__(self) -> None:
        self._waiting: tuple[Group, ...] = ()
        self._attempts = 0
        self._tries = RetryPolicy(self.max_tries, self.dynamic_sampling, self.adaptive is not None)
        self._before: SourceState | None = None

    @property
    def sampler(self) -> Sampler:
        """Samples other prompts with the published weights."""
        return self.engine

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        return self.stream.num_prompts

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; see `GroupSource`."""
        self.engine.load_weights(weights, version)
        self._before = None

    def state(self) -> SourceState:
        """Return the state for a checkpoint."""
        return SourceState(self.stream.state_dict(), self._waiting, self._attempts)

    def load_state(self, state: SourceState) -> None:
        """Restore a state; see `GroupSource`."""
        if state.stream is not None:
            self.stream.load_state_dict(state.stream)
        self._waiting, self._attempts = state.waiting, state.attempts

    def rewind(self) -> None:
        """Undo the last `next_groups`, unless weights were published since; its prompts are sampled again."""
        if self._before is not None:
            self.load_state(self._before)

    def next_groups(self, step: int) -> Batch:
        """Sample until a step has its groups. Waiting groups are used first.

        Args:
            step: The step; with the run's seed and the attempt it decides all draws.

        Returns:
            `prompts_per_step` groups, and everything that was sampled for them.

        Raises:
            NoMixedGroupsError: After `max_tries` rounds in a row without a mixed group.
            UnverifiedError: After three rounds in a row in which most rollouts could not be verified.
        """
        self._before = self.state()
        pilot_rollouts = self.rollouts_per_prompt if self.adaptive else None
        collected = Collected(
            attempt=self._attempts, pilot_rollouts=pilot_rollouts, keeps_all=not self.dynamic_sampling
        )
        self._tries.restart()
        kept, number = list(self._waiting), 0
        while len(kept) < self.prompts_per_step:
            number += 1
            self.observe(Round(step, number, len(kept), self.prompts_per_step))
            drawn = self._round(step, collected, self.prompts_per_step - len(kept))
            kept += [one.group for one in drawn if one.group is not None and self._tries.keeps(one.group)]
            self._tries.add(drawn)
            if self._tries.are_over:
                self._waiting, self._attempts = tuple(kept), self._attempts + 1
                raise self._tries.error(collected)
        surplus = kept[self.prompts_per_step :]
        with self.clock("training"):
            self._waiting, self._attempts = tuple(self.keep_old_logprobs(surplus)), 0
        collected.trained = kept[: self.prompts_per_step]
        return Batch(kept[: self.prompts_per_step], collected, len(self._waiting))

    def _round(self, step: int, so_far: Collected, missing: int) -> list[GradedPrompt]:
        """Sample as many prompts as should fill the step, given the fraction of mixed groups so far."""
        number = missing
        if self.dynamic_sampling:
            number = int(prompts_of_round(self.prompts_per_step, missing, so_far.num_mixed, len(so_far.groups)))
        prompts = self.stream.take(number)
        trees = self._sample(prompts, self.rollouts_per_prompt, step, so_far)
        with self.clock("verification"):
            verdicts = self.grader.verdicts(prompts, trees)
        drawn = [self._draw(p, t, vs, step) for p, t, vs in zip(prompts, trees, verdicts, strict=True)]
        if self.adaptive:
            self._extend(self.adaptive, drawn, step, so_far)
        for one in drawn:
            so_far.add(one.group, one.whole(self.grader, step), one.verdicts)
        return drawn

    def _sample(self, prompts: Sequence[Prompt], num_rollouts: int, step: int, so_far: Collected) -> list[RolloutTree]:
        """Call the engine with a new seed."""
        so_far.rounds += 1
        draw = (so_far.attempt << _ROUND_BITS) + so_far.rounds
        with self.clock("generation"):
            seed = derived_seed(self.seed, step, draw)
            return self.engine.sample([p.token_ids for p in prompts], num_rollouts, self.sampling, seed)

    def _draw(self, prompt: Prompt, tree: RolloutTree, verdicts: list[Verdict], step: int) -> GradedPrompt:
        group = self.grader.group(prompt, tree, verdicts, step)
        return GradedPrompt(prompt, tree, verdicts, group and replace(group, version=self.engine.version))

    def _extend(self, adaptive: AdaptiveAllocation, drawn: list[GradedPrompt], step: int, so_far: Collected) -> None:
        """Give more rollouts to groups that are not mixed, in place, while the round's budget lasts.

        The prior of pass rates is fitted to the first rollouts of this step only: a resumed run makes the same choices.
        It needs pilots of one size, and pilots with unverified rollouts do not count. A prompt without a group gets no
        more rollouts.
        """
        so_far.pilots += [(d.group.tree.num_rollouts, d.group.num_correct) for d in drawn if d.group is not None]
        whole_pilots = [k for n, k in so_far.pilots if n == self.rollouts_per_prompt]
        prior = fit_prior(self.rollouts_per_prompt, whole_pilots)
        budget = len(drawn) * (adaptive.samples_per_prompt - self.rollouts_per_prompt)
        while choice := _choose(drawn, budget, adaptive.max_rollouts, prior):
            for size in sorted({more for _, more in choice}):
                members = [i for i, more in choice if more == size]
                trees = self._sample([drawn[i].prompt for i in members], size, step, so_far)
                with self.clock("verification"):
                    for i, tree in zip(members, trees, strict=True):
                        drawn[i] = self._merge(drawn[i], tree, step)
                budget -= size * len(members)

    def _merge(self, drawn: GradedPrompt, more: RolloutTree, step: int) -> GradedPrompt:
        """Add rollouts to a prompt; only responses that are new to it, or have no verdict yet, are verified."""
        verdict_of = {
            response: verdict
            for response, verdict in zip(_responses(drawn.tree), drawn.verdicts, strict=True)
            if not verdict.unverified
        }
        tree = RolloutTree.merge([drawn.tree, more])
        new = np.flatnonzero([response not in verdict_of for response in _responses(tree)])
        if new.size:
            unseen, _ = tree.select(new)
            (found,) = self.grader.verdicts([drawn.prompt], [unseen])
            verdict_of.update(zip(_responses(unseen), found, strict=True))
        return self._draw(drawn.prompt, tree, [verdict_of[response] for response in _responses(tree)], step)


def _choose(drawn: Sequence[GradedPrompt], budget: int, max_rollouts: int, prior: PassRates) -> list[tuple[int, int]]:
    """Return the prompts that get more rollouts, by place, each with the number."""
    group_of = {place: one.group for place, one in enumerate(drawn) if one.group is not None}
    groups, places = list(group_of.values()), list(group_of)
    rollouts_G, correct_G = [g.tree.num_rollouts for g in groups], [g.num_correct for g in groups]
    choice = allocate_rollouts(rollouts_G, correct_G, budget, max_rollouts, prior)
    room_of = {place: max_rollouts - drawn[place].tree.num_rollouts for place in places}  # unverified ones cost, too
    return [(places[i], min(more, room_of[places[i]])) for i, more in choice if room_of[places[i]] > 0]


def _responses(tree: RolloutTree) -> list[tuple[tuple[int, ...], bool]]:
    """Return the distinct responses of a tree as keys: their tokens, and whether they are finished."""
    return [(tokens, done) for (tokens, _), done in zip(tree.responses(), tree.finished.tolist(), strict=True)]
