"""Estimated cost of each distinct response of a tree in a pass, for sharing trees out to ranks.

In: a tree. Out: for each distinct response a number of tokens. A token costs the matrix products of a layer, and the
attention to the tokens before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brorl.tree import RolloutTree

FloatArray = NDArray[np.float64]


def tree_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return the cost of each distinct response with tree attention: its tokens that no earlier response has.

    Args:
        tree: The tree. Its first response pays for the prompt.
        cost_per_position: Cost of attending to a token, as a fraction of the other work for one.

    Returns:
        Costs in tokens, shape [L].
    """
    prompt = _prompt_cost(tree, cost_per_position)
    before_M = len(tree.prompt_ids) + tree.depth
    up_to_M = np.cumsum(1.0 + cost_per_position * before_M)
    cost_L = np.diff(up_to_M[tree.leaf], prepend=0.0)
    cost_L[0] += prompt
    return np.maximum(cost_L, 1e-9)  # two responses can end at one node


def row_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return the cost of each distinct response on the flat path: its prompt and all of its tokens.

    Args:
        tree: The tree.
        cost_per_position: Cost of attending to a token, as a fraction of the other work for one.

    Returns:
        Costs in tokens, shape [L].
    """
    length_L = len(tree.prompt_ids) + tree.length
    return length_L + cost_per_position * length_L * (length_L - 1) / 2


def _prompt_cost(tree: RolloutTree, cost_per_position: float) -> float:
    length = len(tree.prompt_ids)
    return length + cost_per_position * length * (length - 1) / 2
