"""Mass balance: what one policy-gradient step does to the total probability of the correct outcomes.

In: a softmax policy over V outcomes (tokens, or whole responses) as probabilities, which outcomes are correct, and
which were sampled, as numpy arrays or torch tensors. Out: the change of the correct mass Q_pos to first order in the
learning rate, split into its sources, with a bound on everything beyond first order. It refuses probabilities that do
not add up to 1, and indices where it expects masks.

Theorem 1 is about a surrogate that sums over the distinct sampled outcomes. What trainers do instead, with counts and
baselines, is in `brorl.theory.policy_gradient`. All of it is for a tabular softmax, one free logit per outcome, and
samples drawn independently from the policy itself at temperature 1.

The surrogate's 1/N is part of its step: at a fixed learning rate the whole change vanishes as N grows. Compare numbers
of rollouts by the sign and the shares of the terms, not by the size of the total.

Notation: P the correct outcomes, A the sampled correct ones, B the sampled incorrect ones, U the unsampled ones; a
mass is a sum of p, a second moment a sum of p^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, e, inf, isfinite, sqrt
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import xlog1py

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# Distance from 1 to the next number, of the types that hold probabilities.
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, eq=False)
class Outcomes:
    """A policy over V outcomes and which of them are correct, checked; made by `Outcomes.of`.

    Attributes:
        p_V: Probabilities in float64, scaled to add up to 1 beyond the precision that they came with, shape [V].
        correct_V: Whether each outcome is correct, shape [V].
    """

    p_V: FloatArray
    correct_V: BoolArray

    @classmethod
    def of(cls, p: ArrayLike, correct: ArrayLike) -> Outcomes:
        """Check and convert.

        Args:
            p: Probabilities, shape [V]; a numpy array or a torch tensor on any device, in float64, float32, float16 or
                bfloat16. Their sum may differ from 1 by the square root of their type's precision.
            correct: Boolean mask, shape [V].

        Returns:
            The outcomes.

        Raises:
            ValueError: If p is no probability vector, or the mask is not boolean or not of its shape.
        """
        p_V, dtype = as_numpy(p)
        if dtype not in _EPSILON:
            raise ValueError(f"p must hold floats ({', '.join(_EPSILON)}), got {dtype}; convert it to float64")
        p_V = p_V.astype(np.float64)
        if p_V.ndim != 1 or not p_V.size:
            raise ValueError(f"p must be one row of probabilities, shape [V], got shape {p_V.shape}; pass one prompt")
        if not np.isfinite(p_V).all() or (p_V < 0).any():
            raise ValueError("p must hold finite probabilities >= 0; apply softmax to logits, exp to log-probs")
        total, tolerance = float(p_V.sum()), sqrt(_EPSILON[dtype])
        if abs(total - 1) > tolerance:
            raise ValueError(
                f"p must add up to 1 within {tolerance:.1g} ({dtype}), got {total:.9g}; divide it by its sum"
            )
        return cls(p_V / total, boolean_mask(correct, "correct", p_V.size))

    @cached_property
    def q_pos(self) -> float:
        """Mass of the correct outcomes, Q_pos."""
        return _mass(self.p_V, self.correct_V)

    @cached_property
    def q_neg(self) -> float:
        """Mass of the incorrect outcomes, Q_neg; a sum of its own, so exact however small."""
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
class MassBalance:
    """The first-order change of the correct mass in one step of Theorem 1's surrogate, and what it is made of.

    Attributes:
        sampled_correct_term: What sampling correct outcomes adds, >= 0.
        sampled_wrong_term: What sampling incorrect outcomes adds, >= 0.
        unsampled_term: What the outcomes that were not sampled add, of either sign: the unsampled coupling.
        total: Sum of the three.
        q_pos: Mass of the correct outcomes.
        q_neg: Mass of the incorrect outcomes.
        s_r: Mean reward under the policy, 0 for unsampled outcomes, S_R.
        p_pos: Mass of the sampled correct outcomes.
        p_neg: Mass of the sampled incorrect outcomes.
        a_2: Second moment of the sampled correct outcomes.
        b_2: Second moment of the sampled incorrect outcomes.
        u_pos_2: Second moment of the unsampled correct outcomes.
        u_neg_2: Second moment of the unsampled incorrect outcomes.
        remainder_bound: The real change of the finite step is within this of `total`.
    """

    sampled_correct_term: float
    sampled_wrong_term: float
    unsampled_term: float
    total: float
    q_pos: float
    q_neg: float
    s_r: float
    p_pos: float
    p_neg: float
    a_2: float
    b_2: float
    u_pos_2: float
    u_neg_2: float
    remainder_bound: float

    @property
    def cannot_fall(self) -> bool:
        """Whether this draw guarantees total >= 0 whatever the rewards: U_pos,2 <= Q_neg P_2 and U_neg,2 <= Q_pos N_2.

        Sufficient, not necessary.
        """
        p_2, n_2 = self.a_2 + self.u_pos_2, self.b_2 + self.u_neg_2
        return self.u_pos_2 <= self.q_neg * p_2 and self.u_neg_2 <= self.q_pos * n_2


@dataclass(frozen=True)
class PooledChange:
    """Change of the correct mass under a step of the logits.

    Attributes:
        first_order: The change to first order.
        remainder_bound: The real change is within this of `first_order`.
    """

    first_order: float
    remainder_bound: float


@dataclass(frozen=True)
class UnsampledSquare:
    """Expected second moment of the outcomes that N independent draws miss.

    Attributes:
        correct: Of the correct outcomes, E[U_pos,2].
        wrong: Of the incorrect outcomes, E[U_neg,2].
    """

    correct: float
    wrong: float

    @property
    def total(self) -> float:
        """Of all outcomes, E[U_2]."""
        return self.correct + self.wrong


def mass_balance(
    p: ArrayLike,
    correct: ArrayLike,
    sampled: ArrayLike,
    *,
    num_rollouts: int,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> MassBalance:
    """Split the first-order change of the correct mass into sampled correct, sampled wrong and unsampled outcomes.

        dQ_pos = (eta / N) [(R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2)]

    The step is the one of `surrogate_logit_step`: an outcome counts once, however often it was drawn.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        sampled: Boolean mask of the outcomes that were drawn at least once, shape [V].
        num_rollouts: Number of rollouts N, duplicates counted, >= 1.
        reward_correct: Reward of a sampled correct outcome, R_c >= 0.
        reward_wrong: Reward of a sampled incorrect outcome, R_w <= 0.
        learning_rate: Step size eta on the logits, > 0.

    Returns:
        The terms, what they are made of, and the bound eta^2 p_max^2 (R_c - R_w)^2 / (8 N^2) on the remainder.

    Raises:
        ValueError: If an argument is outside what is stated above.

    Source: BroRL (arXiv 2510.01180), Theorem 1 and Eq. 1. The remainder's bound is not in the paper: it follows from
        `pooled_change`, as the step's range is at most (eta / N) p_max (R_c - R_w).
    """
    outcomes = Outcomes.of(p, correct)
    sampled_V = boolean_mask(sampled, "sampled", outcomes.p_V.size)
    check_step(reward_correct, reward_wrong, learning_rate)
    check_num_rollouts(num_rollouts)
    scale = learning_rate / num_rollouts
    p_V, square_V = outcomes.p_V, outcomes.p_V**2
    hit_V, wrong_hit_V = sampled_V & outcomes.correct_V, sampled_V & ~outcomes.correct_V
    p_pos, p_neg = _mass(p_V, hit_V), _mass(p_V, wrong_hit_V)
    a_2, b_2 = _mass(square_V, hit_V), _mass(square_V, wrong_hit_V)
    u_pos_2 = _mass(square_V, ~sampled_V & outcomes.correct_V)
    u_neg_2 = _mass(square_V, ~sampled_V & ~outcomes.correct_V)
    s_r = reward_correct * p_pos + reward_wrong * p_neg
    # R_c - S_R and S_R - R_w as sums of what is not negative: no cancellation, and no wrong sign by rounding.
    above = reward_correct * _mass(p_V, ~hit_V) - reward_wrong * p_neg
    below = reward_correct * p_pos - reward_wrong * _mass(p_V, ~wrong_hit_V)
    sampled_correct = scale * above * outcomes.q_neg * a_2
    sampled_wrong = scale * below * outcomes.q_pos * b_2
    unsampled = scale * s_r * (outcomes.q_pos * u_neg_2 - outcomes.q_neg * u_pos_2)
    return MassBalance(
        sampled_correct_term=sampled_correct,
        sampled_wrong_term=sampled_wrong,
        unsampled_term=unsampled,
        total=sampled_correct + sampled_wrong + unsampled,
        q_pos=outcomes.q_pos,
        q_neg=outcomes.q_neg,
        s_r=s_r,
        p_pos=p_pos,
        p_neg=p_neg,
        a_2=a_2,
        b_2=b_2,
        u_pos_2=u_pos_2,
        u_neg_2=u_neg_2,
        remainder_bound=(scale * float(p_V.max()) * (reward_correct - reward_wrong)) ** 2 / 8,
    )


def surrogate_logit_step(
    p: ArrayLike,
    correct: ArrayLike,
    sampled: ArrayLike,
    *,
    num_rollouts: int,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    learning_rate: float = 1.0,
) -> FloatArray:
    """Return the logit step of Theorem 1's surrogate, dz_j = (eta / N) p_j (R_j - S_R).

    It is one gradient step on L = -(1/N) sum_j R_j p_j, where R_j is 0 for what was not sampled.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        sampled: Boolean mask of the outcomes that were drawn at least once, shape [V].
        num_rollouts: Number of rollouts N, duplicates counted, >= 1.
        reward_correct: Reward of a sampled correct outcome, R_c >= 0.
        reward_wrong: Reward of a sampled incorrect outcome, R_w <= 0.
        learning_rate: Step size eta, > 0.

    Returns:
        dz, shape [V].

    Raises:
        ValueError: If an argument is outside what is stated above.

    Source: BroRL (arXiv 2510.01180), appendix C, Eq. C.1.
    """
    outcomes = Outcomes.of(p, correct)
    sampled_V = boolean_mask(sampled, "sampled", outcomes.p_V.size)
    check_step(reward_correct, reward_wrong, learning_rate)
    check_num_rollouts(num_rollouts)
    reward_V = np.where(sampled_V, np.where(outcomes.correct_V, reward_correct, reward_wrong), 0.0)
    step_V: FloatArray = (learning_rate / num_rollouts) * outcomes.p_V * (reward_V - reward_V @ outcomes.p_V)
    return step_V


def pooled_change(p: ArrayLike, correct: ArrayLike, logit_step: ArrayLike) -> PooledChange:
    """Return the change of the correct mass under any step of the logits, to first order and with its error.

        dQ_pos = Q_neg sum_{i in P} p_i dz_i - Q_pos sum_{j not in P} p_j dz_j + r,   |r| <= (max dz - min dz)^2 / 8

    Args:
        p: Probabilities before the step, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        logit_step: dz, finite, shape [V]; adding a constant to it changes nothing.

    Returns:
        The first-order change and the bound on |r|.

    Raises:
        ValueError: If an argument is outside what is stated above.

    Source: BroRL (arXiv 2510.01180), appendix C. The bound is not in the paper: along the step, the second derivative
        of Q_pos is the mean of (1[in P] - Q_pos)(dz - mean dz)^2, at most the variance of dz, at most its range^2 / 4.
    """
    outcomes = Outcomes.of(p, correct)
    step_V = as_numpy(logit_step)[0]
    if step_V.shape != outcomes.p_V.shape or step_V.dtype.kind not in "fiu" or not np.isfinite(step_V).all():
        raise ValueError(
            f"logit_step must hold {outcomes.p_V.size} finite numbers, one per outcome, got shape {step_V.shape} of "
            f"{step_V.dtype}; pass the change of each logit"
        )
    step_V = step_V - step_V.min()  # not negative, so that a large common offset does not cancel
    pull_V = outcomes.p_V * step_V
    lifted, pressed = _mass(pull_V, outcomes.correct_V), _mass(pull_V, ~outcomes.correct_V)
    first_order = outcomes.q_neg * lifted - outcomes.q_pos * pressed
    return PooledChange(first_order, float(step_V.max()) ** 2 / 8)


def expected_unsampled_square(p: ArrayLike, correct: ArrayLike, num_rollouts: int) -> UnsampledSquare:
    """Return the expected second moment of the unsampled outcomes, sum_i p_i^2 (1 - p_i)^N.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].
        num_rollouts: Number of independent draws N, >= 1.

    Returns:
        The sum, split into correct and incorrect outcomes.

    Raises:
        ValueError: If an argument is outside what is stated above.

    Source: BroRL (arXiv 2510.01180), Lemma 2 and Corollary 3.
    """
    outcomes = Outcomes.of(p, correct)
    check_num_rollouts(num_rollouts)
    missed_V = np.exp(xlog1py(num_rollouts, -outcomes.p_V))  # (1 - p)^N; a plain power loses small p times large N
    value_V = outcomes.p_V**2 * missed_V
    return UnsampledSquare(_mass(value_V, outcomes.correct_V), _mass(value_V, ~outcomes.correct_V))


def sufficient_num_rollouts(p: ArrayLike, correct: ArrayLike) -> int | float:
    """Return a number of rollouts from which the guarantee of `MassBalance.cannot_fall` holds in the mean.

        N = max(Q_pos / (e Q_neg P_2), Q_neg / (e Q_pos N_2)), rounded up

    From this N on, E[U_pos,2] <= Q_neg P_2 and E[U_neg,2] <= Q_pos N_2. That bounds averages, so a single draw of this
    size may still lower the correct mass; and it is sufficient only: the expected change is not negative at any N.

    Args:
        p: Probabilities, shape [V]; see `Outcomes.of`.
        correct: Boolean mask of the correct outcomes, shape [V].

    Returns:
        An int, at least 2 (the maximum is never below 4 / e); or infinity where there is no such N: if all of the mass
        is correct, or none of it.

    Raises:
        ValueError: If an argument is outside what is stated above.

    Source: derived here from Corollary 3 of BroRL (arXiv 2510.01180) by p (1 - p)^N <= 1 / (e N).
    """
    outcomes = Outcomes.of(p, correct)
    needed = [
        outcomes.q_pos / (e * room) if (room := outcomes.q_neg * outcomes.p_2) else inf,
        outcomes.q_neg / (e * room) if (room := outcomes.q_pos * outcomes.n_2) else inf,
    ]
    return ceil(max(needed)) if isfinite(max(needed)) else inf


def boolean_mask(mask: ArrayLike, name: str, num_outcomes: int) -> BoolArray:
    """Return a mask as a numpy array.

    Args:
        mask: Boolean array or tensor, shape [V].
        name: What to call it in the error.
        num_outcomes: V.

    Raises:
        ValueError: If it is not boolean or not of shape [V].
    """
    mask_V, dtype = as_numpy(mask)
    if dtype != "bool" or mask_V.shape != (num_outcomes,):
        raise ValueError(
            f"{name} must be a boolean mask of shape ({num_outcomes},), got {dtype} of shape {mask_V.shape}; "
            f"indices are not taken: set those entries of an all-False mask to True"
        )
    return mask_V


def check_step(reward_correct: float, reward_wrong: float, learning_rate: float) -> None:
    """Refuse rewards or a learning rate that the formulas do not cover.

    Raises:
        ValueError: If not reward_correct >= 0 >= reward_wrong, learning_rate > 0, all finite.
    """
    if not (inf > reward_correct >= 0 >= reward_wrong > -inf):
        raise ValueError(
            f"rewards must be finite with reward_correct >= 0 >= reward_wrong, "
            f"got {reward_correct} and {reward_wrong}; subtract a baseline between them first"
        )
    if not 0 < learning_rate < inf:
        raise ValueError(f"learning_rate must be positive and finite, got {learning_rate}; give the step on the logits")


def check_num_rollouts(num_rollouts: object) -> None:
    """Refuse what is no number of rollouts.

    Raises:
        ValueError: If it is not a whole number >= 1.
    """
    if not (isinstance(num_rollouts, Integral) and int(num_rollouts) >= 1):
        raise ValueError(f"num_rollouts must be a whole number >= 1, got {num_rollouts!r}; count duplicates too")


def _mass(value_V: FloatArray, mask_V: BoolArray) -> float:
    """Sum over the outcomes of a mask."""
    return float(value_V[mask_V].sum())


def as_numpy(values: Any) -> tuple[NDArray[Any], str]:
    """Return an array, or a torch tensor told by its `detach`, as numpy with the name of the type it came in."""
    if not hasattr(values, "detach"):
        array = np.asarray(values)
        return array, array.dtype.name
    name = str(values.dtype).removeprefix("torch.")
    tensor = values.detach().cpu()
    # numpy has no bfloat16; every other type fits into float64 as well.
    return (tensor if name == "bool" else tensor.double()).numpy(), name
