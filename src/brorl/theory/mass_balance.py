"""Mass balance: how one policy-gradient step changes Q_pos, the total probability of the correct outcomes.

Theorem 1 of BroRL splits the change, to first order in the learning rate, into its sources; the higher orders have a
bound. It holds for a tabular softmax with one free logit per outcome (a token, or a whole response), and for samples
drawn independently from the policy at temperature 1. Its surrogate sums over the distinct sampled outcomes. The
estimators that trainers use, with counts and baselines, are in `tests/theory`.

The surrogate has the factor 1/N, so at a fixed learning rate the whole change vanishes as N grows. Compare numbers of
rollouts by the sign and the fractions of the terms, not by the size of the total.

Notation: P are the correct outcomes, A the sampled correct ones, B the sampled incorrect ones, U the unsampled ones. A
mass is a sum of p, a second moment is a sum of p^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import BoolArray, FloatArray


@dataclass(frozen=True)
class MassBalance:
    """The first-order change of the correct mass in one step on Theorem 1's surrogate, and its parts."""

    sampled_correct_term: float  # contribution of the sampled correct outcomes, >= 0
    sampled_wrong_term: float  # contribution of the sampled incorrect outcomes, >= 0
    unsampled_term: float  # contribution of the unsampled outcomes (the unsampled coupling), of either sign
    q_pos: float  # mass of the correct outcomes
    q_neg: float  # mass of the incorrect outcomes
    s_r: float  # S_R, the mean reward under the policy if unsampled outcomes have the reward 0
    p_pos: float  # mass of the sampled correct outcomes
    p_neg: float  # mass of the sampled incorrect outcomes
    a_2: float  # second moment of the sampled correct outcomes
    b_2: float  # second moment of the sampled incorrect outcomes
    u_pos_2: float  # second moment of the unsampled correct outcomes
    u_neg_2: float  # second moment of the unsampled incorrect outcomes
    remainder_bound: float  # the real change differs from `total` by at most this

    @property
    def total(self) -> float:
        """The first-order change: the sum of the three terms."""
        return self.sampled_correct_term + self.sampled_wrong_term + self.unsampled_term


def mass_balance(
    p_V: FloatArray,
    correct_V: BoolArray,
    sampled_V: BoolArray,
    num_rollouts: int,
    *,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> MassBalance:
    """Split the first-order change of the correct mass into sampled correct, sampled wrong and unsampled outcomes.

        dQ_pos = (eta / N) [(R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2)]

    The step is dz_j = (eta / N) p_j (R_j - S_R), one gradient step on L = -(1/N) sum_j R_j p_j. R_j is 0 for unsampled
    outcomes. An outcome counts once, however often it was drawn.

    Args:
        p_V: The policy before the step, probabilities that add up to 1, shape [V].
        correct_V: Whether each outcome is correct, shape [V].
        sampled_V: Whether each outcome was drawn at least once, shape [V].
        num_rollouts: Number of rollouts N, duplicates counted, >= 1.
        reward_correct: Reward of a correct rollout, R_c >= 0.
        reward_wrong: Reward of an incorrect rollout, R_w <= 0.
        learning_rate: Step size eta, > 0.

    Returns:
        The terms, their factors, and the bound eta^2 p_max^2 (R_c - R_w)^2 / (8 N^2) on the remainder.

    Source: BroRL (arXiv 2510.01180), Theorem 1, Eq. 1 and Eq. C.1. The remainder's bound is not in the paper: along any
        step dz, the second derivative of Q_pos is the mean of (1[in P] - Q_pos)(dz - mean dz)^2, at most the variance
        of dz, at most its range^2 / 4, and the range of this step is at most (eta / N) p_max (R_c - R_w).
    """
    scale = learning_rate / num_rollouts
    square_V, hit_V, wrong_hit_V = p_V**2, sampled_V & correct_V, sampled_V & ~correct_V
    q_pos, q_neg, p_pos, p_neg = (float(p_V[mask_V].sum()) for mask_V in (correct_V, ~correct_V, hit_V, wrong_hit_V))
    a_2, b_2, u_pos_2, u_neg_2 = (
        float(square_V[mask_V].sum())
        for mask_V in (hit_V, wrong_hit_V, ~sampled_V & correct_V, ~sampled_V & ~correct_V)
    )
    s_r = reward_correct * p_pos + reward_wrong * p_neg
    # R_c - S_R and S_R - R_w as sums of nonnegative numbers: no cancellation, and no wrong sign by rounding.
    above = reward_correct * float(p_V[~hit_V].sum()) - reward_wrong * p_neg
    below = reward_correct * p_pos - reward_wrong * float(p_V[~wrong_hit_V].sum())
    return MassBalance(
        sampled_correct_term=scale * above * q_neg * a_2,
        sampled_wrong_term=scale * below * q_pos * b_2,
        unsampled_term=scale * s_r * (q_pos * u_neg_2 - q_neg * u_pos_2),
        q_pos=q_pos,
        q_neg=q_neg,
        s_r=s_r,
        p_pos=p_pos,
        p_neg=p_neg,
        a_2=a_2,
        b_2=b_2,
        u_pos_2=u_pos_2,
        u_neg_2=u_neg_2,
        remainder_bound=(scale * float(p_V.max()) * (reward_correct - reward_wrong)) ** 2 / 8,
    )


_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rollouts of one prompt (L distinct ones among H) before and after an update."""

    count_L: NDArray[np.int64]  # number of rollouts that gave each distinct response, shape [L]; the sum is H >= 2
    correct_L: NDArray[np.bool_]  # verdict of each distinct response, shape [L]
    old_logprob_L: FloatArray  # log-prob (nats) of each whole response under the policy that sampled it, shape [L]
    new_logprob_L: FloatArray  # log-prob (nats) of each whole response after the update, shape [L]
    baseline: float  # any number that does not depend on these rollouts; the pass rate makes the variance small


@dataclass(frozen=True)
class HeldOutCheck:
    """The effect of an update on the probability of correct responses; intervals are 95%."""

    # estimate of the change of Q_pos, mean over the prompts; None where a weight is too large for a float
    change: float | None
    change_low: float | None  # lower end of the interval of `change` (normal, from the variance within each prompt)
    change_high: float | None  # upper end; both ends are None if `change` is
    fraction_improved: float | None  # fraction of the correct mass that rose; None without a correct held-out rollout
    fraction_improved_low: float  # lower end of the interval of `fraction_improved` (exact binomial)
    fraction_improved_high: float  # upper end
    worst_drop: float | None  # largest fall of a correct held-out response's probability, <= 0; None without one
    # smallest log(new / old probability) of a correct held-out response; None without one
    worst_log_ratio: float | None
    num_prompts: int
    num_rollouts: int  # held-out rollouts of all prompts
    num_correct: int  # correct held-out rollouts
    # (sum w)^2 / (H sum w^2) of the weights w = new / old over all held-out rollouts. Far below 1, a few
    # rollouts dominate the estimate, and its interval is not reliable.
    effective_fraction: float


def check_on_held_out(held_out: Sequence[HeldOut]) -> HeldOutCheck:
    """Estimate how much an update changed Q_pos, from rollouts that the update was not trained on.

    Rollouts that it was trained on would overestimate the change.

        w = pi_new(y) / pi_old(y),   dQ_hat = mean over held-out rollouts of (r - b)(w - 1)

    Here r is 1 for a correct response and 0 otherwise, and b is the baseline. The estimate is unbiased for the real
    change, because E[w - 1] = 0 and E[r w] = Q_new. The rollouts must be independent draws from the distribution of the
    old log-probs. With top-p or top-k, E[w - 1] is 0 up to the mass of tokens that only one of the policies keeps.

    Raises:
        ValueError: If there is no prompt, or if a prompt has fewer than 2 rollouts.
    """
    if not held_out or any(h.count_L.sum() < 2 for h in held_out):
        raise ValueError("a held-out check needs at least one prompt and at least 2 held-out rollouts of each")
    with np.errstate(over="ignore", invalid="ignore"):  # a long response may become e^709 times as probable
        moments = np.array([_mean_and_variance(h) for h in held_out])
        change = float(moments[:, 0].mean())
        half_width = _NORMAL_95 * float(np.sqrt(moments[:, 1].sum())) / len(held_out)
    finite = bool(np.isfinite(change) and np.isfinite(half_width))

    count, correct, old, new = (
        np.concatenate([getattr(h, name) for h in held_out])
        for name in ("count_L", "correct_L", "old_logprob_L", "new_logprob_L")
    )
    log_ratio_A, count_A = (new - old)[correct], count[correct]
    num_correct, num_risen = int(count_A.sum()), int(count_A[log_ratio_A > 0].sum())
    low, high = binomial_interval(num_risen, num_correct)
    weight = np.exp(new - old - (new - old).max())  # up to a factor that cancels in the effective fraction
    return HeldOutCheck(
        change=change if finite else None,
        change_low=change - half_width if finite else None,
        change_high=change + half_width if finite else None,
        fraction_improved=num_risen / num_correct if num_correct else None,
        fraction_improved_low=low,
        fraction_improved_high=high,
        worst_drop=min(0.0, float((np.exp(new) - np.exp(old))[correct].min())) if num_correct else None,
        worst_log_ratio=float(log_ratio_A.min()) if num_correct else None,
        num_prompts=len(held_out),
        num_rollouts=int(count.sum()),
        num_correct=num_correct,
        effective_fraction=float((count @ weight) ** 2 / (count.sum() * (count @ weight**2))),
    )


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact 95% interval of the probability of a success: it covers at least 95%; (0, 1) without trials.

    Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    from scipy.special import betaincinv

    low = float(betaincinv(successes, trials - successes + 1, 0.025)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 0.975)) if successes < trials else 1.0
    return low, high


def _mean_and_variance(held_out: HeldOut) -> tuple[float, float]:
    """Return the mean of (r - b)(w - 1) over one prompt's rollouts, and the estimated variance of that mean."""
    value_L = (held_out.correct_L - held_out.baseline) * np.expm1(held_out.new_logprob_L - held_out.old_logprob_L)
    size = int(held_out.count_L.sum())
    mean = float(held_out.count_L @ value_L) / size
    return mean, float(held_out.count_L @ (value_L - mean) ** 2) / (size - 1) / size
