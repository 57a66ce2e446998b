"""The policy loss on trees: PPO's clipped objective from two weights per node.

Rollouts that share a prefix share the ratio r of each of its tokens. PPO's term for a rollout with advantage A is
A min(r, 1 + clip_high) if A > 0 and A max(r, 1 - clip_low) if A < 0, so a node needs only the sum of the positive
and the sum of the negative advantages of the rollouts that pass through it, and the loss equals that of the N x T
batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from brorl.tree import RolloutTree


class NodeWeights(NamedTuple):
    """Summed advantages of the rollouts through each node.

    Attributes:
        positive_M: Sum of the positive ones, >= 0, shape [M].
        negative_M: Sum of the negative ones, <= 0, shape [M].
    """

    positive_M: NDArray[np.float64]
    negative_M: NDArray[np.float64]


def node_weights(tree: RolloutTree, advantage_L: NDArray[np.float64]) -> NodeWeights:
    """Sum the advantages of the rollouts through each node.

    Args:
        tree: The rollouts.
        advantage_L: Advantage of each distinct response, shape [L]; its count is applied here.

    Returns:
        The two weights of each node.
    """
    total_L = tree.leaf_count * advantage_L
    return NodeWeights(tree.sum_below(np.maximum(total_L, 0.0)), tree.sum_below(np.minimum(total_L, 0.0)))


class PolicyLoss(NamedTuple):
    """The loss of some nodes, with sums for the metrics.

    Attributes:
        loss: Scalar; adds up over parts of a batch that are given the same `num_tokens`.
        clipped_weight: Sum of |weight| whose gradient the clip removed, scalar, no gradient.
    """

    loss: Tensor
    clipped_weight: Tensor


def clipped_policy_loss(
    logprob_K: Tensor,
    old_logprob_K: Tensor,
    positive_K: Tensor,
    negative_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
) -> PolicyLoss:
    """PPO's clipped loss with decoupled bounds, as a mean over all sampled tokens of the batch.

        L = - sum_k [ W+_k min(r_k, 1 + clip_high) + W-_k max(r_k, 1 - clip_low) ] / num_tokens

    Args:
        logprob_K: Log-probs (nats) of the nodes under the policy that is trained, shape [K].
        old_logprob_K: Their log-probs under the policy that sampled them, shape [K].
        positive_K: Summed positive advantages, shape [K].
        negative_K: Summed negative advantages, shape [K].
        clip_low: How far the ratio may fall below 1 before it stops counting, in (0, 1).
        clip_high: How far it may rise above 1, > 0.
        num_tokens: Sampled tokens of the whole batch, over all of its parts and devices.

    Returns:
        The loss and the clipped weight.

    Source: PPO (arXiv 1707.06347, Eq. 7), decoupled clip and token-level mean of DAPO (arXiv 2503.14476, Eq. 10 and
        12).
    """
    ratio_K = (logprob_K - old_logprob_K).exp()
    gain_K = positive_K * ratio_K.clamp(max=1 + clip_high) + negative_K * ratio_K.clamp(min=1 - clip_low)
    above, below = ratio_K.detach() > 1 + clip_high, ratio_K.detach() < 1 - clip_low
    return PolicyLoss(-gain_K.sum() / num_tokens, (positive_K * above - negative_K * below).sum())
