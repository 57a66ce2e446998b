"""The inputs of a step: everything that its updates need from the weights before the first update.

In: the groups of a step and their advantages. Out: the mini-batches of this rank, with old and reference log-probs.
Log-probs that the KL penalty on the rewards needed are reused in the step that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from brorl.algorithms.groups import Group
from brorl.algorithms.importance import Mismatch, MismatchSums, check_sampler_logprobs, kept_tokens
from brorl.algorithms.kl import penalized_group
from brorl.algorithms.settings import KLPenalty
from brorl.training.learner import FloatArray, LearnerSettings
from brorl.training.mini_batch import MiniBatch, TrainedResponses, assemble, choose_trained
from brorl.training.ranks import Ranks
from brorl.training.reference import ReferencePolicy
from brorl.training.tree_scores import TreeScores
from brorl.tree import RolloutTree

_Logprobs = list[list[FloatArray]]  # of each tree of each mini-batch
_Compute = Callable[[Sequence[RolloutTree]], list[FloatArray]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a step.

    Attributes:
        batches: This rank's fraction of each mini-batch.
        trained: The trained responses of all ranks.
        mismatch: The distance between old policy and sampler; None if they are the same or unknown.
        masked_fraction: The fraction of tokens that a mask set to 0.
    """

    batches: list[MiniBatch]
    trained: list[TrainedResponses]
    mismatch: Mismatch | None
    masked_fraction: float


class _Scored(NamedTuple):
    """A tree and the log-probs of its nodes before the step, shape [M]; holding the tree keeps its id unique."""

    tree: RolloutTree
    old_logprob_M: FloatArray
    reference_logprob_M: FloatArray


class StepPreparation:
    """Computes the inputs of steps.

    Args:
        scores: Computes log-probs under the current weights.
        settings: How the model is updated.
        reference: The reference policy, if there is one.
        ranks: The processes that share the model.
        tensor: Concatenates arrays into one tensor on the device of the model.
    """

    def __init__(
        self,
        scores: TreeScores,
        settings: LearnerSettings,
        reference: ReferencePolicy | None,
        ranks: Ranks,
        tensor: Callable[[Sequence[NDArray[Any]]], Tensor],
    ) -> None:
        self._scores, self._settings, self._ranks, self._tensor = scores, settings, ranks, tensor
        self._reference = reference
        self._scored: dict[int, _Scored] = {}

    def forget(self) -> None:
        """Forget all log-probs: the weights have changed."""
        self._scored.clear()

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with old log-probs; see `TreeLearner`."""
        if not self._settings.recompute_old_logprobs:
            return list(groups)
        old = self._old_logprobs([g.tree for g in groups], [g.old_logprob_M for g in groups], self._scores.of_all)
        return [replace(g, old_logprob_M=old_M) for g, old_M in zip(groups, old, strict=True)]

    def apply_kl_penalty(self, groups: Sequence[Group]) -> list[Group]:
        """Subtract the KL penalty from the rewards, if the penalty is placed there; see `TreeLearner`."""
        penalty = self._settings.kl
        if penalty is None:
            return list(groups)
        match penalty.placement:
            case "loss":
                return list(groups)
            case "reward":
                return self._penalized(groups, penalty)
            case _:
                assert_never(penalty.placement)

    def _penalized(self, groups: Sequence[Group], penalty: KLPenalty) -> list[Group]:
        trees = [g.tree for g in groups]
        old = self._old_logprobs(trees, [g.old_logprob_M for g in groups], self._scores.of_all)
        [reference] = self._reference_logprobs([trees], self._scores.of_all)
        self._scored = {id(t): _Scored(t, o, r) for t, o, r in zip(trees, old, reference, strict=True)}
        return [penalized_group(g, o, r, penalty) for g, o, r in zip(groups, old, reference, strict=True)]

    def prepare(
        self, groups: Sequence[Group], advantages: Sequence[FloatArray], generator: np.random.Generator
    ) -> StepInputs:
        """Split the groups into mini-batches, and compute everything that is needed before the first update.

        Args:
            groups: The batch.
            advantages: For each group the advantage of each distinct response, shape [L].
            generator: Chooses the groups of each mini-batch, and the trained responses if not all are trained.
        """
        settings = self._settings
        parts = np.array_split(generator.permutation(len(groups)), settings.mini_batches)
        size = settings.max_responses_per_outcome
        finished_only = settings.loss.mask_truncated
        chosen = [
            [choose_trained(groups[i], advantages[i], size, finished_only, generator) for i in part] for part in parts
        ]
        trained = [[x for x in part if x] for part in chosen]
        every = list(chain(*trained))
        if settings.importance.correction != "none":
            check_sampler_logprobs([x.tree for x in every])
        own = [
            [part[p.tree].part(p.start, p.stop) for p in self._scores.share([x.tree for x in part])] for part in trained
        ]
        old, reference = self._before_update(own, every)
        batches = []
        for part, mine, its_old, its_reference in zip(parts, own, old, reference, strict=True):
            trees = [groups[i].tree for i in part]
            fraction = len(part) * len(parts) / len(groups)
            batches.append(assemble(trees, mine, its_old, its_reference, settings, fraction, self._tensor))
        every_own, every_old = list(chain(*own)), list(chain(*old))
        num_tokens = sum(x.tree.num_sampled_tokens for x in every)
        kept = sum(self._ranks.gather(kept_tokens([x.tree for x in every_own], every_old, settings.importance)))
        masked = 1.0 - kept / num_tokens if num_tokens else 0.0
        return StepInputs(batches, every, self._mismatch(every, every_own, every_old), masked)

    def _before_update(
        self, trained: list[list[TrainedResponses]], every: Sequence[TrainedResponses]
    ) -> tuple[_Logprobs, _Logprobs | list[None]]:
        """Return old and reference log-probs of the trained responses, at the weights before the first update.

        Args:
            trained: This rank's fraction of each mini-batch.
            every: The trained responses of all ranks; ranks must agree whether their log-probs are known.
        """
        known = self._scored
        if known and all(id(x.whole) in known for x in every):
            old = [[x.of_whole(known[id(x.whole)].old_logprob_M) for x in part] for part in trained]
            return old, [[x.of_whole(known[id(x.whole)].reference_logprob_M) for x in part] for part in trained]
        batches = [[x.tree for x in part] for part in trained]
        compute = self._scores.of_own
        old = [self._old_logprobs([x.tree for x in part], [x.old_logprob_M for x in part], compute) for part in trained]
        return old, self._reference_logprobs(batches, compute) if self._reference is not None else [None] * len(batches)

    def _old_logprobs(
        self, trees: Sequence[RolloutTree], known: Sequence[FloatArray | None], compute: _Compute
    ) -> list[FloatArray]:
        """Return the old log-probs: the engine's, the known ones, or those of the current weights."""
        if not self._settings.recompute_old_logprobs:
            return [t.logprob for t in trees]
        fresh = iter(compute([t for t, known_M in zip(trees, known, strict=True) if known_M is None]))
        return [next(fresh) if known_M is None else known_M for known_M in known]

    def _reference_logprobs(self, batches: list[list[RolloutTree]], compute: _Compute) -> _Logprobs:
        """Return the reference's log-probs of lists of trees."""
        assert self._reference is not None  # callers check it
        return self._scores.under(self._reference, lambda: [compute(trees) for trees in batches])

    def _mismatch(
        self, every: Sequence[TrainedResponses], own: Sequence[TrainedResponses], old_logprobs: Sequence[FloatArray]
    ) -> Mismatch | None:
        """Compare the old policy with the sampler on fresh rollouts, where both are known."""
        fresh = [x.tree for x in every if x.old_logprob_M is None]
        if not self._settings.recompute_old_logprobs or not fresh or any(np.isnan(t.logprob).any() for t in fresh):
            return None
        pairs = [(x.tree, old) for x, old in zip(own, old_logprobs, strict=True) if x.old_logprob_M is None]
        sums = MismatchSums.of([tree for tree, _ in pairs], [old for _, old in pairs])
        return MismatchSums.total(self._ranks.gather(sums)).mean()
