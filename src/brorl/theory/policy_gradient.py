"""The mass balance of the estimators that trainers use: what N rollouts do to the correct mass Q_pos, draw by draw.

In: a softmax policy over V outcomes as probabilities, which of them are correct, and either the counts of one draw or
the number of rollouts N. Out: the change of Q_pos to first order in the learning rate, for that draw or as exact mean
and variance over draws. It refuses what `brorl.theory.mass_balance` refuses, and counts that are no counts.

All estimators take one step on L = -(1/N) sum_n A_n log p(y_n), y_n drawn independently from p at temperature 1; they
differ in the advantage A_n of a rollout with reward R_n:

    reinforce     A_n = R_n
    group_mean    A_n = R_n - mean(R)
    grpo          A_n = (R_n - mean(R)) / std(R), 0 where all rewards are equal

The std divides by N, and the small number that trainers add to it is left out; dividing by N - 1 instead is grpo with
the learning rate times sqrt((N - 1) / N).

RLOO is group_mean with the learning rate times N / (N - 1). REINFORCE++-baseline divides group_mean by one number for
the whole batch: group_mean with the learning rate over that number.

What this says about N. With a group mean no draw lowers the correct mass (to first order): N buys informative groups,
coverage and variance, not the sign. Without a baseline the mean is the same at every N and only the variance falls.
And more rollouts do not protect every correct outcome: see `lowered_by_exact_gradient`.

Notation: h the gradient of Q_pos in the logits, x = k / N the share of correct rollouts, a and b the mean probability
of the correct and of the incorrect rollouts, P_2 and N_2 the sums of p^2 over correct and incorrect outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from brorl.theory.mass_balance import (
    BoolArray,
    FloatArray,
    Outcomes,
    as_numpy,
    boolean_mask,
    check_num_rollouts,
    check_step,
)

Estimator = Literal["reinforce", "group_mean", "grpo"]
WithBaseline = Literal["group_mean", "grpo"]


@dataclass(frozen=True)
class MassChange:
    """First-order change of the correct mass in one step, over the draws of N rollouts.

    Attributes:
        expectation: Mean.
        variance: Variance.
    """

    expectation: float
    variance: float


def mass_change_of_draw(
    p: ArrayLike,
    correct: ArrayLike,
    count: ArrayLike,
    estimator: Estimator,
    *,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> float:
    """Return the first-order change of the correct mass in the step that one draw gives.

        reinforce     eta mean_n R_n (h(y_n) - sum_j p_j h_j)
        group_mean    eta (R_c - R_w) x (1 - x) (Q_neg a + Q_pos b)       >= 0
        grpo          eta sqrt(x (1 - x)) (Q_neg a + Q_pos b)             >= 0

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        count: How many of the N rollouts gave each outcome, shape [V].
        estimator: Which advantage.
        reward_correct: Reward of a correct rollout, R_c >= 0.
        reward_wrong: Reward of an incorrect rollout, R_w <= 0.
        learning_rate: Step size eta on the logits, > 0.

    Returns:
        The change; of the estimators with a baseline exactly 0 if the rollouts are all correct or all incorrect.

    Raises:
        ValueError: If an argument is outside what is stated above, or the estimator is not one of the three.

    Source: derived here from `brorl.theory.mass_balance.pooled_change`.
    """
    outcomes = Outcomes.of(p, correct)
    check_step(reward_correct, reward_wrong, learning_rate)
    _check_estimator(estimator, get_args(Estimator))
    draw = _Draw.of(outcomes.p_V, outcomes.correct_V, count)
    if estimator == "reinforce":
        reward_V = np.where(outcomes.correct_V, reward_correct, reward_wrong)
        return learning_rate * float(draw.share_V @ (reward_V * _score(outcomes)))
    pull = outcomes.q_neg * draw.mean_p_correct + outcomes.q_pos * draw.mean_p_wrong
    return learning_rate * draw.spread(estimator, reward_correct - reward_wrong) * pull


def mass_change(
    p: ArrayLike,
    correct: ArrayLike,
    num_rollouts: int,
    estimator: Estimator,
    *,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> MassChange:
    """Return the exact mean and variance of `mass_change_of_draw` over independent draws of N rollouts.

        reinforce     mean eta (R_c - R_w) |h|^2
        group_mean    mean eta (1 - 1/N) (R_c - R_w) |h|^2
        grpo          mean eta E[sqrt(x (1 - x))] |h|^2 / (Q_pos Q_neg)

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        num_rollouts: Number of rollouts N, >= 1; the two with a baseline sum over N + 1 cases.
        estimator: Which advantage.
        reward_correct: Reward of a correct rollout, R_c >= 0.
        reward_wrong: Reward of an incorrect rollout, R_w <= 0.
        learning_rate: Step size eta on the logits, > 0.

    Returns:
        Mean and variance.

    Raises:
        ValueError: If an argument is outside what is stated above, or the estimator is not one of the three.

    Source: derived here. With a baseline, the number of correct rollouts is binomial, and given it the correct and the
        incorrect rollouts are independent draws from p restricted to either.
    """
    outcomes = Outcomes.of(p, correct)
    check_step(reward_correct, reward_wrong, learning_rate)
    check_num_rollouts(num_rollouts)
    _check_estimator(estimator, get_args(Estimator))
    if estimator == "reinforce":
        reward_V = np.where(outcomes.correct_V, reward_correct, reward_wrong)
        change_V = learning_rate * reward_V * _score(outcomes)
        mean = learning_rate * (reward_correct - reward_wrong) * _squared_gradient(outcomes)
        return MassChange(mean, float(outcomes.p_V @ (change_V - mean) ** 2) / num_rollouts)
    if not (outcomes.q_pos and outcomes.q_neg):
        return MassChange(0.0, 0.0)
    chance_K, x_K = _binomial(outcomes, num_rollouts)
    spread_K = learning_rate * _spread(x_K, estimator, reward_correct - reward_wrong)
    return _over_draws(outcomes, chance_K, x_K, spread_K)


def squared_gradient(p: ArrayLike, correct: ArrayLike) -> float:
    """Return |h|^2 = Q_neg^2 P_2 + Q_pos^2 N_2, the squared norm of the gradient of Q_pos in the logits.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].

    Returns:
        The squared norm, in [0, 1/8].

    Raises:
        ValueError: If p or the mask is not what is stated above.
    """
    return _squared_gradient(Outcomes.of(p, correct))


def lowered_by_exact_gradient(p: ArrayLike, correct: ArrayLike) -> BoolArray:
    """Tell which correct outcomes even the exact gradient, the limit of infinitely many rollouts, lowers.

    They are the correct outcomes with p_i < P_2 - (Q_pos / Q_neg) N_2: softmax hands what the correct outcomes gain to
    the likely ones among them first. To first order in the learning rate, whatever it is.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].

    Returns:
        Mask, shape [V]; False for incorrect outcomes and where p is 0.

    Raises:
        ValueError: If p or the mask is not what is stated above.

    Source: derived here; it limits the reading of Figure 3 of BroRL (arXiv 2510.01180), where N = 51,200 raises all.
    """
    outcomes = Outcomes.of(p, correct)
    threshold = outcomes.q_neg * outcomes.p_2 - outcomes.q_pos * outcomes.n_2
    lowered_V: BoolArray = outcomes.correct_V & (outcomes.p_V > 0) & (outcomes.q_neg * outcomes.p_V < threshold)
    return lowered_V


def shrinkage_of_unsampled(
    p: ArrayLike,
    correct: ArrayLike,
    count: ArrayLike,
    estimator: WithBaseline = "group_mean",
    *,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> float:
    """Return the first-order change of the log-prob (nats) of every outcome that was not drawn, one number for all.

        group_mean    d log p_U = -eta (R_c - R_w) x (1 - x) (a - b)
        grpo          d log p_U = -eta sqrt(x (1 - x)) (a - b)

    It needs the drawn outcomes only. Negative where the correct rollouts were the likelier ones: correct outcomes that
    were not drawn then shrink by as much as incorrect ones.

    Args:
        p: Probabilities of L outcomes, among them all that were drawn, shape [L]; they need not add up to 1.
        correct: Boolean mask of the correct ones, shape [L].
        count: How many of the N rollouts gave each, shape [L].
        estimator: Which advantage, one with a baseline.
        reward_correct: Reward of a correct rollout, R_c >= 0.
        reward_wrong: Reward of an incorrect rollout, R_w <= 0.
        learning_rate: Step size eta on the logits, > 0.

    Returns:
        The change; 0 if the rollouts are all correct or all incorrect.

    Raises:
        ValueError: If an argument is outside what is stated above, or the estimator is not one of the two.

    Source: derived here.
    """
    _check_estimator(estimator, get_args(WithBaseline))  # without one, the change differs between the outcomes
    p_L = as_numpy(p)[0].astype(np.float64)
    if p_L.ndim != 1 or not ((p_L >= 0) & (p_L <= 1)).all():
        raise ValueError("p must be one row of probabilities between 0 and 1, shape [L]; apply exp to log-probs")
    check_step(reward_correct, reward_wrong, learning_rate)
    draw = _Draw.of(p_L, boolean_mask(correct, "correct", p_L.size), count)
    spread = draw.spread(estimator, reward_correct - reward_wrong)
    return -learning_rate * spread * (draw.mean_p_correct - draw.mean_p_wrong)


@dataclass(frozen=True, eq=False)
class _Draw:
    """The rollouts of one draw.

    Attributes:
        share_V: Share of the rollouts that gave each outcome, shape [V].
        share_correct: Share of correct rollouts, x.
        mean_p_correct: Mean probability of the correct rollouts, a; 0 if there is none.
        mean_p_wrong: Mean probability of the incorrect rollouts, b; 0 if there is none.
    """

    share_V: FloatArray
    share_correct: float
    mean_p_correct: float
    mean_p_wrong: float

    @classmethod
    def of(cls, p_V: FloatArray, correct_V: BoolArray, count: ArrayLike) -> _Draw:
        count_V, dtype = as_numpy(count)
        if count_V.shape != p_V.shape or count_V.dtype.kind not in "fiu":
            raise ValueError(
                f"count must hold {p_V.size} whole numbers, one per outcome, got {dtype} of shape {count_V.shape}; "
                f"count the rollouts that gave each outcome"
            )
        count_V = count_V.astype(np.float64)
        if not (np.isfinite(count_V) & (count_V >= 0) & (count_V == np.floor(count_V))).all() or not count_V.any():
            raise ValueError("count must hold whole numbers >= 0, not all 0; count the rollouts that gave each outcome")
        num_correct, num_wrong = float(count_V[correct_V].sum()), float(count_V[~correct_V].sum())
        sum_p_correct = float(count_V[correct_V] @ p_V[correct_V])
        sum_p_wrong = float(count_V[~correct_V] @ p_V[~correct_V])
        return cls(
            share_V=count_V / (num_correct + num_wrong),
            share_correct=num_correct / (num_correct + num_wrong),
            mean_p_correct=sum_p_correct / max(num_correct, 1),
            mean_p_wrong=sum_p_wrong / max(num_wrong, 1),
        )

    def spread(self, estimator: WithBaseline, reward_range: float) -> float:
        """Return `_spread` of this draw."""
        return float(_spread(np.asarray(self.share_correct), estimator, reward_range))


def _squared_gradient(outcomes: Outcomes) -> float:
    return outcomes.q_neg**2 * outcomes.p_2 + outcomes.q_pos**2 * outcomes.n_2


def _score(outcomes: Outcomes) -> FloatArray:
    """Change of Q_pos per unit of advantage of a rollout, h(y) - sum_j p_j h_j, shape [V]; its mean under p is 0."""
    gradient_V = outcomes.p_V * np.where(outcomes.correct_V, outcomes.q_neg, -outcomes.q_pos)
    score_V: FloatArray = gradient_V - (outcomes.q_neg * outcomes.p_2 - outcomes.q_pos * outcomes.n_2)
    return score_V


def _spread(x_K: FloatArray, estimator: WithBaseline, reward_range: float) -> FloatArray:
    """Mean over the rollouts of A_n (c_n - x), c_n whether rollout n is correct: what multiplies Q_neg a + Q_pos b."""
    variance_K = x_K * (1 - x_K)
    if estimator == "group_mean":
        return reward_range * variance_K
    return np.sqrt(variance_K) if reward_range else np.zeros_like(variance_K)


def _binomial(outcomes: Outcomes, num_rollouts: int) -> tuple[FloatArray, FloatArray]:
    """Return the chance of k = 0 .. N correct rollouts, and k / N, each of shape [N + 1]."""
    k_K = np.arange(num_rollouts + 1)
    if outcomes.q_pos <= outcomes.q_neg:
        chance_K = binom.pmf(k_K, num_rollouts, outcomes.q_pos)
    else:  # from the smaller mass, whose distance from 0 survives rounding
        chance_K = binom.pmf(num_rollouts - k_K, num_rollouts, outcomes.q_neg)
    return chance_K, k_K / num_rollouts


def _over_draws(outcomes: Outcomes, chance_K: FloatArray, x_K: FloatArray, spread_K: FloatArray) -> MassChange:
    """Mean and variance of spread * (Q_neg a + Q_pos b), by the number of correct rollouts k = 0 .. N.

    Given k, a and b are independent means of k and N - k draws of p, from p restricted to the correct and to the
    incorrect outcomes.
    """
    mean_a, variance_a = _restricted_moments(outcomes.p_V[outcomes.correct_V])
    mean_b, variance_b = _restricted_moments(outcomes.p_V[~outcomes.correct_V])
    num_rollouts = x_K.size - 1
    num_correct_K, num_wrong_K = np.maximum(num_rollouts * x_K, 1), np.maximum(num_rollouts * (1 - x_K), 1)
    pull = outcomes.q_neg * mean_a + outcomes.q_pos * mean_b
    pull_variance_K = outcomes.q_neg**2 * variance_a / num_correct_K + outcomes.q_pos**2 * variance_b / num_wrong_K
    mean_spread = chance_K @ spread_K
    between = pull**2 * (chance_K @ (spread_K - mean_spread) ** 2)
    within = chance_K @ (spread_K**2 * pull_variance_K)  # no rollout of one kind: the spread is 0
    return MassChange(float(mean_spread * pull), float(between + within))


def _restricted_moments(p_R: FloatArray) -> tuple[float, float]:
    """Mean and variance of p(y) for y drawn from p restricted to some outcomes, whose probabilities are given."""
    weight_R = p_R / p_R.sum()
    mean = float(weight_R @ p_R)
    return mean, float(weight_R @ (p_R - mean) ** 2)


def _check_estimator(estimator: str, known: tuple[str, ...]) -> None:
    if estimator not in known:
        raise ValueError(f"estimator must be one of {', '.join(known)}, got {estimator!r}; choose one of them")
