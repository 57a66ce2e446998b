"""Dynamic sampling with refill: samples prompts until a step has its groups, and loses none.

A round takes nearly as long for a few prompts as for many on a GPU, so each round samples as many as fill the step in
nine of ten cases, at the fraction of kept groups in this and the last steps. Surplus groups are carried to the next
step; their log-probs stay those of the policy that sampled them. Every prompt gets the same number of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from brorl.activity import Round
from brorl.algorithms.groups import Group
from brorl.arrays import IntArray
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Engine, Sampler
from brorl.runs.checkpoint import SourceState
from brorl.seeds import derived_seed
from brorl.training.source import Batch, GroupSource, RetryPolicy
from brorl.tree import RolloutTree

MEMORY = 0.8  # weight of the groups of a step when the next one chooses its rounds, that of its own being 1
MOST_STEPS = 6  # most prompts of a round, in steps: an estimate that is too low must not sample without end
_SURE = 1.2816  # the standard normal distribution is below it in nine of ten cases
_SURPLUS = 1 / 3  # of a step's groups: most surplus to expect, so that few groups wait for longer than one step
_ROUND_BITS = 20  # an attempt has fewer rounds than two to the power of this


def prompts_of_round(
    prompts_per_step: int, missing: ArrayLike, kept: ArrayLike, sampled: ArrayLike
) -> IntArray | np.int64:
    """Return the number of prompts that should fill a step: as many as are missing where nothing was sampled yet.

    It is the smallest n for which a normal variable with the mean nf and the variance nf(1 - f) is at least `missing`
    minus a half, as it stands for whole numbers, in nine of ten cases, where f is the kept fraction. The surplus to
    expect is at most a third of a step. At most `MOST_STEPS` steps are sampled at once, and one while no group was
    kept: then a run may be about to give up. `kept` and `sampled` are the groups of the rounds of this step so far, and
    of those before it, each step with `MEMORY` times the weight of the next.
    """
    needed = np.asarray(missing, np.float64)
    fraction = np.add(kept, 1) / np.add(sampled, 1)
    spread = _SURE * np.sqrt(fraction * (1 - fraction))
    likely = ((spread + np.sqrt(spread**2 + 4 * fraction * np.maximum(needed - 0.5, 0))) / (2 * fraction)) ** 2
    number = np.minimum(likely, (needed + prompts_per_step * _SURPLUS) / fraction)
    most = prompts_per_step * np.where(np.less(kept, 1) & np.greater(sampled, 0), 1, MOST_STEPS)
    size: IntArray | np.int64 = np.minimum(most, np.ceil(number - 1e-9)).astype(np.int64)  # the roots are rounded
    return size


@dataclass(kw_only=True)
class Collector(GroupSource):
    """A source that samples when it is called: it samples, verifies and keeps mixed groups."""

    engine: Engine  # samples trees
    # adds the old log-probs to groups that are carried to a later step
    keep_old_logprobs: Callable[[Sequence[Group]], list[Group]] = list

    def __post_init__(self) -> None:
        super().__post_init__()
        self._carried: tuple[Group, ...] = ()
        self._seen = (0.0, 0.0)  # kept and sampled groups of earlier steps, by their weight
        self._retries = RetryPolicy(self.config.dynamic_sampling)

    @property
    def sampler(self) -> Sampler:
        """Samples other prompts with the published weights."""
        return self.engine

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; see `GroupSource`."""
        self.engine.load_weights(weights, version)
        self._before = None

    def state(self) -> SourceState:
        """Return the state for a checkpoint."""
        return SourceState(self.stream.state_dict(), self._carried, self._attempts, seen=self._seen)

    def load_state(self, state: SourceState) -> None:
        """Restore a state; see `GroupSource`."""
        if state.stream is not None:
            self.stream.load_state_dict(state.stream)
        self._carried, self._attempts, self._seen = state.carried, state.attempts, state.seen

    def next_batch(self, step: int) -> Batch:
        """Sample until a step has its groups, or until too many rounds in a row gave none. Carried ones come first."""
        self._before = self.state()
        per_step = self.config.prompts_per_step
        batch = Batch(attempt=self._attempts, keeps_all=not self.config.dynamic_sampling.enabled)
        self._retries.restart()
        kept, number = list(self._carried), 0
        while len(kept) < per_step:
            number += 1
            self.observe(Round(step, number, len(kept), per_step, batch.fraction_cut))
            groups = self._round(step, batch, per_step - len(kept))
            kept += self._retries.kept(groups)
            self._retries.add(groups)
            if self._retries.is_over:
                self._carried, self._attempts = tuple(kept), self._attempts + 1
                raise self._retries.error(batch)
        kept_before, sampled_before = self._seen
        self._seen = (MEMORY * (kept_before + batch.num_mixed), MEMORY * (sampled_before + len(batch.verified)))
        batch.groups, surplus = kept[:per_step], kept[per_step:]
        with self.clock("training"):
            self._carried, self._attempts = tuple(self.keep_old_logprobs(surplus)), 0
        batch.num_carried = len(self._carried)
        return batch

    def _round(self, step: int, batch: Batch, missing: int) -> list[Group]:
        """Sample as many prompts as should fill the step."""
        number = missing
        if self.config.dynamic_sampling.enabled:
            kept, sampled = self._seen[0] + batch.num_mixed, self._seen[1] + len(batch.verified)
            number = int(prompts_of_round(self.config.prompts_per_step, missing, kept, sampled))
        prompts = self.stream.take(number)
        trees = self._sample(prompts, step, batch)
        with self.clock("verification"):
            verified = self.grader.verify(prompts, trees)
        groups = [replace(self.grader.rewarded(g, step), version=self.engine.version) for g in verified]
        batch.sampled += groups
        return groups

    def _sample(self, prompts: Sequence[Prompt], step: int, batch: Batch) -> list[RolloutTree]:
        """Call the engine with a new seed."""
        batch.rounds += 1
        draw = (batch.attempt << _ROUND_BITS) + batch.rounds
        with self.clock("generation"):
            seed = derived_seed(self.config.seed, step, draw)
            number = self.config.rollouts_per_prompt
            return self.engine.sample([p.token_ids for p in prompts], number, self._sampling, seed)
