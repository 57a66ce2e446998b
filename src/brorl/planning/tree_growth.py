"""The expected size of a rollout tree at another number of rollouts, from one tree with known log-probs.

A prefix of probability p is a node of the tree of N' rollouts with probability 1 - (1 - p)^N', so weighting each node
of a tree of n independent rollouts by

    (1 - (1 - p)^N') / (1 - (1 - p)^n)

(Horvitz and Thompson 1952) is exactly unbiased for every N', below n and above. Sampling must not be truncated. Trees
without log-probs are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brorl.arrays import FloatArray, IntArray
from brorl.theory.coverage import unseen_and_seen_mass
from brorl.tree import RolloutTree

_SMALLEST = -690.0  # exp() of it is a normal number; below it a chance is proportional to the number of rollouts


@dataclass(frozen=True)
class TreeGrowth:
    """Expected size of one prompt's tree at J numbers of rollouts."""

    nodes_J: FloatArray  # nodes, which are the computed tokens, shape [J]
    responses_J: FloatArray  # distinct responses, shape [J]
    rows_JD: FloatArray  # distinct live prefixes of d + 1 tokens, which are the rows of one decoding step, shape [J, D]


def tree_growth(tree: RolloutTree, wanted: IntArray, max_depth: int) -> TreeGrowth:
    """Estimate the size of a prompt's tree at other numbers of rollouts.

    Args:
        tree: n rollouts that were drawn independently.
        wanted: Numbers of rollouts N', each >= 1, shape [J].
        max_depth: Length limit of a response, D; at least the length of the longest.

    Raises:
        ValueError: If log-probs are missing, or a response is longer than `max_depth`.

    Source: Horvitz and Thompson, "A generalization of sampling without replacement from a finite universe" (1952).
    """
    if np.isnan(tree.logprob).any():
        raise ValueError("the tree has nodes without log-probs; sample it with an engine that records them")
    if tree.length.max() > max_depth:
        raise ValueError(f"max_depth is {max_depth} and a response has {tree.length.max()} tokens; raise max_depth")
    ratio_JM = growth_ratios(tree.prefix_logprob, tree.num_rollouts, wanted)
    live = np.unique(tree.parent[tree.parent >= 0])
    rows_JD = np.zeros((len(ratio_JM), max_depth))
    for rows_D, ratio_M in zip(rows_JD, ratio_JM, strict=True):
        rows_D[:] = np.bincount(tree.depth[live], weights=ratio_M[live], minlength=max_depth)
    return TreeGrowth(ratio_JM.sum(1), ratio_JM[:, tree.leaf].sum(1), rows_JD)


def growth_ratios(path_logprob_K: FloatArray, pilot_rollouts: int, wanted: IntArray) -> FloatArray:
    """Return the chance of each prefix to appear among N' rollouts, divided by its chance among n.

    Returns:
        Ratios, shape [J, K]: N' / n for a prefix of probability near 0, 1 for a certain one.
    """
    p_K = np.exp(np.clip(path_logprob_K, _SMALLEST, 0.0))
    _, seen_JK = unseen_and_seen_mass(p_K, np.asarray(wanted)[:, None])
    _, seen_K = unseen_and_seen_mass(p_K, pilot_rollouts)
    ratio_JK: FloatArray = seen_JK / seen_K
    return ratio_JK
