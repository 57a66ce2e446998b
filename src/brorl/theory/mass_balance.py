"""Mass balance: how one policy-gradient step changes Q_pos, the total probability of the correct outcomes.

Theorem 1 of BroRL splits the change, to first order in the learning rate, into its sources; the higher orders are
bounded. It holds for a tabular softmax with one free logit per outcome (a token, or a whole response), and for samples
drawn independently from the policy at temperature 1. Its surrogate sums over the distinct sampled outcomes. The
estimators that trainers use, with counts and baselines, are covered in `tests/theory`.

The surrogate has the factor 1/N, so at a fixed learning rate the whole change vanishes as N grows. To compare rollout
counts, look at the signs and relative sizes of the terms, not at the size of the total.

Notation: P is the set of correct outcomes, A of sampled correct ones, B of sampled incorrect ones, and U of unsampled
ones. A mass is a sum of p, a second moment is a sum of p^2.
"""

from __future__ import annotations

from dataclasses import dataclass

from brorl.arrays import BoolArray, FloatArray


@dataclass(frozen=True)
class MassBalance:
    """The first-order change in the correct mass after one step on Theorem 1's surrogate, and its parts."""

    sampled_correct_term: float  # contribution of the sampled correct outcomes, >= 0
    sampled_wrong_term: float  # contribution of the sampled incorrect outcomes, >= 0
    unsampled_term: float  # contribution of the unsampled outcomes (the unsampled coupling), of either sign
    q_pos: float  # mass of the correct outcomes
    q_neg: float  # mass of the incorrect outcomes
    s_r: float  # S_R, the mean reward under the policy, counting unsampled outcomes as 0
    p_pos: float  # mass of the sampled correct outcomes
    p_neg: float  # mass of the sampled incorrect outcomes
    a_2: float  # second moment of the sampled correct outcomes
    b_2: float  # second moment of the sampled incorrect outcomes
    u_pos_2: float  # second moment of the unsampled correct outcomes
    u_neg_2: float  # second moment of the unsampled incorrect outcomes
    remainder_bound: float  # the actual change differs from `total` by at most this

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
    """Split the first-order change in the correct mass by sampled correct, sampled wrong, and unsampled outcomes.

        dQ_pos = (eta / N) [(R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2)]

    The step is dz_j = (eta / N) p_j (R_j - S_R), one gradient step on L = -(1/N) sum_j R_j p_j. R_j is 0 for unsampled
    outcomes. Each drawn outcome counts once, no matter how often it was drawn.

    Args:
        p_V: The policy before the step, probabilities that sum to 1, shape [V].
        correct_V: Whether each outcome is correct, shape [V].
        sampled_V: Whether each outcome was drawn at least once, shape [V].
        num_rollouts: Number of rollouts N, duplicates counted, >= 1.
        reward_correct: Reward of a correct rollout, R_c >= 0.
        reward_wrong: Reward of an incorrect rollout, R_w <= 0.
        learning_rate: Step size eta, > 0.

    Returns:
        The terms, their factors, and the bound eta^2 p_max^2 (R_c - R_w)^2 / (8 N^2) on the remainder.

    Source: BroRL (arXiv 2510.01180), Theorem 1, Eq. 1 and Eq. C.1. The bound on the remainder is not in the paper:
        along any step dz, the second derivative of Q_pos is the mean of (1[in P] - Q_pos)(dz - mean dz)^2. That is at
        most the variance of dz, which is at most its range^2 / 4, and the range of this step is at most (eta / N) p_max
        (R_c - R_w).
    """
    scale = learning_rate / num_rollouts
    square_V, hit_V, wrong_hit_V = p_V**2, sampled_V & correct_V, sampled_V & ~correct_V
    q_pos, q_neg, p_pos, p_neg = (float(p_V[mask_V].sum()) for mask_V in (correct_V, ~correct_V, hit_V, wrong_hit_V))
    a_2, b_2, u_pos_2, u_neg_2 = (
        float(square_V[mask_V].sum())
        for mask_V in (hit_V, wrong_hit_V, ~sampled_V & correct_V, ~sampled_V & ~correct_V)
    )
    s_r = reward_correct * p_pos + reward_wrong * p_neg
    # Compute R_c - S_R and S_R - R_w as sums of nonnegative numbers to avoid cancellation and wrong signs from
    # rounding.
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
