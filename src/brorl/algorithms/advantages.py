"""Advantages: how much better each response did than its group.

Equal responses have equal advantages, so there is one number per distinct response, counted once per rollout in sums:

    responses  A A A B     rewards of A, B: 1, 0     group mean 3/4     rewards minus mean: 1/4, -3/4

Below, x_i is the reward of rollout i, sums run over the N rollouts of the group, and standard deviations divide by the
number of entries.

Any advantage that depends only on outcomes and sums to 0 has the form A_i = w(N, c) (r_i - c/N), with r_i in {0, 1} and
c the sum of r_i. It never prefers one correct response over another; it only reweights prompts. Its *outcome weight* w
decides which objective is maximized. Each weight has a function `..._weight`:

| weight | w(N, c) | E[(1/N) sum_i A_i grad log pi(y_i)] is the gradient of |
|---|---|---|
| `rloo` | N / (N-1) | pass@1 |
| `reinforce_pp_baseline` | 1 | (1 - 1/N) pass@1, before normalization over the batch |
| `grpo` | N / sqrt(c (N-c)) | an objective that depends on N; about 2 arcsin(sqrt(pass@1)) for large N |
| `pass_at_k` | k N/(N-1) C(N-1-c, k-1) / C(N-2, k-1) | pass@k |
| `maxrl` | N/c (1 - C(N-1-c, T) / C(N-1, T)) | sum_{k<=T} pass@k / k; for large T that of log pass@1 |

With W_k the weight of pass@k, `maxrl` is sum_{k<=T} W_k / k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import comb, sqrt
from typing import Literal, assert_never

import numpy as np

from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.arrays import FloatArray

EstimateAdvantages = Callable[[Sequence[Group]], list[FloatArray]]
"""Maps a batch to the advantages of each group, one per distinct response, shape [L]."""
OutcomeWeight = Callable[[int, int], float]
"""Maps N rollouts, of which c (0 to N) are correct, to the group's weight."""
_EPSILON = 1e-8  # keeps quotients finite when all rewards are equal


def advantage_estimator(settings: AdvantageSettings) -> EstimateAdvantages:
    """Return the estimator selected in the settings, including any normalization over the batch."""
    estimate = _estimator(settings)
    if not settings.batch_scale and settings.estimator != "reinforce_pp_baseline":
        return estimate
    return lambda groups: batch_normalized(groups, estimate(groups), settings.normalize_over)


def _estimator(settings: AdvantageSettings) -> EstimateAdvantages:
    """Return the estimator selected in the settings, without normalization over the batch."""
    match settings.estimator:
        case "reinforce_pp_baseline":
            weight: OutcomeWeight = reinforce_pp_baseline_weight
        case "grpo":
            return grpo
        case "rloo":
            weight = rloo_weight
        case "maxrl":
            weight = partial(maxrl_weight, order=settings.order)
        case "pass_at_k":
            weight = partial(_pass_at_k_within_group, k=settings.k)
        case _:
            assert_never(settings.estimator)
    return partial(outcome_weighted, weight=weight)


def _pass_at_k_within_group(num_rollouts: int, num_correct: int, k: int) -> float:
    """Weight by pass@k, or by pass@(N-1) if unverified rollouts leave N <= k (MaxRL does the same)."""
    return pass_at_k_weight(num_rollouts, num_correct, min(k, num_rollouts - 1))


def outcome_weighted(groups: Sequence[Group], weight: OutcomeWeight) -> list[FloatArray]:
    """Weight each group by its verdicts: A_i = w(N, c) (x_i - mean(x)).

    The weight depends on the raw verdicts; x_i is the reward. With rewards of 0 and 1, this gives the gradient of the
    weight's objective. With shaped rewards, a weight that does not depend on c keeps the gradient direction of the
    prompt's mean reward. A weight that depends on c changes the direction: groups without a correct response often have
    weight 0, so preferences among incorrect responses count less (up to 60 degrees away for N = 16 and a pass rate of
    .002). Dynamic sampling acts as such a weight for every estimator (docs/explanation/theory.md, shaped rewards).
    Groups may differ in N.
    """
    return [_centered(group) * weight(group.tree.num_rollouts, group.num_correct) for group in groups]


def batch_normalized(
    groups: Sequence[Group],
    advantages: Sequence[FloatArray],
    normalize_over: Literal["trajectories", "tokens"] = "trajectories",
) -> list[FloatArray]:
    """Subtract the batch mean from all advantages, and divide by the batch standard deviation plus 1e-8.

    The input advantages must have mean 0 over each group's rollouts. A rollout counts once in the batch statistics
    ("trajectories", as BroRL states it) or once per token ("tokens", as public implementations do).
    """
    by_tokens = normalize_over == "tokens"
    weights = [group.tree.leaf_count * (group.tree.length if by_tokens else 1) for group in groups]
    value, weight = np.concatenate(advantages), np.concatenate(weights).astype(np.float64)
    mean = np.average(value, weights=weight) if by_tokens else 0.0  # exactly 0, so equal rewards keep advantage 0
    std = np.sqrt(np.average((value - mean) ** 2, weights=weight))
    return [(a - mean) / (std + _EPSILON) for a in advantages]


def grpo(groups: Sequence[Group]) -> list[FloatArray]:
    """GRPO: A_i = (x_i - mean(x)) / (std(x) + 1e-8) within each group.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Public trainers divide by N - 1 in the standard deviation.
    """
    advantages = []
    for group in groups:
        centered = _centered(group)
        advantages.append(centered / (np.sqrt(_mean(centered**2, group)) + _EPSILON))
    return advantages


def _centered(group: Group) -> FloatArray:
    """Return the reward minus the group's mean, shape [L]; exactly 0 if all rewards are equal."""
    if np.ptp(group.reward_L) == 0:  # the computed mean can differ from the rewards in the last bit
        return np.zeros_like(group.reward_L)
    return group.reward_L - _mean(group.reward_L, group)


def _mean(value_L: FloatArray, group: Group) -> float:
    """Return the mean over the group's rollouts, duplicates counted."""
    return float(np.average(value_L, weights=group.tree.leaf_count))


def rloo_weight(num_rollouts: int, num_correct: int) -> float:  # noqa: ARG001
    """Return N / (N - 1), which does not depend on c. The advantage is the reward minus the mean of the other rollouts.

    Source: arXiv 2402.14740, Eq. 5.
    """
    if num_rollouts < 2:
        raise ValueError("RLOO needs at least 2 rollouts per prompt")
    return num_rollouts / (num_rollouts - 1)


def reinforce_pp_baseline_weight(num_rollouts: int, num_correct: int) -> float:  # noqa: ARG001
    """Return 1: the advantage is the reward minus the group's mean, before normalization over the batch.

    Source: REINFORCE++ (arXiv 2501.03262, its baseline variant); BroRL (arXiv 2510.01180), section 4.
    """
    return 1.0


def grpo_weight(num_rollouts: int, num_correct: int) -> float:
    """Return 1 / std = N / sqrt(c (N - c)); 0 for groups that are not mixed.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if not 0 < num_correct < num_rollouts:
        return 0.0
    return num_rollouts / sqrt(num_correct * (num_rollouts - num_correct))


def pass_at_k_weight(num_rollouts: int, num_correct: int, k: int) -> float:
    """Return k N/(N-1) C(N-1-c, k-1) / C(N-2, k-1), unbiased for the gradient of pass@k, 1 <= k <= N - 1.

    Examples:
        >>> [pass_at_k_weight(num_rollouts=4, num_correct=c, k=3) for c in (1, 2, 3)]
        [4.0, 0.0, 0.0]

    Source: PKPO (arXiv 2505.15201), in the form centered on the group's mean.
    """
    if not 1 <= k < num_rollouts:
        raise ValueError(f"the gradient of pass@{k} needs more than {k} rollouts per prompt, got {num_rollouts}")
    fraction = comb(max(num_rollouts - 1 - num_correct, 0), k - 1) / comb(num_rollouts - 2, k - 1)
    return k * num_rollouts / (num_rollouts - 1) * fraction


def maxrl_weight(num_rollouts: int, num_correct: int, order: int | None = None) -> float:
    """Return N/c (1 - C(N-1-c, T) / C(N-1, T)), unbiased for the gradient of sum_{k<=T} pass@k / k; 0 at c = 0.

    The order T is capped at N - 1; None means N - 1. T = N - 1 gives 1/mean; for mixed groups T = 1 gives RLOO.

    Source: MaxRL (arXiv 2602.02710). The sum over W_k / k telescopes to this form for every T.
    """
    if num_rollouts < 2:
        raise ValueError("an outcome weight needs at least 2 rollouts per prompt")
    if order is not None and order < 1:
        raise ValueError(f"the order must be at least 1, got {order}")
    if num_correct == 0:
        return 0.0
    num_others = num_rollouts - 1
    drawn = num_others if order is None else min(order, num_others)
    missed = comb(max(num_others - num_correct, 0), drawn) / comb(num_others, drawn)
    return num_rollouts / num_correct * (1 - missed)
