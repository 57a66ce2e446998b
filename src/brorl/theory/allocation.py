"""How to spend a fixed number of rollouts over prompts: more of them where a pilot found only one outcome.

In: rollouts and successes of each group of a pilot (G groups). Out: a prior of the pass rates, the chance that more
rollouts make a group informative (some correct, some not), and how many more each group should get. Numbers in,
numbers out: nothing is sampled here. It refuses outcomes that cannot be and priors that are no distribution.

Pass rates are Beta(a, b) a priori, with spikes at 0 and at 1: a plain Beta cannot give the shares of informative
groups that are seen at several N at once. A mixed group has no chance left to win and never gets more.

The chances hold for independent rollouts. Allocation that depends on outcomes makes successes / rollouts a biased
estimate of a widened group's pass rate; docs/explanation/adaptive_rollouts.md says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import betaln, logsumexp

from brorl.theory.pass_rates import PassRates

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_PSEUDO_GROUPS = np.array([1.0, 1.0, 4.0])  # spike at 0, spike at 1, Beta: what a fit leans on while groups are few
_PSEUDO_SHAPE = (0.5, 1.5)  # centre of a log-normal (unit deviation) on each of the Beta's parameters


@dataclass(frozen=True)
class AdaptiveAllocation:
    """How far prompts may be widened after a pilot.

    Attributes:
        max_rollouts: No prompt gets more rollouts than this, its pilot included.
        samples_per_prompt: Rollouts that a round may spend, pilots included, for each of its prompts.
    """

    max_rollouts: int
    samples_per_prompt: int

    def __post_init__(self) -> None:
        if not 2 <= self.samples_per_prompt <= self.max_rollouts:
            raise ValueError(
                f"samples_per_prompt must lie between 2 and max_rollouts = {self.max_rollouts}, "
                f"not {self.samples_per_prompt}"
            )


def next_rollout_gains(num_rollouts: int, num_correct: int, num_more: int, prior: PassRates) -> FloatArray:
    """Return the chance of each further rollout to be the one that makes the group informative.

        k = 0:  w B(a + 1, b + n + j) / B(a, b + n),   w the posterior probability that the pass rate is not 0;
        k = n:  the same with the outcomes exchanged;   otherwise 0.

    Summed over j < m they are the chance that m more rollouts make it informative: 1 - E[(1 - p)^m | no success in n],
    or 1 - E[p^m | only successes].

    Args:
        num_rollouts: n, rollouts so far, at least 1.
        num_correct: k, how many of them were correct.
        num_more: How many further rollouts to look at, j = 0 .. num_more - 1.
        prior: What is known of pass rates.

    Returns:
        Chances, shape [num_more]; they never rise.

    Raises:
        ValueError: If the outcome cannot be.
    """
    if not 0 <= num_correct <= num_rollouts or num_rollouts < 1:
        raise ValueError(f"successes must lie between 0 and the rollouts, at least 1, got {num_correct}/{num_rollouts}")
    if num_more < 1 or 0 < num_correct < num_rollouts:
        return np.zeros(max(num_more, 0))
    hit, miss, spike = prior.a, prior.b, prior.never
    if num_correct:
        hit, miss, spike = prior.b, prior.a, prior.always
    # The chance of a pass rate from the Beta with only misses so far; the spike gives only misses for certain.
    unseen = prior.between * np.exp(betaln(hit, miss + num_rollouts) - betaln(hit, miss))
    if unseen == 0:
        return np.zeros(num_more)
    misses = miss + num_rollouts + np.arange(num_more)
    first = unseen / (unseen + spike) * hit / (hit + misses[0])
    # Every factor is below 1, so that gains never rise, rounding included: the greatest ones are the first ones.
    return np.asarray(first * np.cumprod(np.append(1.0, misses[:-1] / (hit + misses[1:]))))


def allocate_rollouts(
    num_rollouts_G: Sequence[int], num_correct_G: Sequence[int], budget: int, max_rollouts: int, prior: PassRates
) -> list[tuple[int, int]]:
    """Give further rollouts to groups: each one where its chance to make a group informative is greatest.

    No group more than doubles, so that outcomes are looked at before a group gets much. The chances of a group fall
    with every rollout, so that this greedy choice maximises the expected number of groups that become informative,
    among all choices within the budget in which no group more than doubles. Groups with the same outcome share.

    Args:
        num_rollouts_G: Rollouts of each group so far, shape [G].
        num_correct_G: How many of them were correct, shape [G].
        budget: Rollouts to give at most.
        max_rollouts: A group never has more than this, those so far included.
        prior: What is known of pass rates.

    Returns:
        (group, further rollouts, at least 1), ascending by group; together at most `budget`.
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
    """Fit the prior of pass rates to pilots of equal size, by penalised maximum likelihood.

    The penalty is a weak prior of its own (Dirichlet on the three weights, log-normal on the Beta's parameters), so
    that one pilot is enough for a proper answer and a few hundred override it.

    Args:
        num_rollouts: Rollouts of each pilot, n.
        num_correct_G: Successes of each pilot, shape [G]; none gives the weak prior.

    Returns:
        The prior; the same for the same numbers in any order.

    Raises:
        ValueError: If a pilot has more successes than rollouts, or fewer than none.
    """
    times_K = np.bincount(np.asarray(num_correct_G, np.int64), minlength=num_rollouts + 1)
    if times_K.size != num_rollouts + 1:
        raise ValueError(f"a pilot of {num_rollouts} rollouts cannot have {times_K.size - 1} successes")
    centre = np.log([*_PSEUDO_SHAPE, *(_PSEUDO_GROUPS[:2] / _PSEUDO_GROUPS[2])])
    found = minimize(
        _negative_log_posterior, centre, args=(times_K, centre), method="L-BFGS-B", bounds=[(-5.0, 5.0)] * 4
    )
    alpha, beta = np.exp(found.x[:2]).tolist()
    never, always, _ = np.exp(_log_weights(found.x)).tolist()
    return PassRates(alpha, beta, never, always)


def _log_weights(theta: FloatArray) -> FloatArray:
    """Return the log-probabilities of the spike at 0, the spike at 1 and the Beta."""
    logits = np.append(theta[2:], 0.0)
    return np.asarray(logits - logsumexp(logits))


def _negative_log_posterior(theta: FloatArray, times_K: IntArray, centre: FloatArray) -> float:
    """Return minus the penalised log-likelihood; binomial coefficients are constant and left out."""
    n = times_K.size - 1
    k = np.arange(n + 1)
    log_never, log_always, log_slab = _log_weights(theta)
    alpha, beta = np.exp(theta[:2])
    log_chance_K = log_slab + betaln(alpha + k, beta + n - k) - betaln(alpha, beta)
    log_chance_K[0] = np.logaddexp(log_chance_K[0], log_never)
    log_chance_K[n] = np.logaddexp(log_chance_K[n], log_always)
    penalty = ((theta[:2] - centre[:2]) ** 2).sum() / 2 - _PSEUDO_GROUPS @ _log_weights(theta)
    return float(penalty - times_K @ log_chance_K)
