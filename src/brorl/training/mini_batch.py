"""A mini-batch: the numbers per node that the loss of some groups needs.

In: groups, advantages, and log-probs that were computed before the step's first update. Out: weights per node,
concatenated over the trees, and the denominator. All counts and masks are decided here; the passes of the
model only look up numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.aggregation import loss_denominator, response_weights
from brorl.algorithms.groups import Group
from brorl.algorithms.importance import importance_factors
from brorl.algorithms.policy_loss import node_weights
from brorl.algorithms.response_subset import choose_responses
from brorl.model.device import to_device
from brorl.training.learner import LearnerSettings
from brorl.tree import IntArray, RolloutTree

FloatArray = NDArray[np.float64]


class Scores(NamedTuple):
    """Log-probs (nats) of a tree at the weights before the step: old and reference policy, each of shape [M]."""

    old_logprob_M: FloatArray
    reference_logprob_M: FloatArray


@dataclass(frozen=True, eq=False)
class TrainedResponses:
    """The responses of one group that are back-propagated (L of them, with M nodes).

    Attributes:
        tree: Their tree.
        advantage_L: Advantages, shape [L].
        factor_L: One over the probability that the response was chosen, shape [L].
        is_fresh: Whether this step sampled them: no earlier step computed log-probs of the old policy.
        old_logprob_M: Log-probs of the old policy, shape [M]; None if they are not known yet.
        reference_logprob_M: Log-probs of the reference, shape [M]; None if they are not known yet.
    """

    tree: RolloutTree
    advantage_L: FloatArray
    factor_L: FloatArray
    is_fresh: bool
    old_logprob_M: FloatArray | None
    reference_logprob_M: FloatArray | None

    def part(self, start: int, stop: int) -> TrainedResponses:
        """Return the responses [start, stop) of `tree`."""
        if (start, stop) == (0, self.tree.num_responses):
            return self
        tree, node_M = self.tree.select(np.arange(start, stop))
        return replace(
            self,
            tree=tree,
            advantage_L=self.advantage_L[start:stop],
            factor_L=self.factor_L[start:stop],
            old_logprob_M=_selected(self.old_logprob_M, node_M),
            reference_logprob_M=_selected(self.reference_logprob_M, node_M),
        )


def _selected(value_M: FloatArray | None, node_K: IntArray) -> FloatArray | None:
    return None if value_M is None else value_M[node_K]


def to_tensor(model: PreTrainedModel, arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Return arrays as one tensor on a model's device, in float64 for a model in float64 and in float32 for others.

    Args:
        model: The model.
        arrays: Arrays to concatenate; there can be none.
    """
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
    """Choose the responses of a group that are back-propagated.

    Args:
        group: The group.
        advantage_L: Its advantages, shape [L].
        max_responses_per_outcome: At most this many correct and this many incorrect distinct responses; 0 for all.
        mask_truncated: Never choose a truncated response.
        generator: Decides the choice.
        scores: The log-probs of the group's tree; None if they are not known yet.

    Returns:
        The responses; None if there is nothing to choose. With `max_responses_per_outcome`, responses without an
        advantage are never chosen: neither a KL penalty in the loss nor an entropy bonus sees them.
    """
    tree, is_fresh = group.tree, group.old_logprob_M is None
    old_M, reference_M = scores or (group.old_logprob_M, None)
    allowed_L = tree.finished if mask_truncated else np.ones(tree.num_responses, np.bool_)
    if not max_responses_per_outcome and allowed_L.all():
        return TrainedResponses(tree, advantage_L, np.ones(tree.num_responses), is_fresh, old_M, reference_M)
    if max_responses_per_outcome:
        total_L = tree.leaf_count * advantage_L * allowed_L
        chosen, factor_K = choose_responses(total_L, group.correct_L, max_responses_per_outcome, generator)
    else:
        chosen = np.flatnonzero(allowed_L)
        factor_K = np.ones(chosen.size)
    if not chosen.size:
        return None
    part, node_M = tree.select(chosen)
    logprobs = _selected(old_M, node_M), _selected(reference_M, node_M)
    return TrainedResponses(part, advantage_L[chosen], factor_K, is_fresh, *logprobs)


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Trees with the numbers of their nodes, concatenated over the trees (K nodes in all).

    Attributes:
        trees: The trees that go through the model.
        old_logprobs: For each tree the log-probs (nats) of the old policy, shape [M].
        advantages: For each tree the advantage of each response with all of its factors, shape [L], counts excepted.
        old_logprob_K: `old_logprobs`, shape [K].
        positive_K: Summed positive advantages, shape [K].
        negative_K: Summed negative advantages, shape [K].
        count_K: Rollouts through each node, shape [K].
        reference_logprob_K: Log-probs of the reference, shape [K]; None without one.
        sampled_K: Rollouts through each node, with the factors of the choice of responses, shape [K].
        token_weight_K: The same with the weights of the aggregation, for terms without an advantage, shape [K].
        denominator: Of the loss, for all rollouts of the groups; it gives each group of a step the same weight, also
            where the mini-batches of the step differ in size.
    """

    trees: list[RolloutTree]
    old_logprobs: list[FloatArray]
    advantages: list[FloatArray]
    old_logprob_K: Tensor
    positive_K: Tensor
    negative_K: Tensor
    count_K: Tensor
    reference_logprob_K: Tensor | None
    sampled_K: Tensor
    token_weight_K: Tensor
    denominator: float

    def totals(self) -> Tensor:
        """Return the summed |weight|, `sampled_K` and `count_K`, which the metrics are divided by, shape [3]."""
        return torch.stack([(self.positive_K - self.negative_K).sum(), self.sampled_K.sum(), self.count_K.sum()])


def assemble(
    whole: Sequence[RolloutTree],
    trained: Sequence[TrainedResponses],
    old_logprobs: Sequence[FloatArray],
    reference_logprobs: Sequence[FloatArray] | None,
    settings: LearnerSettings,
    fraction: float,
    tensor: Callable[[Sequence[NDArray[Any]]], Tensor],
) -> MiniBatch:
    """Sum advantages and counts into weights of nodes.

    Args:
        whole: The trees of all groups of the mini-batch; they decide the denominator.
        trained: Their responses that are back-propagated.
        old_logprobs: For each tree the log-probs of the old policy, shape [M].
        reference_logprobs: For each tree those of the reference.
        settings: The loss, and the correction of the weights for the policy that sampled.
        fraction: Number of its groups over the mean number of a mini-batch of the step.
        tensor: Concatenates arrays on the device of the model.

    Returns:
        The mini-batch.
    """
    loss = settings.loss
    advantages, positive, negative, sampled, token_weight = [], [], [], [], []
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
    )
