"""From groups and advantages to the mini-batches of a step, before its first update.

All counts, masks and denominators are decided here; the passes of the model only look up numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group
from brorl.algorithms.importance import Mismatch, check_sampler_logprobs, importance_factors
from brorl.algorithms.policy_loss import loss_denominator, node_weights, response_weights
from brorl.algorithms.response_subset import choose_responses
from brorl.model.device import in_float64, to_device
from brorl.training.learner import LearnerSettings
from brorl.training.ranks import Ranks
from brorl.training.reference import ReferencePolicy
from brorl.training.tree_scores import TreeScores
from brorl.tree import FloatArray, IntArray, RolloutTree

_Compute = Callable[[Sequence[RolloutTree]], list[FloatArray]]


class Scores(NamedTuple):
    """Log-probs (nats) of a tree at the weights before the step: old and reference policy, each of shape [M]."""

    old_logprob_M: FloatArray
    reference_logprob_M: FloatArray


@dataclass(frozen=True, eq=False)
class TrainedResponses:
    """The responses of one group that are back-propagated (L of them, with M nodes)."""

    tree: RolloutTree  # their tree
    advantage_L: FloatArray  # advantages, shape [L]
    factor_L: FloatArray  # one over the probability that the response was chosen, shape [L]
    is_fresh: bool  # whether this step sampled them: no earlier step computed log-probs of the old policy
    old_logprob_M: FloatArray | None  # log-probs of the old policy, shape [M]; None if they are not known yet
    reference_logprob_M: FloatArray | None  # log-probs of the reference, shape [M]; None if they are not known yet

    def part(self, start: int, stop: int) -> TrainedResponses:
        """Return the responses [start, stop) of `tree`."""
        return self if (start, stop) == (0, self.tree.num_responses) else self.select(np.arange(start, stop))

    def select(self, leaf_K: IntArray) -> TrainedResponses:
        """Return some responses of `tree`, K of them in ascending order."""
        tree, node_M = self.tree.select(leaf_K)
        return replace(
            self,
            tree=tree,
            advantage_L=self.advantage_L[leaf_K],
            factor_L=self.factor_L[leaf_K],
            old_logprob_M=_selected(self.old_logprob_M, node_M),
            reference_logprob_M=_selected(self.reference_logprob_M, node_M),
        )


def _selected(value_M: FloatArray | None, node_K: IntArray) -> FloatArray | None:
    return None if value_M is None else value_M[node_K]


def to_tensor(model: PreTrainedModel, arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate arrays on a model's device, in float64 for a model in float64 and in float32 for others."""
    dtype = np.float64 if model.dtype == torch.float64 else np.float32
    return to_device(np.concatenate([np.empty(0), *arrays]).astype(dtype), model.device)


def choose_trained(
    group: Group,
    advantage_L: FloatArray,
    max_responses_per_outcome: int,
    mask_truncated: bool,
    generator: np.random.Generator,
    scores: Scores | None = None,
) -> TrainedResponses | None:
    """Choose the responses of a group that are back-propagated; None if there is nothing to choose.

    With `max_responses_per_outcome`, responses without an advantage are never chosen: neither a KL penalty in the loss
    nor an entropy bonus sees them.

    Args:
        group: The group.
        advantage_L: Its advantages, shape [L].
        max_responses_per_outcome: At most this many correct and this many incorrect distinct responses; 0 for all.
        mask_truncated: Never choose a truncated response.
        generator: Decides the choice.
        scores: The log-probs of the group's tree; None if they are not known yet.
    """
    tree, factor_L, is_fresh = group.tree, np.ones(group.tree.num_responses), group.old_logprob_M is None
    old_M, reference_M = scores or (group.old_logprob_M, None)
    every = TrainedResponses(tree, advantage_L, factor_L, is_fresh, old_M, reference_M)
    allowed_L = tree.finished if mask_truncated else np.ones(tree.num_responses, np.bool_)
    if max_responses_per_outcome:
        total_L = tree.leaf_count * advantage_L * allowed_L
        chosen, factor_K = choose_responses(total_L, group.correct_L, max_responses_per_outcome, generator)
        return replace(every.select(chosen), factor_L=factor_K) if chosen.size else None
    if allowed_L.all():
        return every
    chosen = np.flatnonzero(allowed_L)
    return every.select(chosen) if chosen.size else None


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Trees with the numbers of their nodes, concatenated over the trees (K nodes in all)."""

    trees: list[RolloutTree]  # the trees that go through the model
    old_logprobs: list[FloatArray]  # for each tree the log-probs (nats) of the old policy, shape [M]
    # for each tree the advantage of each response with all of its factors, shape [L], counts excepted
    advantages: list[FloatArray]
    old_logprob_K: Tensor  # `old_logprobs`, shape [K]
    positive_K: Tensor  # summed positive advantages, shape [K]
    negative_K: Tensor  # summed negative advantages, shape [K]
    count_K: Tensor  # rollouts through each node, shape [K]
    reference_logprob_K: Tensor | None  # log-probs of the reference, shape [K]; None without one
    sampled_K: Tensor  # rollouts through each node, with the factors of the choice of responses, shape [K]
    token_weight_K: Tensor  # the same with the weights of the aggregation, for terms without an advantage, shape [K]
    # of the loss, for all rollouts of the groups; it gives each group of a step the same weight, also where the mini-
    # batches of the step differ in size
    denominator: float
    kept_tokens: float  # sampled tokens whose weight no mask sets to 0

    def totals(self) -> Tensor:
        """Return the summed |weight|, `sampled_K` and `count_K`, which the metrics are divided by, shape [3]."""
        weight = (self.positive_K - self.negative_K).sum()
        return in_float64(torch.stack([weight, self.sampled_K.sum(), self.count_K.sum()]))


def assemble(
    whole: Sequence[RolloutTree],
    trained: Sequence[TrainedResponses],
    old_logprobs: Sequence[FloatArray],
    reference_logprobs: Sequence[FloatArray] | None,
    settings: LearnerSettings,
    fraction: float,
    tensor: Callable[[Sequence[NDArray[Any]]], Tensor],
) -> MiniBatch:
    """Return a mini-batch: sum advantages and counts into weights of nodes.

    Args:
        whole: The trees of all of its groups; they decide the denominator.
        trained: Their responses that are back-propagated.
        old_logprobs: For each tree the log-probs of the old policy, shape [M].
        reference_logprobs: For each tree those of the reference.
        settings: The loss, and the correction of the weights for the policy that sampled.
        fraction: Number of its groups over the mean number of a mini-batch of the step.
        tensor: Concatenates arrays on the device of the model.
    """
    loss = settings.loss
    advantages, positive, negative, sampled, token_weight, kept_tokens = [], [], [], [], [], 0.0
    for responses, old_logprob_M in zip(trained, old_logprobs, strict=True):
        tree = responses.tree
        factors = importance_factors(tree, old_logprob_M, settings.importance)
        aggregation_L = response_weights(tree, loss.aggregation)
        advantage_L = responses.advantage_L * responses.factor_L * aggregation_L * factors.response_L
        weights = node_weights(tree, advantage_L)
        positive.append(weights.positive_M * factors.node_M)
        negative.append(weights.negative_M * factors.node_M)
        sampled.append(tree.sum_below(tree.leaf_count * responses.factor_L))
        token_weight.append(tree.sum_below(tree.leaf_count * responses.factor_L * aggregation_L))
        kept_tokens += float(tree.sum_below(tree.leaf_count * factors.response_L)[factors.node_M > 0].sum())
        # A loss of a whole response that every token carries has the mean of its tokens' factors as its own.
        advantages.append(advantage_L * (tree.sum_along_paths(factors.node_M)[tree.leaf] / tree.length))
    return MiniBatch(
        trees=[x.tree for x in trained],
        old_logprobs=list(old_logprobs),
        advantages=advantages,
        old_logprob_K=tensor(old_logprobs),
        positive_K=tensor(positive),
        negative_K=tensor(negative),
        count_K=tensor([x.tree.count for x in trained]),
        reference_logprob_K=None if reference_logprobs is None else tensor(reference_logprobs),
        sampled_K=tensor(sampled),
        token_weight_K=tensor(token_weight),
        denominator=loss_denominator(whole, loss.aggregation, settings.max_new_tokens, loss.mask_truncated) / fraction,
        kept_tokens=kept_tokens,
    )


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a step."""

    batches: list[MiniBatch]  # the part of this rank of each mini-batch
    trained: list[TrainedResponses]  # the trained responses of all ranks
    mismatch: Mismatch | None  # the distance between old policy and sampler; None if they are the same or unknown
    masked_fraction: float  # the fraction of tokens that a mask set to 0


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
            generator: Chooses the groups of each mini-batch, and the trained responses if not all are.
        """
        settings, loss = self._settings, self._settings.loss
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
        if settings.importance.correction != "none":
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
        kept = sum(self._ranks.gather(sum(batch.kept_tokens for batch in batches)))
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
        sums = Mismatch.of([tree for tree, _ in pairs], [old for _, old in pairs])
        return Mismatch.total(self._ranks.gather(sums))
