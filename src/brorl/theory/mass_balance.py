"""Mass balance: the change of the total probability of the correct outcomes in one policy-gradient step.

The change of the correct mass Q_pos, to first order in the learning rate, is split into its sources, with a bound on
the higher orders. All of it holds for a tabular softmax, one free logit per outcome (a token, or a whole response), and
samples drawn independently from the policy at temperature 1. Theorem 1 is about a surrogate that sums over the distinct
sampled outcomes. The estimators that trainers use, with counts and baselines, are in `tests/theory`.

The surrogate's 1/N is part of its step: at a fixed learning rate the whole change vanishes as N grows. Compare numbers
of rollouts by the sign and the fractions of the terms, not by the size of the total.

Notation: P the correct outcomes, A the sampled correct ones, B the sampled incorrect ones, U the unsampled ones; a mass
is a sum of p, a second moment a sum of p^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brorl.arrays import BoolArray, FloatArray


@dataclass(frozen=True, eq=False)
class Outcomes:
    """A policy over V outcomes with their verdicts, checked; made by `Outcomes.of`."""

    p_V: FloatArray  # probabilities in float64, divided by their sum, shape [V]
    correct_V: BoolArray  # whether each outcome is correct, shape [V]

    @classmethod
    def of(cls, p: ArrayLike, correct: ArrayLike) -> Outcomes:
        """Check and convert.

        Args:
            p: Probabilities, shape [V], of any float type; their sum may differ from 1 by the square root of its
                precision.
            correct: Boolean mask, shape [V].

        Raises:
            ValueError: If p is not a probability vector, or the mask is not boolean or has another shape.
        """
        p_V = np.asarray(p)
        if p_V.dtype.kind != "f":
            raise ValueError(f"p must contain floats, got {p_V.dtype}; convert it to float64")
        precision, p_V = p_V.dtype, p_V.astype(np.float64)
        if p_V.ndim != 1 or not p_V.size:
            raise ValueError(f"p must be one row of probabilities, shape [V], got shape {p_V.shape}; pass one prompt")
        if not np.isfinite(p_V).all() or (p_V < 0).any():
            raise ValueError("p must contain finite probabilities >= 0; apply softmax to logits, exp to log-probs")
        total, tolerance = float(p_V.sum()), sqrt(np.finfo(precision).eps)
        if abs(total - 1) > tolerance:
            raise ValueError(
                f"p must add up to 1 within {tolerance:.1g} ({precision}), got {total:.9g}; divide it by its sum"
            )
        return cls(p_V / total, boolean_mask(correct, "correct", p_V.size))

    @cached_property
    def q_pos(self) -> float:
        """Mass of the correct outcomes, Q_pos."""
        return _mass(self.p_V, self.correct_V)

    @cached_property
    def q_neg(self) -> float:
        """Mass of the incorrect outcomes, Q_neg; summed, not 1 - Q_pos, so a small one is exact."""
        return _mass(self.p_V, ~self.correct_V)

    @cached_property
    def p_2(self) -> float:
        """Second moment of the correct outcomes, P_2."""
        return _mass(self.p_V**2, self.correct_V)

    @cached_property
    def n_2(self) -> float:
        """Second moment of the incorrect outcomes, N_2."""
        return _mass(self.p_V**2, ~self.correct_V)


@dataclass(frozen=True)
class GradientStep:
    """Rewards and size of one gradient step on the logits."""

    reward_correct: float = 1.0  # reward of a correct rollout, R_c >= 0
    reward_wrong: float = -1.0  # reward of an incorrect rollout, R_w <= 0
    learning_rate: float = 1.0  # step size eta, > 0

    def __post_init__(self) -> None:
        if not (inf > self.reward_correct >= 0 >= self.reward_wrong > -inf):
            raise ValueError(
                f"rewards must be finite with reward_correct >= 0 >= reward_wrong, "
                f"got {self.reward_correct} and {self.reward_wrong}; subtract a baseline between them first"
            )
        if not 0 < self.learning_rate < inf:
            raise ValueError(
                f"learning_rate must be positive and finite, got {self.learning_rate}; give the step on the logits"
            )

    @property
    def reward_range(self) -> float:
        """R_c - R_w."""
        return self.reward_correct - self.reward_wrong


UNIT_STEP = GradientStep()


@dataclass(frozen=True)
class MassBalance:
    """The first-order change of the correct mass in one step of Theorem 1's surrogate, and its parts."""

    sampled_correct_term: float  # contribution of the sampled correct outcomes, >= 0
    sampled_wrong_term: float  # contribution of the sampled incorrect outcomes, >= 0
    unsampled_term: float  # contribution of the outcomes that were not sampled, of either sign: the unsampled coupling
    q_pos: float  # mass of the correct outcomes
    q_neg: float  # mass of the incorrect outcomes
    s_r: float  # mean reward under the policy, 0 for unsampled outcomes, S_R
    p_pos: float  # mass of the sampled correct outcomes
    p_neg: float  # mass of the sampled incorrect outcomes
    a_2: float  # second moment of the sampled correct outcomes
    b_2: float  # second moment of the sampled incorrect outcomes
    u_pos_2: float  # second moment of the unsampled correct outcomes
    u_neg_2: float  # second moment of the unsampled incorrect outcomes
    remainder_bound: float  # largest distance between the real change of the finite step and `total`

    @property
    def total(self) -> float:
        """The first-order change: the sum of the three terms."""
        return self.sampled_correct_term + self.sampled_wrong_term + self.unsampled_term


def mass_balance(
    outcomes: Outcomes, sampled: ArrayLike, num_rollouts: int, step: GradientStep = UNIT_STEP
) -> MassBalance:
    """Split the first-order change of the correct mass into sampled correct, sampled wrong and unsampled outcomes.

        dQ_pos = (eta / N) [(R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2)]

    The step is dz_j = (eta / N) p_j (R_j - S_R), one gradient step on L = -(1/N) sum_j R_j p_j, where R_j is 0 for
    unsampled outcomes: an outcome counts once, however often it was drawn.

    Args:
        outcomes: The policy before the step.
        sampled: Boolean mask of the outcomes that were drawn at least once, shape [V].
        num_rollouts: Number of rollouts N, duplicates counted, >= 1.
        step: Rewards and learning rate.

    Returns:
        The terms, their factors, and the bound eta^2 p_max^2 (R_c - R_w)^2 / (8 N^2) on the remainder.

    Raises:
        ValueError: If the mask or the number of rollouts is invalid.

    Source: BroRL (arXiv 2510.01180), Theorem 1, Eq. 1 and Eq. C.1. The remainder's bound is not in the paper: it
        follows from `pooled_change`, as the step's range is at most (eta / N) p_max (R_c - R_w).
    """
    sampled_V = boolean_mask(sampled, "sampled", outcomes.p_V.size)
    check_num_rollouts(num_rollouts)
    scale = step.learning_rate / num_rollouts
    p_V, square_V, q_pos, q_neg = outcomes.p_V, outcomes.p_V**2, outcomes.q_pos, outcomes.q_neg
    hit_V, wrong_hit_V = sampled_V & outcomes.correct_V, sampled_V & ~outcomes.correct_V
    p_pos, p_neg = _mass(p_V, hit_V), _mass(p_V, wrong_hit_V)
    a_2, b_2 = _mass(square_V, hit_V), _mass(square_V, wrong_hit_V)
    u_pos_2 = _mass(square_V, ~sampled_V & outcomes.correct_V)
    u_neg_2 = _mass(square_V, ~sampled_V & ~outcomes.correct_V)
    s_r = step.reward_correct * p_pos + step.reward_wrong * p_neg
    # R_c - S_R and S_R - R_w as sums of nonnegative numbers: no cancellation, and no wrong sign by rounding.
    above = step.reward_correct * _mass(p_V, ~hit_V) - step.reward_wrong * p_neg
    below = step.reward_correct * p_pos - step.reward_wrong * _mass(p_V, ~wrong_hit_V)
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
        remainder_bound=(scale * float(p_V.max()) * step.reward_range) ** 2 / 8,
    )


def pooled_change(outcomes: Outcomes, logit_step: ArrayLike) -> tuple[float, float]:
    """Return the change of the correct mass under any step of the logits, to first order and with its error.

        dQ_pos = Q_neg sum_{i in P} p_i dz_i - Q_pos sum_{j not in P} p_j dz_j + r,   |r| <= (max dz - min dz)^2 / 8

    Args:
        outcomes: The policy before the step.
        logit_step: dz, finite, shape [V]; adding a constant to it changes nothing.

    Returns:
        The change to first order, and the largest distance of the real change from it.

    Raises:
        ValueError: If the step is not V finite numbers.

    Source: BroRL (arXiv 2510.01180), appendix C. The bound is not in the paper: along the step, the second derivative
        of Q_pos is the mean of (1[in P] - Q_pos)(dz - mean dz)^2, at most the variance of dz, at most its range^2 / 4.
    """
    step_V = np.asarray(logit_step)
    if step_V.shape != outcomes.p_V.shape or step_V.dtype.kind not in "fiu" or not np.isfinite(step_V).all():
        raise ValueError(
            f"logit_step must contain {outcomes.p_V.size} finite numbers, one per outcome, got shape {step_V.shape} of "
            f"{step_V.dtype}; pass the change of each logit"
        )
    step_V = step_V - step_V.min()  # nonnegative, so that a large common offset does not cancel
    pull_V = outcomes.p_V * step_V
    lifted, pressed = _mass(pull_V, outcomes.correct_V), _mass(pull_V, ~outcomes.correct_V)
    first_order = outcomes.q_neg * lifted - outcomes.q_pos * pressed
    return first_order, float(step_V.max()) ** 2 / 8


def boolean_mask(mask: ArrayLike, name: str, num_outcomes: int) -> BoolArray:
    """Return a boolean mask of shape [V], or raise a ValueError that calls it by its name."""
    mask_V = np.asarray(mask)
    if mask_V.dtype.kind != "b" or mask_V.shape != (num_outcomes,):
        raise ValueError(
            f"{name} must be a boolean mask of shape ({num_outcomes},), got {mask_V.dtype} of shape {mask_V.shape}; "
            "indices are not accepted: set those entries of an all-False mask to True"
        )
    return mask_V


def check_num_rollouts(num_rollouts: object) -> None:
    """Raise a ValueError unless the number is whole and at least 1."""
    if not (isinstance(num_rollouts, Integral) and int(num_rollouts) >= 1):
        raise ValueError(f"num_rollouts must be a whole number >= 1, got {num_rollouts!r}; count duplicates too")


def _mass(value_V: FloatArray, mask_V: BoolArray) -> float:
    """Return the sum over the outcomes of a mask."""
    return float(value_V[mask_V].sum())


_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rollouts of one prompt (L distinct ones among H) before and after an update."""

    count_L: NDArray[np.int64]  # number of rollouts that gave each distinct response, shape [L]; they add up to H >= 2
    correct_L: NDArray[np.bool_]  # verdict of each distinct response, shape [L]
    old_logprob_L: FloatArray  # log-prob (nats) of each whole response under the policy that sampled it, shape [L]
    new_logprob_L: FloatArray  # the same after the update, shape [L]
    baseline: float  # any number that does not depend on these rollouts; near the pass rate it makes the variance small


@dataclass(frozen=True)
class HeldOutCheck:
    """The effect of an update on the probability of correct responses; intervals are 95%."""

    # estimate of the change of Q_pos, mean over the prompts; None where a weight is too large for a float
    change: float | None
    change_low: float | None  # lower end of its interval (normal, from the variance within each prompt); None likewise
    change_high: float | None  # upper end; None likewise
    fraction_improved: float | None  # fraction of the correct mass that rose; None without a correct held-out rollout
    fraction_improved_low: float  # lower end of its interval (exact binomial)
    fraction_improved_high: float  # upper end
    worst_drop: float | None  # largest fall of a correct held-out response's probability, <= 0; None without one
    # smallest log(new / old probability) of a correct held-out response; None without one
    worst_log_ratio: float | None
    num_prompts: int
    num_rollouts: int  # number of held-out rollouts over all prompts
    num_correct: int  # number of correct ones among them
    # (sum w)^2 / (H sum w^2) of the weights w = new / old over all held-out rollouts. Far below 1, a few
    # rollouts dominate the estimate, and its interval is not reliable.
    effective_fraction: float


def check_on_held_out(held_out: Sequence[HeldOut]) -> HeldOutCheck:
    """Estimate the change of Q_pos by an update from rollouts that were not part of it.

    Never pass rollouts that the update was trained on: they overestimate the change.

        w = pi_new(y) / pi_old(y),   dQ_hat = mean over held-out rollouts of (r - b)(w - 1)

    It is unbiased for the real change because E[w - 1] = 0 and E[r w] = Q_new, with r = 1 for a correct response and 0
    otherwise. The rollouts must be independent draws from the distribution of the old log-probs. With top-p or top-k
    E[w - 1] is 0 up to the mass of tokens that one policy keeps and the other does not.

    Args:
        held_out: One entry per prompt, at least one.

    Returns:
        The check, pooled over the prompts.

    Raises:
        ValueError: If there is no prompt, or one has fewer than 2 rollouts.
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
    """Return the exact 95% interval of a probability, with a coverage of at least 95%; (0, 1) without trials.

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
