"""The mass balance of the estimators that trainers use: the change of the correct mass Q_pos by N rollouts.

The change of Q_pos, to first order in the learning rate, is that of one draw or its exact mean and variance over draws.

All estimators take one step on L = -(1/N) sum_n A_n log p(y_n), y_n drawn independently from p at temperature 1; they
differ in the advantage A_n of a rollout with reward R_n:

    reinforce     A_n = R_n
    group_mean    A_n = R_n - mean(R)
    grpo          A_n = (R_n - mean(R)) / std(R), 0 where all rewards are equal

The std divides by N, without the small constant that trainers add to it; dividing by N - 1 instead is grpo with the
learning rate times sqrt((N - 1) / N).

RLOO is group_mean with the learning rate times N / (N - 1). REINFORCE++-baseline divides group_mean by one number for
the whole batch: group_mean with the learning rate over that number.

Consequences for N. With a group mean no draw lowers the correct mass (to first order): a larger N gives more mixed
groups, more coverage and less variance, not another sign. Without a baseline the mean is the same at every N and only
the variance falls. More rollouts do not protect every correct outcome: see `lowered_by_exact_gradient`.

Notation: h the gradient of Q_pos in the logits, x = k / N the fraction of correct rollouts, a and b the mean
probability of the correct and of the incorrect rollouts, P_2 and N_2 the sums of p^2 over correct and incorrect
outcomes.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from brorl.theory.mass_balance import (
    UNIT_STEP,
    GradientStep,
    Outcomes,
    boolean_mask,
    check_num_rollouts,
)
from brorl.tree import BoolArray, FloatArray

Estimator = Literal["reinforce", "group_mean", "grpo"]
WithBaseline = Literal["group_mean", "grpo"]


def mass_change_of_draw(
    outcomes: Outcomes, count: ArrayLike, estimator: Estimator, step: GradientStep = UNIT_STEP
) -> float:
    """Return the first-order change of the correct mass in the step of one draw.

        reinforce     eta mean_n R_n (h(y_n) - sum_j p_j h_j)
        group_mean    eta (R_c - R_w) x (1 - x) (Q_neg a + Q_pos b)       >= 0
        grpo          eta sqrt(x (1 - x)) (Q_neg a + Q_pos b)             >= 0

    Args:
        outcomes: The policy before the step.
        count: Number of the N rollouts that gave each outcome, whole, >= 0, not all 0, shape [V].
        estimator: The advantage estimator.
        step: Rewards and learning rate.

    Returns:
        The change. The estimators with a baseline give exactly 0 if the rollouts are all correct or all incorrect.

    Raises:
        ValueError: If the counts or the estimator are invalid.

    Source: derived here from `brorl.theory.mass_balance.pooled_change`.
    """
    _check_estimator(estimator, get_args(Estimator))
    count_V = _checked(count, outcomes.p_V.size)
    if estimator == "reinforce":
        return float(count_V / count_V.sum() @ _reinforce_change(outcomes, step))
    x, a, b = _means(outcomes.p_V, outcomes.correct_V, count_V)
    pull = outcomes.q_neg * a + outcomes.q_pos * b
    return step.learning_rate * float(_spread(np.asarray(x), estimator, step)) * pull


def mass_change(
    outcomes: Outcomes, num_rollouts: int, estimator: Estimator, step: GradientStep = UNIT_STEP
) -> tuple[float, float]:
    """Return the exact mean and variance of `mass_change_of_draw` over independent draws of N rollouts.

        reinforce     mean eta (R_c - R_w) |h|^2
        group_mean    mean eta (1 - 1/N) (R_c - R_w) |h|^2
        grpo          mean eta E[sqrt(x (1 - x))] |h|^2 / (Q_pos Q_neg)

    Args:
        outcomes: The policy before the step.
        num_rollouts: Number of rollouts N, >= 1; the two estimators with a baseline sum over N + 1 cases.
        estimator: The advantage estimator.
        step: Rewards and learning rate.

    Returns:
        The mean and the variance.

    Raises:
        ValueError: If the number of rollouts or the estimator is invalid.

    Source: derived here. With a baseline, the number of correct rollouts is binomial, and given it the correct and the
        incorrect rollouts are independent draws from p restricted to either.
    """
    check_num_rollouts(num_rollouts)
    _check_estimator(estimator, get_args(Estimator))
    if estimator == "reinforce":
        mean = step.learning_rate * step.reward_range * outcomes.squared_gradient
        change_V = _reinforce_change(outcomes, step)
        return mean, float(outcomes.p_V @ (change_V - mean) ** 2) / num_rollouts
    if not (outcomes.q_pos and outcomes.q_neg):
        return 0.0, 0.0
    k_K = np.arange(num_rollouts + 1)
    if outcomes.q_pos <= outcomes.q_neg:
        chance_K = binom.pmf(k_K, num_rollouts, outcomes.q_pos)
    else:  # from the smaller mass, whose distance from 0 survives rounding
        chance_K = binom.pmf(num_rollouts - k_K, num_rollouts, outcomes.q_neg)
    # Given k, a and b are independent means of k and N - k draws of p, restricted to correct and incorrect outcomes.
    spread_K = step.learning_rate * _spread(k_K / num_rollouts, estimator, step)
    mean_a, variance_a = _restricted_moments(outcomes.p_V[outcomes.correct_V])
    mean_b, variance_b = _restricted_moments(outcomes.p_V[~outcomes.correct_V])
    pull = outcomes.q_neg * mean_a + outcomes.q_pos * mean_b
    pull_variance_K = outcomes.q_neg**2 * variance_a / np.maximum(k_K, 1)
    pull_variance_K += outcomes.q_pos**2 * variance_b / np.maximum(num_rollouts - k_K, 1)
    mean_spread = chance_K @ spread_K
    between = pull**2 * (chance_K @ (spread_K - mean_spread) ** 2)
    within = chance_K @ (spread_K**2 * pull_variance_K)  # the spread is 0 where all rollouts are of one kind
    return float(mean_spread * pull), float(between + within)


def lowered_by_exact_gradient(outcomes: Outcomes) -> BoolArray:
    """Return which correct outcomes the exact gradient, the limit of infinitely many rollouts, lowers.

    They are the correct outcomes with p_i < P_2 - (Q_pos / Q_neg) N_2: softmax gives the gain of the correct outcomes
    to the likely ones among them first. To first order this holds at any learning rate.

    Returns:
        Mask, shape [V]; False for incorrect outcomes and where p is 0.

    Source: derived here; it limits the reading of Figure 3 of BroRL (arXiv 2510.01180), where N = 51,200 raises all.
    """
    threshold = outcomes.q_neg * outcomes.p_2 - outcomes.q_pos * outcomes.n_2
    lowered_V: BoolArray = outcomes.correct_V & (outcomes.p_V > 0) & (outcomes.q_neg * outcomes.p_V < threshold)
    return lowered_V


def shrinkage_of_unsampled(
    p: ArrayLike,
    correct: ArrayLike,
    count: ArrayLike,
    estimator: WithBaseline = "group_mean",
    step: GradientStep = UNIT_STEP,
) -> float:
    """Return the first-order change of the log-prob (nats) of an outcome that was not drawn, the same for each.

        group_mean    d log p_U = -eta (R_c - R_w) x (1 - x) (a - b)
        grpo          d log p_U = -eta sqrt(x (1 - x)) (a - b)

    It needs the drawn outcomes only. Negative where the correct rollouts were the likelier ones: correct outcomes that
    were not drawn then shrink by as much as incorrect ones.

    Args:
        p: Probabilities of L outcomes, including all that were drawn, shape [L]; they need not add up to 1.
        correct: Boolean mask of the correct ones, shape [L].
        count: Number of the N rollouts that gave each, whole, >= 0, not all 0, shape [L].
        estimator: The advantage estimator, one with a baseline.
        step: Rewards and learning rate.

    Returns:
        The change; 0 if the rollouts are all correct or all incorrect.

    Raises:
        ValueError: If an argument is outside the ranges above, or the estimator is not one of the two.

    Source: derived here.
    """
    _check_estimator(estimator, get_args(WithBaseline))  # without a baseline the change differs between the outcomes
    p_L = np.asarray(p, np.float64)
    if p_L.ndim != 1 or not ((p_L >= 0) & (p_L <= 1)).all():
        raise ValueError("p must be one row of probabilities between 0 and 1, shape [L]; apply exp to log-probs")
    x, a, b = _means(p_L, boolean_mask(correct, "correct", p_L.size), _checked(count, p_L.size))
    return -step.learning_rate * float(_spread(np.asarray(x), estimator, step)) * (a - b)


def _checked(count: ArrayLike, size: int) -> FloatArray:
    """Return the count of each outcome as float64, shape [V]."""
    count_V = np.asarray(count)
    if count_V.shape != (size,) or count_V.dtype.kind not in "fiu":
        raise ValueError(
            f"count must contain {size} whole numbers, one per outcome, got {count_V.dtype} of shape {count_V.shape}; "
            "count the rollouts that gave each outcome"
        )
    count_V = count_V.astype(np.float64)
    if not (np.isfinite(count_V) & (count_V >= 0) & (count_V == np.floor(count_V))).all() or not count_V.any():
        raise ValueError("count must contain whole numbers >= 0, not all 0; count the rollouts that gave each outcome")
    return count_V


def _means(p_V: FloatArray, correct_V: BoolArray, count_V: FloatArray) -> tuple[float, float, float]:
    """Return x, a and b of a draw; a or b is 0 without a rollout of its kind."""
    num_correct, num_wrong = float(count_V[correct_V].sum()), float(count_V[~correct_V].sum())
    mean_p_correct = float(count_V[correct_V] @ p_V[correct_V]) / max(num_correct, 1)
    mean_p_wrong = float(count_V[~correct_V] @ p_V[~correct_V]) / max(num_wrong, 1)
    return num_correct / (num_correct + num_wrong), mean_p_correct, mean_p_wrong


def _reinforce_change(outcomes: Outcomes, step: GradientStep) -> FloatArray:
    """Return the change of Q_pos by each outcome as the only rollout, eta R(y) (h(y) - sum_j p_j h_j), shape [V]."""
    gradient_V = outcomes.p_V * np.where(outcomes.correct_V, outcomes.q_neg, -outcomes.q_pos)
    score_V = gradient_V - (outcomes.q_neg * outcomes.p_2 - outcomes.q_pos * outcomes.n_2)
    reward_V = np.where(outcomes.correct_V, step.reward_correct, step.reward_wrong)
    change_V: FloatArray = step.learning_rate * reward_V * score_V
    return change_V


def _spread(x_K: FloatArray, estimator: WithBaseline, step: GradientStep) -> FloatArray:
    """Return the factor of Q_neg a + Q_pos b: the mean of A_n (c_n - x), where c_n is 1 for a correct rollout."""
    variance_K = x_K * (1 - x_K)
    if estimator == "group_mean":
        return step.reward_range * variance_K
    return np.sqrt(variance_K) if step.reward_range else np.zeros_like(variance_K)


def _restricted_moments(p_R: FloatArray) -> tuple[float, float]:
    """Return mean and variance of p(y) for y drawn from p restricted to outcomes with these probabilities."""
    weight_R = p_R / p_R.sum()
    mean = float(weight_R @ p_R)
    return mean, float(weight_R @ (p_R - mean) ** 2)


def _check_estimator(estimator: str, known: tuple[str, ...]) -> None:
    if estimator not in known:
        raise ValueError(f"estimator must be one of {', '.join(known)}, got {estimator!r}; choose one of them")
