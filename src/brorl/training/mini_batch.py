"""From groups and advantages to the log-probs of their trees and the mini-batches of a step, before its first update.

All counts, masks and denominators are decided here; the passes of the model only look up numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from brorl.algorithms.groups import Group, known
from brorl.algorithms.importance import Mismatch, check_sampler_logprobs, importance_factors
from brorl.algorithms.kl import penalized_group
from brorl.algorithms.policy_loss import loss_denominator, node_weights, response_weights
from brorl.algorithms.response_subset import choose_responses
from brorl.algorithms.settings import KLPenalty
from brorl.arrays import FloatArray
from brorl.model.chunk_size import ChunkSize, Passes
from brorl.model.device import in_float64, to_device
from brorl.model.logprobs import by_tree
from brorl.model.tree_batch import TreeSlice
from brorl.training.learner import LearnerSettings
from brorl.training.learner_state import ReferencePolicy
from brorl.training.ranks import Ranks
from brorl.tree import RolloutTree

T = TypeVar("T")


class TreeScores:
    """Computes log-probs under the current weights, again with smaller chunks if memory runs out.

    Args:
        model: The model.
        settings: The sampling distribution, and how trees go through the model.
        nodes: Size of the chunks.
        passes: The passes of this process.
        ranks: The processes that share the model.

    Attributes:
        forward: How trees go through the model.
    """

    def __init__(
        self, model: PreTrainedModel, settings: LearnerSettings, nodes: ChunkSize, passes: Passes, ranks: Ranks
    ) -> None:
        self._model, self._settings = model, settings
        self._nodes, self._passes, self._ranks = nodes, passes, ranks
        self.forward = settings.forward

    def gathered(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-prob (nats) of every node of each tree, shape [M], on every rank."""
        if self._ranks.size == 1:
            return self.local(trees)
        parts = [(p.tree, *trees[p.tree].select(np.arange(p.start, p.stop))) for p in self.local_pieces(trees)]
        own = self.local([tree for _, tree, _ in parts])
        mine = [(number, node_M, lp) for (number, _, node_M), lp in zip(parts, own, strict=True)]
        found = [np.empty(tree.num_unique_tokens) for tree in trees]
        for number, node_M, logprob_M in chain(*reversed(self._ranks.gather(mine))):  # the lowest rank's are kept
            found[number][node_M] = logprob_M
        return found

    @torch.no_grad()
    def local(self, trees: Sequence[RolloutTree]) -> list[FloatArray]:
        """Return the log-probs of the nodes of this rank's trees; every rank calls it."""

        def work() -> list[FloatArray]:
            next_token, nodes = self._settings.next_token, self._nodes.value
            with self.autocast():
                chunks = self.forward.chunk_logprobs(self._model, trees, next_token=next_token, max_nodes=nodes)
                found = [in_float64(lp).cpu().numpy() for lp in by_tree(list(chunks), trees)]
            self._passes.finish()
            return found

        was_training = self._model.training
        self._model.eval()
        try:
            return self._nodes.run(work)
        finally:
            self._model.train(was_training)

    def under(self, reference: ReferencePolicy, compute: Callable[[], T]) -> T:
        """Call a function while the weights are a reference's, again if memory runs out; return its result."""

        def work() -> T:
            self._model.zero_grad(set_to_none=True)  # the last update's gradients make room
            with reference.in_place():
                return compute()

        return self._nodes.run(work)

    def local_pieces(self, trees: Sequence[RolloutTree]) -> list[TreeSlice]:
        """Return the responses that this rank works on."""
        if self._ranks.size == 1:
            return [TreeSlice(number, 0, tree.num_responses) for number, tree in enumerate(trees)]
        # A layer has about 12 hidden^2 weights, and attends to a token with 2 hidden multiplications.
        per_position = 1 / (6 * self._model.config.get_text_config().hidden_size)
        costs = [self.forward.response_costs(tree, per_position) for tree in trees]
        return deal(costs, self._ranks.size)[self._ranks.rank]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a block in which passes compute in bfloat16, if the settings demand it."""
        return torch.autocast(self._model.device.type, torch.bfloat16) if self._settings.autocast else nullcontext()


def deal(costs: Sequence[FloatArray], num_ranks: int) -> list[list[TreeSlice]]:
    """Cut the responses of all trees, in order, into one run per rank, of nearly equal cost.

    At most R - 1 trees are split. A loss is a sum over responses, hence the parts of a tree have the gradient of the
    tree. A rank computes the prompt, and the ancestors of the first response of its part, again.

    Args:
        costs: For each tree the cost of each distinct response, above 0, shape [L].
        num_ranks: Number of ranks, R.

    Returns:
        For each rank its pieces. The cost of a rank differs from the mean by less than the most expensive response.
        A rank has no piece where there are fewer responses than ranks.
    """
    if not costs:
        return [[] for _ in range(num_ranks)]
    cost = np.concatenate(costs)
    middle = np.cumsum(cost) - cost / 2
    rank = np.minimum((middle * num_ranks / cost.sum()).astype(np.int64), num_ranks - 1)
    ends = np.cumsum([tree_L.size for tree_L in costs])
    pieces_R: list[list[TreeSlice]] = [[] for _ in range(num_ranks)]
    for number, (tree_L, end) in enumerate(zip(costs, ends.tolist(), strict=True)):
        rank_L = rank[end - tree_L.size : end]
        starts = np.flatnonzero(np.diff(rank_L, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), tree_L.size], strict=True):
            pieces_R[rank_L[start]].append(TreeSlice(number, start, stop))
    return pieces_R


_Compute = Callable[[Sequence[RolloutTree]], list[FloatArray]]


def to_tensor(model: PreTrainedModel, arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Concatenate arrays on a model's device, in float64 for a model in float64 and in float32 for others."""
    dtype = np.float64 if model.dtype == torch.float64 else np.float32
    return to_device(np.concatenate([np.empty(0), *arrays]).astype(dtype), model.device)


def choose_trained(
    group: Group, max_responses_per_outcome: int, mask_truncated: bool, generator: np.random.Generator
) -> Group | None:
    """Choose the responses of a group that are back-propagated; None if there is nothing to choose.

    With `max_responses_per_outcome`, responses without an advantage are never chosen: neither a KL penalty in the loss
    nor an entropy bonus sees them.

    Args:
        group: The group, with its advantages.
        max_responses_per_outcome: At most this many correct and this many incorrect distinct responses; 0 for all.
        mask_truncated: Never choose a truncated response.
        generator: Decides the choice.
    """
    tree = group.tree
    allowed_L = tree.finished if mask_truncated else np.ones(tree.num_responses, np.bool_)
    if max_responses_per_outcome:
        total_L = tree.leaf_count * known(group.advantage_L) * allowed_L
        chosen, factor_K = choose_responses(total_L, group.correct_L, max_responses_per_outcome, generator)
        return replace(group.select(chosen), factor_L=factor_K) if chosen.size else None
    if allowed_L.all():
        return group
    chosen = np.flatnonzero(allowed_L)
    return group.select(chosen) if chosen.size else None


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Trees with the numbers of their nodes, concatenated over the trees (K nodes in all)."""

    # The responses that go through the model. Advantages have all of their factors, counts excepted.
    groups: list[Group]
    old_logprob_K: Tensor  # log-probs (nats) of the old policy, shape [K]
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

    @property
    def trees(self) -> list[RolloutTree]:
        """The trees that go through the model."""
        return [group.tree for group in self.groups]

    def totals(self) -> Tensor:
        """Return the summed |weight|, `sampled_K` and `count_K`, which the metrics are divided by, shape [3]."""
        weight = (self.positive_K - self.negative_K).sum()
        return in_float64(torch.stack([weight, self.sampled_K.sum(), self.count_K.sum()]))


def assemble(
    whole: Sequence[RolloutTree],
    trained: Sequence[Group],
    settings: LearnerSettings,
    fraction: float,
    tensor: Callable[[Sequence[NDArray[Any]]], Tensor],
) -> MiniBatch:
    """Return a mini-batch: sum advantages and counts into weights of nodes.

    Args:
        whole: The trees of all of its groups; they decide the denominator.
        trained: Their responses that are back-propagated, with advantages and log-probs.
        settings: The loss, and the correction of the weights for the policy that sampled.
        fraction: Number of its groups over the mean number of a mini-batch of the step.
        tensor: Concatenates arrays on the device of the model.
    """
    loss = settings.loss
    groups, positive, negative, sampled, token_weight, kept_tokens = [], [], [], [], [], 0.0
    for group in trained:
        tree = group.tree
        factor_L = np.ones(tree.num_responses) if group.factor_L is None else group.factor_L
        factor_M, kept_L = importance_factors(tree, known(group.old_logprob_M), settings.importance)
        aggregation_L = response_weights(tree, loss.aggregation)
        advantage_L = known(group.advantage_L) * factor_L * aggregation_L * kept_L
        positive_M, negative_M = node_weights(tree, advantage_L)
        positive.append(positive_M * factor_M)
        negative.append(negative_M * factor_M)
        sampled.append(tree.sum_below(tree.leaf_count * factor_L))
        token_weight.append(tree.sum_below(tree.leaf_count * factor_L * aggregation_L))
        kept_tokens += float(tree.sum_below(tree.leaf_count * kept_L)[factor_M > 0].sum())
        # A loss of a whole response that every token carries has the mean of its tokens' factors as its own.
        of_response_L = tree.sum_along_paths(factor_M)[tree.leaf] / tree.length
        groups.append(replace(group, advantage_L=advantage_L * of_response_L))
    has_reference = settings.kl is not None
    return MiniBatch(
        groups=groups,
        old_logprob_K=tensor([known(group.old_logprob_M) for group in groups]),
        positive_K=tensor(positive),
        negative_K=tensor(negative),
        count_K=tensor([group.tree.count for group in groups]),
        reference_logprob_K=tensor([known(g.reference_logprob_M) for g in groups]) if has_reference else None,
        sampled_K=tensor(sampled),
        token_weight_K=tensor(token_weight),
        denominator=loss_denominator(whole, loss.aggregation, settings.max_new_tokens, loss.mask_truncated) / fraction,
        kept_tokens=kept_tokens,
    )


class StepPreparation:
    """Computes the mini-batches of steps.

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
        return self._with_old(groups, self._scores.gathered) if self._settings.recompute_old_logprobs else list(groups)

    def penalized(self, groups: Sequence[Group], penalty: KLPenalty) -> list[Group]:
        """Return all groups on every rank with log-probs, and with a KL penalty on their rewards."""
        old = self._with_old(groups, self._scores.gathered)
        [both] = self._with_reference([old], self._scores.gathered)
        return [penalized_group(group, penalty) for group in both]

    def prepare(
        self, groups: Sequence[Group], is_fresh: Sequence[bool], generator: np.random.Generator
    ) -> tuple[list[MiniBatch], dict[str, Any]]:
        """Split the groups into mini-batches, and compute everything that is needed before the first update.

        Args:
            groups: The batch, with advantages.
            is_fresh: For each group whether this step sampled it: no earlier step computed its old log-probs.
            generator: Chooses the groups of each mini-batch, and the trained responses if not all are.

        Returns:
            The part of this rank of each mini-batch, and its entries of `StepMetrics`.
        """
        settings, loss = self._settings, self._settings.loss
        parts = np.array_split(generator.permutation(len(groups)), settings.mini_batches)
        size, finished_only = settings.max_responses_per_outcome, loss.mask_truncated
        chosen = [[(i, choose_trained(groups[i], size, finished_only, generator)) for i in part] for part in parts]
        trained = [[(is_fresh[i], group) for i, group in part if group] for part in chosen]
        every = list(chain(*trained))
        if settings.importance.correction != "none":
            check_sampler_logprobs([group.tree for _, group in every])
        local: list[list[Group]] = []
        fresh: list[bool] = []
        for part in trained:
            pieces = self._scores.local_pieces([group.tree for _, group in part])
            local.append([_piece(part[p.tree][1], p) for p in pieces])
            fresh += [part[p.tree][0] for p in pieces]
        if not (settings.kl and settings.kl.placement == "reward"):  # there, the penalty has computed all of them
            local = [self._with_old(part, self._scores.local) for part in local]
            local = self._with_reference(local, self._scores.local) if self._reference else local
        batches = []
        for indices, own in zip(parts, local, strict=True):
            trees, fraction = [groups[i].tree for i in indices], len(indices) * len(parts) / len(groups)
            batches.append(assemble(trees, own, settings, fraction, self._tensor))
        mismatch = self._mismatch(
            [group.tree for is_new, group in every if is_new],
            [group for group, is_new in zip(chain(*local), fresh, strict=True) if is_new],
        )
        num_tokens = sum(group.tree.num_sampled_tokens for _, group in every)
        kept = sum(self._ranks.gather(sum(batch.kept_tokens for batch in batches)))
        return batches, {
            "trained_nodes": sum(group.tree.num_unique_tokens for _, group in every),
            "mismatch_mean": mismatch.mean if mismatch else None,
            "mismatch_max": mismatch.max if mismatch else None,
            "mismatch_kl": mismatch.kl if mismatch else None,
            "masked_fraction": 1.0 - kept / num_tokens if num_tokens else 0.0,
        }

    def _with_old(self, groups: Sequence[Group], compute: _Compute) -> list[Group]:
        """Return groups with old log-probs: the engine's, the known ones, or those of the current weights."""
        if not self._settings.recompute_old_logprobs:
            return [replace(group, old_logprob_M=group.tree.logprob) for group in groups]
        fresh = iter(compute([group.tree for group in groups if group.old_logprob_M is None]))
        return [g if g.old_logprob_M is not None else replace(g, old_logprob_M=next(fresh)) for g in groups]

    def _with_reference(self, batches: Sequence[Sequence[Group]], compute: _Compute) -> list[list[Group]]:
        """Return lists of groups with the reference's log-probs."""
        assert self._reference is not None  # callers check it
        found = self._scores.under(self._reference, lambda: [compute([g.tree for g in groups]) for groups in batches])
        return [
            [replace(group, reference_logprob_M=logprob_M) for group, logprob_M in zip(groups, of_batch, strict=True)]
            for groups, of_batch in zip(batches, found, strict=True)
        ]

    def _mismatch(self, fresh: Sequence[RolloutTree], local: Sequence[Group]) -> Mismatch | None:
        """Compare the old policy with the sampler on fresh rollouts, in the parts of each rank; None if unknown."""
        if not self._settings.recompute_old_logprobs or not fresh or any(np.isnan(t.logprob).any() for t in fresh):
            return None
        sums = Mismatch.of([group.tree for group in local], [known(group.old_logprob_M) for group in local])
        return Mismatch.total(self._ranks.gather(sums))


def _piece(group: Group, piece: TreeSlice) -> Group:
    """Return some responses of a group."""
    is_whole = (piece.start, piece.stop) == (0, group.tree.num_responses)
    return group if is_whole else group.select(np.arange(piece.start, piece.stop))
