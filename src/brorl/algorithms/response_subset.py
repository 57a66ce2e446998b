"""Learning from a subset of a group's distinct responses, without bias.

At large N few responses have most of the gradient's weight. Back-propagating at most k of the correct and k of the
incorrect distinct responses, chosen with probability pi proportional to their weight and weighted by 1 / pi, gives a
gradient whose mean is that of all responses (the loss is linear in the responses' weights).
"""

from __future__ import annotations

import numpy as np

from brorl.arrays import BoolArray, FloatArray, IntArray


def inclusion_probabilities(weight_L: FloatArray, size: int) -> FloatArray:
    """Return pi_l = min(1, c * weight_l), with c such that they add up to `size`, or all 1 if there are fewer.

    The weights are >= 0, shape [L]; a probability is 0 exactly where the weight is 0.
    """
    if np.count_nonzero(weight_L) <= size:
        return (weight_L > 0).astype(np.float64)
    certain_L = np.zeros(weight_L.size, np.bool_)
    while True:
        rest = weight_L[~certain_L].sum()
        pi_L = np.where(certain_L, 1.0, weight_L * ((size - certain_L.sum()) / rest))
        if not (pi_L > 1).any():
            return pi_L
        certain_L |= pi_L >= 1


def choose(pi_L: FloatArray, generator: np.random.Generator) -> IntArray:
    """Choose entries, each with its own probability, by systematic sampling from one uniform number.

    Returns:
        Ascending indices of the chosen entries; their number is the sum of `pi_L`, rounded up or down.

    Source: Madow, "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20 (1949).
    """
    edge_L = np.cumsum(pi_L)
    ticks_L = np.floor(edge_L - generator.random())
    return np.flatnonzero(np.diff(ticks_L, prepend=-1.0) > 0)


def choose_responses(
    total_advantage_L: FloatArray, correct_L: BoolArray, size: int, generator: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Choose at most `size` (plus one, by rounding) responses of each verdict, by the size of their summed advantage.

    Args:
        total_advantage_L: Count times advantage of each distinct response, shape [L].
        correct_L: Its verdict, shape [L].
        size: How many of each verdict.
        generator: Gives two uniform numbers.

    Returns:
        Ascending indices of the chosen responses, shape [K], and the factors 1 / pi for their weights, shape [K].
    """
    pi_L = np.zeros(total_advantage_L.size)
    chosen = []
    for verdict in (False, True):
        mine = np.flatnonzero(correct_L == verdict)
        pi_L[mine] = inclusion_probabilities(np.abs(total_advantage_L[mine]), size)
        chosen.append(mine[choose(pi_L[mine], generator)])
    kept = np.sort(np.concatenate(chosen))
    return kept, 1.0 / pi_L[kept]
