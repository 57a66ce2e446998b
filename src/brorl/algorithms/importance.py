"""Importance factors, for two purposes.

1. The engine and the learner have the same weights but different numerics: the engine may compute in bfloat16 or with
different kernels. A token's ratio w = exp(old - sampler) is a function of (prefix, token), hence of the node; a mask on
whole responses acts on leaves. Both are exact on the tree. Log-ratios are clamped to +-20. Factors multiply the policy
term only, never the KL term, and denominators do not change: a masked token counts with loss 0. Unknown log-probs are
an error.

2. At large N, a few responses carry most of the gradient's weight, so at most k correct and k incorrect distinct
responses are back-propagated. Each is chosen with a probability pi proportional to its weight, and weighted by 1 / pi.
The expected gradient equals the gradient over all responses, because the loss is linear in the responses' weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from brorl.algorithms.settings import ImportanceCorrection
from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.tree import RolloutTree

_MAX_LOG_WEIGHT = 20.0  # keeps exp and its sums finite; any useful bound is far smaller


def mismatch(trees: Sequence[RolloutTree], old_logprobs: Sequence[FloatArray]) -> dict[str, float]:
    """Measure how far the old policy is from the sampler, over all sampled tokens. Given tokens are excluded.

    The mean of w is 1 if the sampler's log-probs are right. The mean of w - 1 - log w estimates KL(sampler || old) in
    nats per token, if the mean of w is 1. With top-p and top-k, this also requires that both policies keep the same
    tokens.

    Args:
        trees: Rollouts with the sampler's log-probs, which must be known; every rollout counts.
        old_logprobs: The old policy's log-probs for each tree, shape [M].

    Source: the k3 estimator of Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = np.concatenate([_log_ratio(t, old) for t, old in zip(trees, old_logprobs, strict=True)])
    count = np.concatenate([t.sampled_count for t in trees])
    ratio = np.exp(log_ratio)
    num_tokens = float(count.sum())
    return {
        "mismatch_mean": float(count @ ratio) / num_tokens,
        "mismatch_max": float(ratio.max()),
        "mismatch_kl": float(count @ (np.expm1(log_ratio) - log_ratio)) / num_tokens,
    }


def importance_factors(
    tree: RolloutTree, old_logprob_M: FloatArray, correction: ImportanceCorrection
) -> tuple[FloatArray, FloatArray]:
    """Return weight factors for the policy term. `old_logprob_M` holds the old policy's log-probs (nats).

    Returns:
        One factor per node, >= 0, shape [M], and one per distinct response, 0 or 1, shape [L]; all 1 for "none".

    Raises:
        ValueError: If a sampler log-prob is unknown.
    """
    node_M, response_L = np.ones(tree.num_nodes), np.ones(tree.num_responses)
    if correction.correction == "none":
        return node_M, response_L
    log_ratio_M = _log_ratio(tree, old_logprob_M)
    ratio_M = np.exp(log_ratio_M)
    match correction.correction:
        case "truncate":
            node_M = np.minimum(ratio_M, correction.high)
        case "mask":
            node_M = np.where((ratio_M >= correction.low) & (ratio_M <= correction.high), ratio_M, 0.0)
        case "sequence_mask":
            node_M = ratio_M
            mean_L = np.exp(tree.sum_over_responses(log_ratio_M) / tree.length)
            response_L = ((mean_L >= correction.low) & (mean_L <= correction.high)).astype(np.float64)
        case _:
            assert_never(correction.correction)
    return node_M, response_L


def check_sampler_logprobs(trees: Sequence[RolloutTree]) -> None:
    """Raise a ValueError if any sampler log-prob is unknown."""
    if any(np.isnan(tree.logprob).any() for tree in trees):
        raise ValueError(
            "the importance correction needs the log-probs that the engine sampled with, but some are unknown; use an "
            "engine that returns them, or set importance.correction: none"
        )


def _log_ratio(tree: RolloutTree, old_logprob_M: FloatArray) -> FloatArray:
    check_sampler_logprobs([tree])
    log_ratio_M: FloatArray = np.clip(old_logprob_M - tree.logprob, -_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
    return log_ratio_M


def inclusion_probabilities(weight_L: FloatArray, size: int) -> FloatArray:
    """Return pi_l = min(1, c * weight_l), with c such that they sum to `size`: weights 4, 1, 1, size 2 -> 1, 1/2, 1/2.

    The weights are >= 0, shape [L]; a weight of 0 gives 0. If at most `size` weights are above 0, those all give 1.
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
    """Choose entries by systematic sampling with one uniform number. Entry l is chosen with probability pi_l.

    Returns:
        Ascending indices of the chosen entries; their number is the sum of `pi_L`, rounded up or down.

    Source: Madow, "On the theory of systematic sampling, II", Annals of Mathematical Statistics 20 (1949).
    """
    # Entry l owns the segment of length pi_l that ends at edge_l. It is chosen if a tick u, u + 1, ... falls in it.
    edge_L = np.cumsum(pi_L)
    ticks_L = np.floor(edge_L - generator.random())
    return np.flatnonzero(np.diff(ticks_L, prepend=-1.0) > 0)


def choose_responses(
    total_advantage_L: FloatArray, correct_L: BoolArray, size: int, generator: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Choose at most `size` (plus one, by rounding) responses with each verdict, favoring a larger |advantage|.

    Args:
        total_advantage_L: Count times advantage of each distinct response, shape [L].
        correct_L: Verdict of each distinct response, shape [L].
        size: Number of responses to choose from the correct ones, and again from the incorrect ones.
        generator: Source of two uniform numbers.

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
