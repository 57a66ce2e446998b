"""The inputs of a step: everything that its updates need from the weights before the first update.

In: the groups of a step and their advantages. Out: the mini-batches of this rank, with old and reference log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from brorl.algorithms.groups import Group
from brorl.algorithms.importance import Mismatch, MismatchSums, check_sampler_logprobs, kept_tokens
from brorl.training.learner import FloatArray, LearnerSettings
from brorl.training.mini_batch import MiniBatch, Scores, TrainedResponses, assemble, choose_trained
from brorl.training.ranks import Ranks
from brorl.training.reference import ReferencePolicy
from brorl.training.tree_scores import TreeScores
from brorl.tree import RolloutTree

_Compute = Callable[[Sequence[RolloutTree]], list[FloatArray]]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a step.

    Attributes:
        batches: The part of this rank of each mini-batch.
        trained: The trained responses of all ranks.
        mismatch: The distance between old policy and sampler; None if they are the same or unknown.
        masked_fraction: The fraction of tokens that a mask set to 0.
    """

    batches: list[MiniBatch]
    trained: list[TrainedResponses]
    mismatch: Mismatch | None
    masked_fraction: float


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

    def with_old_logprobs(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups with old log-probs; see `TreeLearner`."""
        if not self._settings.recompute_old_logprobs:
            return list(groups)
        old = self._old_logprobs([g.tree for g in groups], [g.old_logprob_M for g in groups], self._scores.gathered)
        return [replace(g, old_logprob_M=old_M) for g, old_M in zip(groups, old, strict=True)]

    def scores(self, groups: Sequence[Group]) -> list[Scores]:
        """Return the log-probs of all groups on every rank; needs a reference."""
        trees = [g.tree for g in groups]
        old = self._old_logprobs(trees, [g.old_logprob_M for g in groups], self._scores.gathered)
        [reference] = self._reference_logprobs([trees], self._scores.gathered)
        return [Scores(*pair) for pair in zip(old, reference, strict=True)]

    def prepare(
        self,
        groups: Sequence[Group],
        advantages: Sequence[FloatArray],
        scores: Sequence[Scores] | None,
        generator: np.random.Generator,
    ) -> StepInputs:
        """Split the groups into mini-batches, and compute everything that is needed before the first update.

        Args:
            groups: The batch.
            advantages: For each group the advantage of each distinct response, shape [L].
            scores: The log-probs of each group, if they are known.
            generator: Chooses the groups of each mini-batch, and the trained responses if not all are trained.
        """
        settings, loss, importance = self._settings, self._settings.loss, self._settings.importance
        parts = np.array_split(generator.permutation(len(groups)), settings.mini_batches)
        size, finished_only = settings.max_responses_per_outcome, loss.mask_truncated
        chosen = [
            [
                choose_trained(groups[i], advantages[i], size, finished_only, generator, scores[i] if scores else None)
                for i in part
            ]
            for part in parts
        ]
        trained = [[x for x in part if x] for part in chosen]
        every = list(chain(*trained))
        if importance.correction != "none":
            check_sampler_logprobs([x.tree for x in every])
        local = [
            [part[p.tree].part(p.start, p.stop) for p in self._scores.local_pieces([x.tree for x in part])]
            for part in trained
        ]
        compute = self._scores.local
        reference: list[list[FloatArray]] | list[None] = [None] * len(local)
        if scores is not None:
            old = [[x.old_logprob_M for x in part if x.old_logprob_M is not None] for part in local]
            reference = [[x.reference_logprob_M for x in part if x.reference_logprob_M is not None] for part in local]
        else:
            old = [
                self._old_logprobs([x.tree for x in part], [x.old_logprob_M for x in part], compute) for part in local
            ]
            if self._reference is not None:
                reference = self._reference_logprobs([[x.tree for x in part] for part in local], compute)
        batches = []
        for part, responses, old_logprobs, reference_logprobs in zip(parts, local, old, reference, strict=True):
            trees, fraction = [groups[i].tree for i in part], len(part) * len(parts) / len(groups)
            logprobs = old_logprobs, reference_logprobs
            batches.append(assemble(trees, responses, *logprobs, settings, fraction, self._tensor))
        all_local, all_old = list(chain(*local)), list(chain(*old))
        num_tokens = sum(x.tree.num_sampled_tokens for x in every)
        kept = sum(self._ranks.gather(kept_tokens([x.tree for x in all_local], all_old, importance)))
        masked = 1.0 - kept / num_tokens if num_tokens else 0.0
        return StepInputs(batches, every, self._mismatch(every, all_local, all_old), masked)

    def _old_logprobs(
        self, trees: Sequence[RolloutTree], known: Sequence[FloatArray | None], compute: _Compute
    ) -> list[FloatArray]:
        """Return the old log-probs: the engine's, the known ones, or those of the current weights."""
        if not self._settings.recompute_old_logprobs:
            return [t.logprob for t in trees]
        fresh = iter(compute([t for t, known_M in zip(trees, known, strict=True) if known_M is None]))
        return [next(fresh) if known_M is None else known_M for known_M in known]

    def _reference_logprobs(self, batches: list[list[RolloutTree]], compute: _Compute) -> list[list[FloatArray]]:
        """Return the reference's log-probs of lists of trees."""
        assert self._reference is not None  # callers check it
        return self._scores.under(self._reference, lambda: [compute(trees) for trees in batches])

    def _mismatch(
        self, every: Sequence[TrainedResponses], local: Sequence[TrainedResponses], old_logprobs: Sequence[FloatArray]
    ) -> Mismatch | None:
        """Compare the old policy with the sampler on fresh rollouts, where both are known."""
        fresh = [x.tree for x in every if x.is_fresh]
        if not self._settings.recompute_old_logprobs or not fresh or any(np.isnan(t.logprob).any() for t in fresh):
            return None
        pairs = [(x.tree, old) for x, old in zip(local, old_logprobs, strict=True) if x.is_fresh]
        sums = MismatchSums.of([tree for tree, _ in pairs], [old for _, old in pairs])
        return MismatchSums.total(self._ranks.gather(sums)).mean()
