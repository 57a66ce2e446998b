"""Deals the distinct responses of trees to ranks.

In: trees, and the cost of each of their responses. Out: for each rank some runs of consecutive responses. The responses
of all trees, in order, are cut into one run per rank, so that at most R - 1 trees are split. A loss is a sum over
responses, hence the parts of a tree have the gradient of the tree. A rank computes the prompt, and the ancestors of the
first response of its part, again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Piece(NamedTuple):
    """The distinct responses [start, stop) of tree number `tree`."""

    tree: int
    start: int
    stop: int


def deal(costs: Sequence[FloatArray], num_ranks: int) -> list[list[Piece]]:
    """Cut the responses of trees into contiguous fractions of nearly equal cost.

    Args:
        costs: For each tree the cost of each distinct response, above 0, shape [L].
        num_ranks: Number of fractions, R.

    Returns:
        For each rank its pieces. A share differs from the mean by less than the most expensive response. Shares are
        empty where there are fewer responses than ranks.
    """
    if not costs:
        return [[] for _ in range(num_ranks)]
    cost = np.concatenate(costs)
    middle = np.cumsum(cost) - cost / 2
    rank = np.minimum((middle * num_ranks / cost.sum()).astype(np.int64), num_ranks - 1)
    ends = np.cumsum([tree_L.size for tree_L in costs])
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for number, (tree_L, end) in enumerate(zip(costs, ends.tolist(), strict=True)):
        rank_L = rank[end - tree_L.size : end]
        starts = np.flatnonzero(np.diff(rank_L, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), tree_L.size], strict=True):
            shares[rank_L[start]].append(Piece(number, start, stop))
    return shares
