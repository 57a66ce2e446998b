"""The log-probs of trees under the current weights, on one process or many ranks.

The responses are dealt to the ranks by their cost. If memory runs out, the work starts again with smaller chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from brorl.arrays import FloatArray
from brorl.model.chunk_size import ChunkSize, Passes
from brorl.model.device import in_float64
from brorl.model.logprobs import by_tree
from brorl.model.tree_batch import TreeSlice
from brorl.training.learner import LearnerSettings
from brorl.training.ranks import Ranks
from brorl.training.reference import ReferencePolicy
from brorl.tree import RolloutTree

T = TypeVar("T")


class TreeScores:
    """Computes log-probs.

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
