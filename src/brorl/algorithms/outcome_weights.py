"""Outcome weights: how much a prompt counts, from its N rollouts and the c correct ones among them.

An advantage that depends on outcomes alone and adds up to 0 is A_i = w(N, c) (r_i - c/N), with r_i in {0, 1} and c the
sum of r_i. It never prefers one correct response to another; it only reweights prompts. The weight w decides which
objective is maximized. This module is the table of weights, one function each:

| weight | w(N, c) | E[(1/N) sum_i A_i grad log pi(y_i)] is the gradient of |
|---|---|---|
| `rloo` | N / (N-1) | pass@1 |
| `reinforce_pp_baseline` | 1 | (1 - 1/N) pass@1, before the batch's scale |
| `grpo` | N / sqrt(c (N-c)) | an objective that depends on N; about 2 arcsin(sqrt(pass@1)) for large N |
| `pass_at_k` | k N/(N-1) C(N-1-c, k-1) / C(N-2, k-1) | pass@k |
| `maxrl` | N/c (1 - C(N-1-c, T) / C(N-1, T)) | sum_{k<=T} pass@k / k; for large T that of log pass@1 |

With W_k the weight of pass@k, `maxrl` is sum_{k<=T} W_k / k.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, sqrt

OutcomeWeight = Callable[[int, int], float]
"""From N rollouts and c correct ones, 0 to N, to the weight of the group."""


def rloo(num_rollouts: int, num_correct: int) -> float:  # noqa: ARG001
    """N / (N - 1), whatever c: reward minus the mean of the other rollouts; N is at least 2.

    Source: arXiv 2402.14740, Eq. 5.
    """
    if num_rollouts < 2:
        raise ValueError("RLOO needs at least 2 rollouts per prompt")
    return num_rollouts / (num_rollouts - 1)


def reinforce_pp_baseline(num_rollouts: int, num_correct: int) -> float:  # noqa: ARG001
    """Return 1: reward minus the group's mean. Its advantages are then normalized over the batch.

    Source: REINFORCE++ (arXiv 2501.03262, its baseline variant); BroRL (arXiv 2510.01180), section 4.
    """
    return 1.0


def grpo(num_rollouts: int, num_correct: int) -> float:
    """1 / std = N / sqrt(c (N - c)); 0 for groups that are not mixed.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if not 0 < num_correct < num_rollouts:
        return 0.0
    return num_rollouts / sqrt(num_correct * (num_rollouts - num_correct))


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Return k N/(N-1) C(N-1-c, k-1) / C(N-2, k-1): without bias for the gradient of pass@k, 1 <= k <= N - 1.

    Source: PKPO (arXiv 2505.15201), in the form that is centered on the group's mean.
    """
    if not 1 <= k < num_rollouts:
        raise ValueError(f"the gradient of pass@{k} needs more than {k} rollouts per prompt, got {num_rollouts}")
    fraction = comb(max(num_rollouts - 1 - num_correct, 0), k - 1) / comb(num_rollouts - 2, k - 1)
    return k * num_rollouts / (num_rollouts - 1) * fraction


def maxrl(num_rollouts: int, num_correct: int, order: int | None = None) -> float:
    """N/c (1 - C(N-1-c, T) / C(N-1, T)): without bias for the gradient of sum_{k<=T} pass@k / k; 0 at c = 0.

    T = N-1 is 1/mean. For mixed groups T = 1 is RLOO. An order of None, or above N - 1, is N - 1: a group cannot have a
    higher one.

    Source: MaxRL (arXiv 2602.02710). The sum over W_k / k telescopes to this form for every T.
    """
    if num_rollouts < 2:
        raise ValueError("an outcome weight needs at least 2 rollouts per prompt")
    if order is not None and order < 1:
        raise ValueError(f"the order must be at least 1, got {order}")
    if num_correct == 0:
        return 0.0
    others = num_rollouts - 1
    drawn = others if order is None else min(order, others)
    missed = comb(max(others - num_correct, 0), drawn) / comb(others, drawn)
    return num_rollouts / num_correct * (1 - missed)
