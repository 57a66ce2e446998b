"""Losses on trees: PPO, CISPO and GSPO from two weights per node, and the KL penalty against a reference policy.

Rollouts that share a prefix share the ratio r of each of its tokens. For a rollout with advantage A, PPO's term is

    A min(r, 1 + clip_high)  if A > 0,        A max(r, 1 - clip_low)  if A < 0.

So a node needs two weights: the summed positive and the summed negative advantages of the rollouts through it. Dual
clip also bounds the ratio from above where A < 0, with the same two weights. CISPO needs only their sum. GSPO's ratio
belongs to a whole response, not to a node. Its loss needs the log-probs of all nodes first, and returns the coefficient
of each node's log-prob. The denominator is an argument, so the losses of a batch's parts add up to the loss of the N x
T batch.

With x = log pi - log ref at a token that pi sampled, the estimators of KL(pi || ref) are

    k1 = x        k2 = x^2 / 2        k3 = exp(-x) - 1 + x

Each is a function of (prefix, token), hence of the node, and is exact on the tree when weighted by counts. k1 and k3
have the right mean, k2 only to second order in x. In a *loss*, what matters is the mean gradient. On-policy, k2 gives
the gradient of KL(pi || ref), and k3 that of KL(ref || pi). k1 gives zero, because E[grad log pi] = 0: in the loss it
only adds noise, and it is available for comparison. In the reward, k1 gives the gradient of KL(pi || ref) over whole
responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from brorl.algorithms.groups import Group, required
from brorl.algorithms.settings import Aggregation, KLEstimator, KLPenalty
from brorl.arrays import FloatArray
from brorl.tree import RolloutTree

_MAX_LOG_RATIO = 80.0


def node_weights(tree: RolloutTree, advantage_L: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sum the positive and the negative advantages of the rollouts through each node, and return both sums, shape [M].

    Both are 0 at given nodes. Each distinct response's entry in `advantage_L`, shape [L], is multiplied by its count.

        responses  x y (twice, A = 1)   x z (once, A = -2)     ->     node  x: 2, -2     y: 2, 0     z: 0, -2
    """
    total_L = tree.leaf_count * advantage_L
    return tree.token_weights(np.maximum(total_L, 0.0)), tree.token_weights(np.minimum(total_L, 0.0))


class PolicyLoss(NamedTuple):
    """The loss over a set of nodes, with sums for the metrics."""

    loss: Tensor  # scalar; adds up over parts of a batch with the same `denominator`
    clipped_weight: Tensor  # sum of |weight| where the clip removed the gradient (CISPO: bounded it), a detached scalar
    clipped_low: Tensor  # part of `clipped_weight` at the lower bound, a detached scalar
    clipped_high: Tensor  # part of `clipped_weight` at the upper bound, a detached scalar; `dual_clip` is the rest


def _ratio(logprob_K: Tensor, old_logprob_K: Tensor, bounded_K: Tensor | None = None) -> Tensor:
    """Return exp(logprob - old), shape [K], capped at e^80 where the loss bounds the ratio from above.

    `bounded_K` marks these nodes (None: all nodes). There, a larger ratio has weight 0 or no gradient, and 0 times an
    infinite ratio (above e^88.7 in float32) would be NaN.
    """
    log_ratio_K = logprob_K - old_logprob_K
    too_large_K = log_ratio_K.detach() > _MAX_LOG_RATIO
    if bounded_K is not None:
        too_large_K = too_large_K & bounded_K
    return log_ratio_K.masked_fill(too_large_K, _MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprob_K: Tensor,
    old_logprob_K: Tensor,
    positive_K: Tensor,
    negative_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped loss with decoupled bounds and an optional second bound for negative advantages.

        L = - sum_k [ W+_k min(r_k, 1 + clip_high) + W-_k min(max(r_k, 1 - clip_low), dual_clip) ] / denominator

    Args:
        logprob_K: Log-probs (nats) of the nodes under the trained policy, shape [K].
        old_logprob_K: Log-probs of the nodes under the policy that sampled them, shape [K].
        positive_K: Summed positive advantages of the rollouts through each node, shape [K].
        negative_K: Summed negative advantages, shape [K].
        clip_low: How far the ratio may fall below 1 before it is clipped, in (0, 1].
        clip_high: How far it may rise above 1, > 0.
        denominator: Denominator for the whole batch, across all parts and devices: for a token mean, the number of
            sampled tokens.
        dual_clip: Upper bound on the ratio of negative advantages, above 1 + clip_high; None for no bound.

    Source: PPO (arXiv 1707.06347, Eq. 7), decoupled clip and token-level mean of DAPO (arXiv 2503.14476, Eq. 10 and
        12), dual clip of Ye et al. (arXiv 1912.09729, Eq. 5).
    """
    ratio_K = _ratio(logprob_K, old_logprob_K, None if dual_clip is not None else negative_K == 0)
    lost_K = ratio_K.clamp(min=1 - clip_low, max=dual_clip)
    gain_K = positive_K * ratio_K.clamp(max=1 + clip_high) + negative_K * lost_K
    above, below = ratio_K.detach() > 1 + clip_high, ratio_K.detach() < 1 - clip_low
    high_K, low_K = positive_K * above, negative_K * below
    clipped_K = high_K - low_K
    if dual_clip is not None:
        clipped_K = clipped_K - negative_K * (ratio_K.detach() > dual_clip)
    return PolicyLoss(-gain_K.sum() / denominator, clipped_K.sum(), -low_K.sum(), high_K.sum())


def cispo_loss(
    logprob_K: Tensor,
    old_logprob_K: Tensor,
    positive_K: Tensor,
    negative_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
) -> PolicyLoss:
    """Return the CISPO loss: weight the log-prob by a clipped, detached ratio, so no token loses its gradient.

        L = - sum_k stop_grad(clip(r_k, 1 - clip_low, 1 + clip_high)) (W+_k + W-_k) logprob_k / denominator

    See `clipped_policy_loss` for the arguments. A weight counts as clipped if its ratio is out of bounds, regardless of
    the sign of the advantage.

    Source: MiniMax-M1 (arXiv 2506.13585, Eq. 4 and 5).
    """
    ratio_K = _ratio(logprob_K.detach(), old_logprob_K)
    bounded_K = ratio_K.clamp(1 - clip_low, 1 + clip_high)
    gain_K = bounded_K * (positive_K + negative_K) * logprob_K
    weight_K = positive_K - negative_K
    low, high = (weight_K * (ratio_K < 1 - clip_low)).sum(), (weight_K * (ratio_K > 1 + clip_high)).sum()
    return PolicyLoss(-gain_K.sum() / denominator, low + high, low, high)


class SequenceLoss(NamedTuple):
    """A loss on whole responses at the current weights."""

    loss: float  # adds up over trees with the same `denominator`
    coefficient_M: FloatArray  # derivative of the loss with respect to each node's log-prob, shape [M]
    clipped_low: float  # sum of |weight| where the lower bound removed the gradient
    clipped_high: float  # sum of |weight| where the upper bound removed the gradient


def gspo_loss(
    tree: RolloutTree,
    advantage_L: FloatArray,
    logprob_M: FloatArray,
    old_logprob_M: FloatArray,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
) -> SequenceLoss:
    """Return the GSPO loss: PPO's clip on a whole response's ratio, the geometric mean of its tokens' ratios.

        s_l = exp(mean over the tokens of l of (logprob - old_logprob))
        L   = - sum_l count_l T_l min(s_l A_l, clip(s_l, 1 - clip_low, 1 + clip_high) A_l) / denominator

    s_l depends on the whole response, not on a node, so this takes two passes through the model. The first computes
    `logprob_M` without gradient. The derivative with respect to each response's mean log-ratio then becomes one
    coefficient per node. The second pass back-propagates sum_k coefficient_k logprob_k, which has the exact gradient.

    Args:
        tree: The rollouts.
        advantage_L: Advantage of each distinct response times the weight of each of its tokens, shape [L]; counts and
            lengths are applied here. (Weights 1 / T_l and the number of rollouts as denominator give the published
            loss; otherwise each token of a response carries s_l.)
        logprob_M: Log-probs (nats) of the nodes under the trained policy, shape [M].
        old_logprob_M: Log-probs of the nodes under the policy that sampled them, shape [M].
        clip_low: How far s may fall below 1 before it is clipped, in (0, 1].
        clip_high: How far it may rise above 1, > 0.
        denominator: Denominator for the whole batch, across all parts and devices.

    Source: GSPO (arXiv 2507.18071, Eq. 5 and 7).
    """
    with np.errstate(over="ignore"):  # the caller rejects an infinite loss
        ratio_L = np.exp(tree.sum_over_responses(logprob_M - old_logprob_M) / tree.length)
    per_token_L = tree.leaf_count * advantage_L
    weight_L = per_token_L * tree.length
    high_L = (ratio_L > 1 + clip_high) & (weight_L > 0)
    low_L = (ratio_L < 1 - clip_low) & (weight_L < 0)
    bounded_L = np.where(high_L, 1 + clip_high, np.where(low_L, 1 - clip_low, ratio_L))
    slope_L = np.where(high_L | low_L | (weight_L == 0), 0.0, ratio_L)
    return SequenceLoss(
        loss=-float(weight_L @ np.where(weight_L == 0, 0.0, bounded_L)) / denominator,
        coefficient_M=-tree.token_weights(per_token_L * slope_L) / denominator,
        clipped_low=-float(weight_L[low_L].sum()),
        clipped_high=float(weight_L[high_L].sum()),
    )


def response_weights(tree: RolloutTree, aggregation: Aggregation) -> FloatArray:
    """Return the weight of each token in a distinct response, before multiplying by the response's count, shape [L].

    It is 1 / T_l for "sequence_mean", where T_l is the length of response l, and 1 for the other aggregations.
    """
    match aggregation:
        case "sequence_mean":
            return 1.0 / tree.length
        case "token_mean" | "constant":
            return np.ones(tree.num_responses)
        case _:
            assert_never(aggregation)


def loss_denominator(
    trees: Sequence[RolloutTree], aggregation: Aggregation, max_new_tokens: int, mask_truncated: bool = False
) -> int:
    """Return the denominator of a batch's summed, weighted token losses, at least 1.

    Args:
        trees: The whole batch, including rollouts that are not back-propagated.
        aggregation: "token_mean" counts sampled tokens, so long responses weigh more. "sequence_mean" counts rollouts,
            which all weigh the same. "constant" is rollouts times `max_new_tokens`, so a token's weight does not depend
            on the other samples.
        max_new_tokens: Maximum tokens per response.
        mask_truncated: Whether truncated responses are removed from the loss. "token_mean" then counts the tokens of
            the others. "sequence_mean" and "constant" count all rollouts, so a response's weight does not depend on how
            many others were truncated (as in TRL).

    Source: token mean: DAPO (arXiv 2503.14476, Eq. 12); sequence mean: GRPO (DeepSeekMath, arXiv 2402.03300, Eq. 3);
        constant: Dr. GRPO (arXiv 2503.20783).
    """
    num_rollouts = max(1, sum(t.num_rollouts for t in trees))
    match aggregation:
        case "token_mean":
            counts = [t.leaf_count * t.finished if mask_truncated else t.leaf_count for t in trees]
            return max(1, sum(int(count_L @ t.length) for count_L, t in zip(counts, trees, strict=True)))
        case "sequence_mean":
            return num_rollouts
        case "constant":
            return num_rollouts * max_new_tokens
        case _:
            assert_never(aggregation)


def kl_estimates(logprob_K: Tensor, reference_logprob_K: Tensor, estimator: KLEstimator, clamp: float) -> Tensor:
    """Estimate KL(policy || reference) at each node in nats, shape [K], differentiable in `logprob_K`.

    Log-ratios are clamped to [-clamp, clamp], in nats.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio_K = (logprob_K - reference_logprob_K).clamp(-clamp, clamp)
    match estimator:
        case "k1":
            return log_ratio_K
        case "k2":
            return log_ratio_K.square() / 2
        case "k3":
            return torch.expm1(-log_ratio_K) + log_ratio_K
        case _:
            assert_never(estimator)


def penalized_group(group: Group, penalty: KLPenalty) -> Group:
    """Subtract each response's KL penalty from its reward. Verdicts do not change.

    The penalty is coefficient * (sum of the estimates over the response's tokens). Old and reference log-probs must be
    known.

    Source: the KL reward of InstructGPT (arXiv 2203.02155, Eq. 2), per response as in RLOO (arXiv 2402.14740).
    """
    estimate_M = kl_estimates(
        torch.from_numpy(np.array(required(group.old_logprob_M))),
        torch.from_numpy(np.array(required(group.reference_logprob_M))),
        penalty.estimator,
        penalty.clamp,
    ).numpy()
    penalty_L = penalty.coefficient * group.tree.sum_over_responses(estimate_M)
    return replace(group, reward_L=group.reward_L - penalty_L)
