"""Adaptive allocation: a fixed number of rollouts over prompts, with extra rollouts for groups that are not mixed.

Pass rates are Beta(a, b) a priori, with spikes at 0 and at 1: a plain Beta cannot fit the fractions of mixed groups
(some rollouts correct, some not) at several N at once. A group that is already mixed never gets extra rollouts.
Impossible outcomes are rejected.

The chances are for independent rollouts. Allocation that depends on outcomes makes successes / rollouts a biased
estimate of an extended group's pass rate; docs/explanation/adaptive_rollouts.md gives the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import betaln, logsumexp

from brorl.theory.pass_rates import PassRates
from brorl.tree import FloatArray, IntArray

_PSEUDO_GROUPS = np.array([1.0, 1.0, 4.0])  # spike at 0, spike at 1, Beta: the weak prior of a fit
_PSEUDO_SHAPE = (0.5, 1.5)  # center of a log-normal (unit deviation) on each of the Beta's parameters


@dataclass(frozen=True)
class AdaptiveAllocation:
    """Limits on the extra rollouts after a pilot."""

    max_rollouts: int  # largest number of rollouts of a prompt, including its pilot
    samples_per_prompt: int  # mean number of rollouts per prompt that a round may spend, including the pilots

    def __post_init__(self) -> None:
        if not 2 <= self.samples_per_prompt <= self.max_rollouts:
            raise ValueError(
                f"samples_per_prompt must be between 2 and max_rollouts = {self.max_rollouts}, "
                f"not {self.samples_per_prompt}"
            )


def next_rollout_gains(num_rollouts: int, num_correct: int, num_more: int, prior: PassRates) -> FloatArray:
    """Return the chance of each extra rollout to be the one that makes the group mixed.

        k = 0:  w B(a + 1, b + n + j) / B(a, b + n),   w the posterior probability that the pass rate is not 0;
        k = n:  the same with the outcomes exchanged;   otherwise 0.

    Their sum over j < m is the chance that m extra rollouts make it mixed: 1 - E[(1 - p)^m | no success in n], or
    1 - E[p^m | only successes].

    Args:
        num_rollouts: Rollouts so far, n >= 1.
        num_correct: Correct ones among them, k in 0 to n.
        num_more: Number of extra rollouts to consider, j = 0 .. num_more - 1.
        prior: Distribution of the pass rates before the pilot.

    Returns:
        Chances, nonincreasing, shape [num_more].

    Raises:
        ValueError: If the outcome is impossible.
    """
    if not 0 <= num_correct <= num_rollouts or num_rollouts < 1:
        raise ValueError(f"num_correct must be between 0 and num_rollouts >= 1, got {num_correct} of {num_rollouts}")
    if num_more < 1 or 0 < num_correct < num_rollouts:
        return np.zeros(max(num_more, 0))
    hit, miss, spike = prior.a, prior.b, prior.never
    if num_correct:
        hit, miss, spike = prior.b, prior.a, prior.always
    # The chance that the pass rate is from the Beta and all rollouts missed; under the spike all miss for certain.
    unseen = prior.between * np.exp(betaln(hit, miss + num_rollouts) - betaln(hit, miss))
    if unseen == 0:
        return np.zeros(num_more)
    misses = miss + num_rollouts + np.arange(num_more)
    first = unseen / (unseen + spike) * hit / (hit + misses[0])
    # Every factor is below 1, so gains never rise, even after rounding: the greatest ones are the first ones.
    return np.asarray(first * np.cumprod(np.append(1.0, misses[:-1] / (hit + misses[1:]))))


def allocate_rollouts(
    num_rollouts_G: Sequence[int], num_correct_G: Sequence[int], budget: int, max_rollouts: int, prior: PassRates
) -> list[tuple[int, int]]:
    """Give each extra rollout to the group where its chance to make the group mixed is greatest.

    No group more than doubles: its outcomes are checked before it gets many rollouts. The chances of a group fall with
    every rollout. Therefore this greedy choice maximizes the expected number of groups that become mixed, among all
    choices within the budget in which no group more than doubles. Groups with the same outcome share.

    Args:
        num_rollouts_G: Rollouts of each group so far, each >= 1, shape [G].
        num_correct_G: Correct ones among them, shape [G].
        budget: Largest number of extra rollouts over all groups.
        max_rollouts: Largest number of rollouts of a group, including those so far.
        prior: Distribution of the pass rates before the pilot.

    Returns:
        (group, extra rollouts >= 1), ascending by group; their sum is at most `budget`.
    """
    gains_G = []
    for n, k in zip(num_rollouts_G, num_correct_G, strict=True):
        gains = next_rollout_gains(n, k, min(n, max_rollouts - n, budget), prior)
        gains_G.append(gains[gains > 0])
    if not gains_G:
        return []
    group = np.repeat(np.arange(len(gains_G)), [g.size for g in gains_G])
    best = np.argsort(-np.concatenate(gains_G), kind="stable")[:budget]
    more_G = np.bincount(group[best], minlength=len(gains_G))
    return [(int(g), int(more_G[g])) for g in np.flatnonzero(more_G)]


def fit_prior(num_rollouts: int, num_correct_G: Sequence[int]) -> PassRates:
    """Fit the prior of pass rates to pilots of equal size, by penalized maximum likelihood.

    The penalty is a weak prior (Dirichlet on the three weights, log-normal on the Beta's parameters): one pilot is
    enough for a proper fit, and a few hundred override the penalty.

    Args:
        num_rollouts: Rollouts of each pilot, n.
        num_correct_G: Successes of each pilot, 0 to n, shape [G]; with G = 0 the fit is the weak prior.

    Returns:
        The prior. It does not depend on the order of the pilots.

    Raises:
        ValueError: If a pilot has more successes than rollouts, or fewer than none.
    """
    times_K = np.bincount(np.asarray(num_correct_G, np.int64), minlength=num_rollouts + 1)
    if times_K.size != num_rollouts + 1:
        raise ValueError(f"a pilot of {num_rollouts} rollouts cannot have {times_K.size - 1} successes")
    center = np.log([*_PSEUDO_SHAPE, *(_PSEUDO_GROUPS[:2] / _PSEUDO_GROUPS[2])])
    fit = minimize(_negative_log_posterior, center, args=(times_K, center), method="L-BFGS-B", bounds=[(-5.0, 5.0)] * 4)
    alpha, beta = np.exp(fit.x[:2]).tolist()
    never, always, _ = np.exp(_log_weights(fit.x)).tolist()
    return PassRates(alpha, beta, never, always)


def _log_weights(theta: FloatArray) -> FloatArray:
    """Return the log-probabilities of the spike at 0, the spike at 1 and the Beta."""
    logits = np.append(theta[2:], 0.0)
    return np.asarray(logits - logsumexp(logits))


def _negative_log_posterior(theta: FloatArray, times_K: IntArray, center: FloatArray) -> float:
    """Return minus the penalized log-likelihood, without the constant binomial coefficients."""
    n = times_K.size - 1
    k = np.arange(n + 1)
    log_never, log_always, log_slab = _log_weights(theta)
    alpha, beta = np.exp(theta[:2])
    log_chance_K = log_slab + betaln(alpha + k, beta + n - k) - betaln(alpha, beta)
    log_chance_K[0] = np.logaddexp(log_chance_K[0], log_never)
    log_chance_K[n] = np.logaddexp(log_chance_K[n], log_always)
    penalty = ((theta[:2] - center[:2]) ** 2).sum() / 2 - _PSEUDO_GROUPS @ _log_weights(theta)
    return float(penalty - times_K @ log_chance_K)
