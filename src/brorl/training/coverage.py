"""How well N rollouts cover one prompt: sampled and unsampled mass, nodes and responses, at this N and others.

Outcomes are whole responses (finished, or truncated at the length limit), and the mass of a set is its total
probability p. Sampled masses are exact. Unsampled masses are estimated with pi = 1 - (1-p)^N, the chance that a
response is among the N rollouts. If every response is unique (`Coverage.all_unique`), the estimates carry no
information about missed responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import BoolArray, FloatArray, IntArray
from brorl.tree import RolloutTree


@dataclass(frozen=True, eq=False)
class Coverage:
    """Masses of the responses to one prompt (L distinct ones among N), in the notation of BroRL, section 3."""

    num_rollouts: int  # N
    num_correct: int  # number of correct rollouts
    num_distinct: int  # L
    p_pos: float  # sum of p over the sampled correct responses
    p_neg: float  # sum of p over the sampled incorrect responses
    a_2: float  # sum of p^2 over the sampled correct responses
    b_2: float  # sum of p^2 over the sampled incorrect responses
    s_r: float  # R_c P_pos + R_w P_neg with the rewards minus the group mean x: R_c = 1 - x, R_w = -x
    q_pos: float  # estimated mass of all correct responses: sum of p / pi over the sampled correct ones
    unsampled_correct: float  # estimated sum of p over the correct responses that were not sampled
    u_pos_2: float  # estimated sum of p^2 over the correct responses that were not sampled
    u_neg_2: float  # estimated sum of p^2 over the incorrect responses that were not sampled
    entropy: float  # minus the mean log-prob of a sampled token, nats per token

    @property
    def unsampled(self) -> float:
        """Probability M of all responses that were not sampled, exact up to rounding, in [0, 1]."""
        return max(0.0, 1.0 - self.p_pos - self.p_neg)

    @property
    def duplicate_rate(self) -> float:
        """Fraction of rollouts that repeat an earlier rollout."""
        return 1.0 - self.num_distinct / self.num_rollouts

    @property
    def all_unique(self) -> bool:
        """Whether no two rollouts are equal."""
        return self.num_distinct == self.num_rollouts


def response_masses(tree: RolloutTree) -> FloatArray:
    """Return the probability of each distinct response under the policy that sampled it, in (0, 1], shape [L]."""
    # long responses underflow to 0, and rounding may exceed 1
    return np.clip(np.exp(tree.prefix_logprob[tree.leaf]), np.finfo(np.float64).tiny, 1.0)


def unseen_and_seen_mass(p_L: FloatArray, num_rollouts: int | NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return 1 - pi and pi, the chances that an outcome is missing from, or among, N rollouts.

    Both are precise even when they are small. Their shape is [L], or [K, L] for several N with shape [K, 1].
    """
    with np.errstate(divide="ignore"):
        log_missed = num_rollouts * np.log1p(-p_L)
    return np.exp(log_missed), -np.expm1(log_missed)


def measure_coverage(tree: RolloutTree, correct_L: BoolArray) -> Coverage:
    """Measure a prompt's sampled masses, and estimate the unsampled masses without bias.

    Source: BroRL (arXiv 2510.01180), section 3; Horvitz and Thompson, JASA 47 (1952), for 1 / pi.
    """
    p_L = response_masses(tree)
    missed_L, seen_L = unseen_and_seen_mass(p_L, tree.num_rollouts)
    num_correct = int(tree.leaf_count[correct_L].sum())
    accuracy = num_correct / tree.num_rollouts
    p_pos, p_neg = float(p_L[correct_L].sum()), float(p_L[~correct_L].sum())
    odds_L = missed_L / seen_L
    return Coverage(
        num_rollouts=tree.num_rollouts,
        num_correct=num_correct,
        num_distinct=tree.num_responses,
        p_pos=p_pos,
        p_neg=p_neg,
        a_2=float((p_L[correct_L] ** 2).sum()),
        b_2=float((p_L[~correct_L] ** 2).sum()),
        s_r=(1 - accuracy) * p_pos - accuracy * p_neg,
        q_pos=float((p_L / seen_L)[correct_L].sum()),
        unsampled_correct=float((p_L * odds_L)[correct_L].sum()),
        u_pos_2=float((p_L**2 * odds_L)[correct_L].sum()),
        u_neg_2=float((p_L**2 * odds_L)[~correct_L].sum()),
        entropy=-float((tree.count * tree.logprob).sum()) / tree.num_sampled_tokens,
    )


def unsampled_correct_at(tree: RolloutTree, correct_L: BoolArray, num_rollouts: Sequence[int]) -> FloatArray:
    """Return unbiased estimates of the correct mass that N' rollouts would miss, for K values of N', shape [K].

    Each is the sum of p (1 - pi') / pi over the sampled correct responses A. N' may be below or above N.

    Source: BroRL (arXiv 2510.01180), Lemma 2, with p instead of p^2.
    """
    p_A = response_masses(tree)[correct_L]
    _, seen_A = unseen_and_seen_mass(p_A, tree.num_rollouts)
    missed_KA, _ = unseen_and_seen_mass(p_A, np.asarray(num_rollouts)[:, None])
    total_K: FloatArray = (missed_KA * (p_A / seen_A)).sum(1)
    return total_K


def leaving_mass(tree: RolloutTree) -> FloatArray:
    """Return, for each position, the chance that a new rollout leaves the tree there, shape [T].

    Position 0 is the first token after the prompt. A rollout at a node leaves the tree with probability 1 minus the sum
    of the children's probabilities. The chance at a position is the sum over the nodes at that depth, each weighted by
    the probability of reaching it. The chances add up to the unsampled mass M. They are exact, even if every response
    is unique.
    """
    mass_M = np.exp(tree.prefix_logprob)
    length = int(tree.depth.max()) + 1
    level_T = np.bincount(tree.depth, mass_M, length)
    ended = np.unique(tree.leaf)
    ended_T = np.bincount(tree.depth[ended], mass_M[ended], length)
    unfinished_T = np.append(1.0, (level_T - ended_T)[:-1])
    return np.maximum(unfinished_T - level_T, 0.0)


_MIN_LOGPROB = -690.0  # exp(-690) is still a normal float; below it, sampling chances are proportional to N


def tree_growth(tree: RolloutTree, wanted: IntArray) -> tuple[FloatArray, FloatArray]:
    """Estimate the nodes and distinct responses of a prompt's tree at other numbers of rollouts, shape [J] each.

    A prefix with probability p is a node in the tree of N' rollouts with probability 1 - (1 - p)^N'. So each node in a
    tree of n independent rollouts counts as (1 - (1 - p)^N') / (1 - (1 - p)^n). The estimate is exactly unbiased for
    every N', below or above n. Sampling must not be truncated.

    Source: Horvitz and Thompson, "A generalization of sampling without replacement from a finite universe" (1952).
    """
    if np.isnan(tree.logprob).any():
        raise ValueError("the tree has nodes without log-probs; sample it with an engine that records them")
    ratio_JM = growth_ratios(tree.prefix_logprob, tree.num_rollouts, wanted)
    return ratio_JM.sum(1), ratio_JM[:, tree.leaf].sum(1)


def growth_ratios(path_logprob_K: FloatArray, pilot_rollouts: int, wanted: IntArray) -> FloatArray:
    """Return each prefix's chance of appearing among N' rollouts, divided by its chance among n.

    Returns:
        Ratios, shape [J, K]: N' / n for a prefix with a probability near 0, 1 for a certain prefix.
    """
    p_K = np.exp(np.clip(path_logprob_K, _MIN_LOGPROB, 0.0))
    _, seen_JK = unseen_and_seen_mass(p_K, np.asarray(wanted)[:, None])
    _, seen_K = unseen_and_seen_mass(p_K, pilot_rollouts)
    ratio_JK: FloatArray = seen_JK / seen_K
    return ratio_JK
