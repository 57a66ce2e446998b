"""Advantages: how much better each response did than its group, from rewards and counts.

All rollouts that gave the same response have the same reward, hence the same advantage: one number per distinct
response, weighted by its count wherever the formula sums over rollouts. x_i below is the reward of rollout i, sums
run over the N rollouts of the group, and all standard deviations divide by the number of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from brorl.algorithms.groups import Group

FloatArray = NDArray[np.float64]
NormaliseOver = Literal["trajectories", "tokens"]
_SMALL = 1e-8


def reinforce_pp_baseline(groups: Sequence[Group], normalise_over: NormaliseOver = "trajectories") -> list[FloatArray]:
    """REINFORCE++-baseline: reward minus the group's mean, then normalised over the whole batch.

        a_i = x_i - mean(x),   A_i = (a_i - mean_batch(a)) / (std_batch(a) + 1e-8)

    Args:
        groups: The batch.
        normalise_over: Whether a rollout enters the batch statistics once ("trajectories", as BroRL states it) or
            once for each of its tokens ("tokens", as public implementations do).

    Returns:
        For each group the advantage of each distinct response, shape [L].

    Source: REINFORCE++ (arXiv 2501.03262, its baseline variant); BroRL (arXiv 2510.01180), section 4.
    """
    centred = [group.reward_L - _mean(group.reward_L, group) for group in groups]
    weights = [_batch_weights(group, normalise_over) for group in groups]
    value, weight = np.concatenate(centred), np.concatenate(weights).astype(np.float64)
    mean = np.average(value, weights=weight)
    std = np.sqrt(np.average((value - mean) ** 2, weights=weight))
    return [(a - mean) / (std + _SMALL) for a in centred]


def grpo(groups: Sequence[Group]) -> list[FloatArray]:
    """GRPO: A_i = (x_i - mean(x)) / (std(x) + 1e-8) within each group.

    Args:
        groups: The batch.

    Returns:
        For each group the advantage of each distinct response, shape [L].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Public trainers divide by N - 1 in the standard deviation.
    """
    advantages = []
    for group in groups:
        centred = group.reward_L - _mean(group.reward_L, group)
        advantages.append(centred / (np.sqrt(_mean(centred**2, group)) + _SMALL))
    return advantages


def rloo(groups: Sequence[Group]) -> list[FloatArray]:
    """RLOO: reward minus the mean of the other rollouts, A_i = x_i - sum_{j != i} x_j / (N - 1).

    Args:
        groups: The batch; every group needs N >= 2.

    Returns:
        For each group the advantage of each distinct response, shape [L].

    Source: arXiv 2402.14740, Eq. 5.
    """
    advantages = []
    for group in groups:
        num_rollouts = group.tree.num_rollouts
        if num_rollouts < 2:
            raise ValueError("RLOO needs at least 2 rollouts per prompt")
        advantages.append((group.reward_L - _mean(group.reward_L, group)) * (num_rollouts / (num_rollouts - 1)))
    return advantages


def _batch_weights(group: Group, normalise_over: NormaliseOver) -> NDArray[np.int64]:
    """Return the weight of each distinct response in the batch statistics, shape [L]."""
    match normalise_over:
        case "trajectories":
            return group.tree.leaf_count
        case "tokens":
            return group.tree.leaf_count * group.tree.length
        case _:
            assert_never(normalise_over)


def _mean(value_L: FloatArray, group: Group) -> float:
    """Mean over the group's rollouts."""
    return float(np.average(value_L, weights=group.tree.leaf_count))
