"""Advantages: how much better each response did than its group, from rewards and counts.

Rollouts with the same response have the same reward, hence the same advantage: one number per distinct response,
weighted by its count wherever a formula sums over rollouts. x_i below is the reward of rollout i, sums run over the N
rollouts of the group, and standard deviations divide by the number of entries. With rewards of 0 and 1, `rloo`, `grpo`
and `reinforce_pp_baseline` (before the batch's scale) are special cases of `outcome_weighted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, assert_never

import numpy as np

from brorl.algorithms import outcome_weights
from brorl.algorithms.groups import Group
from brorl.algorithms.outcome_weights import OutcomeWeight
from brorl.algorithms.settings import AdvantageSettings
from brorl.arrays import FloatArray

EstimateAdvantages = Callable[[Sequence[Group]], list[FloatArray]]
"""From a batch to the advantage of each distinct response, shape [L], for each group."""
_SMALL = 1e-8


def advantage_estimator(settings: AdvantageSettings) -> EstimateAdvantages:
    """Return the advantage estimator that settings name, with its batch statistics."""
    estimate = _estimator(settings)
    if not settings.batch_scale and settings.estimator != "reinforce_pp_baseline":
        return estimate
    return lambda groups: batch_normalized(groups, estimate(groups), settings.normalize_over)


def _estimator(settings: AdvantageSettings) -> EstimateAdvantages:
    match settings.estimator:
        case "reinforce_pp_baseline":
            weight: OutcomeWeight = outcome_weights.reinforce_pp_baseline
        case "grpo":
            return grpo
        case "rloo":
            weight = outcome_weights.rloo
        case "maxrl":
            weight = partial(outcome_weights.maxrl, order=settings.order)
        case "pass_at_k":
            weight = partial(_pass_at_most, k=settings.k)
        case _:
            assert_never(settings.estimator)
    return partial(outcome_weighted, weight=weight)


def _pass_at_most(num_rollouts: int, num_correct: int, k: int) -> float:
    """Weigh by pass@k, or by pass@(N-1) where unverified rollouts left a group of N <= k (MaxRL does the same)."""
    return outcome_weights.pass_at_k(num_rollouts, num_correct, min(k, num_rollouts - 1))


def outcome_weighted(groups: Sequence[Group], weight: OutcomeWeight) -> list[FloatArray]:
    """Weigh each group by its verdicts: A_i = w(N, c) (x_i - mean(x)).

    The weight depends on the raw verdicts, and x_i is the reward. With rewards of 0 and 1 this is the gradient of the
    objective that the weight names. With shaped rewards it has the direction of the prompt's mean reward if the weight
    does not depend on c. Otherwise it has not: groups without a success often have the weight 0, so preferences among
    incorrect responses count less (up to 60 degrees away for N = 16 and a pass rate of .002). Dynamic sampling is such
    a weight for every estimator (docs/explanation/theory.md, shaped rewards). The groups may differ in N.
    """
    return [_centered(group) * weight(group.tree.num_rollouts, group.num_correct) for group in groups]


def batch_normalized(
    groups: Sequence[Group],
    advantages: Sequence[FloatArray],
    normalize_over: Literal["trajectories", "tokens"] = "trajectories",
) -> list[FloatArray]:
    """Subtract the batch's mean from all advantages, and divide by the batch's standard deviation plus 1e-8.

    The advantages have a mean of 0 over the rollouts of a group. A rollout enters the batch statistics once
    ("trajectories", as BroRL states it) or once for each of its tokens ("tokens", as public implementations do).
    """
    by_tokens = normalize_over == "tokens"
    weights = [group.tree.leaf_count * (group.tree.length if by_tokens else 1) for group in groups]
    value, weight = np.concatenate(advantages), np.concatenate(weights).astype(np.float64)
    mean = np.average(value, weights=weight) if by_tokens else 0.0  # exactly: equal rewards keep an advantage of 0
    std = np.sqrt(np.average((value - mean) ** 2, weights=weight))
    return [(a - mean) / (std + _SMALL) for a in advantages]


def grpo(groups: Sequence[Group]) -> list[FloatArray]:
    """GRPO: A_i = (x_i - mean(x)) / (std(x) + 1e-8) within each group.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Public trainers divide by N - 1 in the standard deviation.
    """
    advantages = []
    for group in groups:
        centered = _centered(group)
        advantages.append(centered / (np.sqrt(_mean(centered**2, group)) + _SMALL))
    return advantages


def _centered(group: Group) -> FloatArray:
    """Reward minus the group's mean, shape [L]; exactly 0 if all rewards are equal."""
    if np.ptp(group.reward_L) == 0:  # the computed mean can differ from them in the last bit
        return np.zeros_like(group.reward_L)
    return group.reward_L - _mean(group.reward_L, group)


def _mean(value_L: FloatArray, group: Group) -> float:
    """Mean over the group's rollouts."""
    return float(np.average(value_L, weights=group.tree.leaf_count))
