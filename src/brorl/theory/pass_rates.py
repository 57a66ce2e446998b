"""Pass rates of prompts from a pilot: which share of groups will carry a signal at another N.

In: how many of n rollouts of each of P prompts were correct. Out: for any N the chance that a group has both
outcomes, and that it has a success. Up to n rollouts these are unbiased counts, with no model. Beyond n they follow
from a fit: pass rates are Beta(a, b), with a share of prompts at exactly 0 and another at exactly 1. Counts of n cannot
tell a prompt at exactly 0 from one far below 1 / n; whoever reports a share beyond n should report both readings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import betaln, gammaln
from scipy.stats import binom

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_LOGIT_MEANS = np.linspace(-9.0, 9.0, 49)
_LOG_SIZES = np.linspace(np.log(0.03), np.log(1000.0), 29)
_STARTS = 4
_RATE_LOGITS = np.linspace(-9.0, 9.0, 181)
_EM_ROUNDS = 2000


@dataclass(frozen=True)
class PassRates:
    """Distribution of pass rates over prompts: Beta(a, b), with spikes at 0 and at 1.

    Attributes:
        a: First parameter of the Beta, > 0.
        b: Second parameter of the Beta, > 0.
        never: Share of prompts whose pass rate is exactly 0.
        always: Share of prompts whose pass rate is exactly 1.
    """

    a: float
    b: float
    never: float = 0.0
    always: float = 0.0

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise ValueError(f"a Beta distribution needs a > 0 and b > 0, not {self.a} and {self.b}")
        if min(self.never, self.always) < 0 or self.never + self.always > 1 + 1e-9:
            raise ValueError(f"the spikes must be shares with a sum of at most 1, not {self.never} and {self.always}")

    @property
    def between(self) -> float:
        """Share of prompts whose pass rate follows the Beta."""
        return max(0.0, 1.0 - self.never - self.always)

    def informative(self, num_rollouts: int) -> float:
        """Return the chance that a group of N rollouts has both outcomes."""
        return float(_informative(np.array([[self.a, self.b, self.between]]), num_rollouts)[0])

    def solved(self, num_rollouts: int) -> float:
        """Return the chance that at least one of N rollouts is correct."""
        none = np.exp(betaln(self.a, self.b + num_rollouts) - betaln(self.a, self.b))
        return float(1.0 - self.never - self.between * none)

    def informative_after(self, correct_P: IntArray, pilot_rollouts: int, num_rollouts: int) -> FloatArray:
        """Return each prompt's chance that N fresh rollouts have both outcomes, given what its pilot gave.

        Args:
            correct_P: Number of correct rollouts of each prompt, shape [P].
            pilot_rollouts: n, out of so many.
            num_rollouts: N.

        Returns:
            Chances, shape [P].
        """
        a_P, b_P = self.a + correct_P, self.b + pilot_rollouts - correct_P
        from_beta_P = np.ones(correct_P.shape)
        for outcome, spike in ((0, self.never), (pilot_rollouts, self.always)):
            logprob = _log_beta_binomial(np.array([self.a]), np.array([self.b]), pilot_rollouts)[0, outcome]
            beta = self.between * np.exp(logprob)
            from_beta_P[correct_P == outcome] = beta / (beta + spike) if beta + spike > 0 else 0.0
        return _informative(np.stack([a_P, b_P, from_beta_P], axis=1), num_rollouts)


def fit_pass_rates(correct_P: IntArray, num_rollouts: int) -> PassRates:
    """Fit a Beta with spikes at 0 and 1 to the pilot's counts by maximum likelihood.

    Given a and b the best spikes have a closed form, so that the search is over the mean and the size a + b alone, from
    the best points of a grid.

    Args:
        correct_P: Number of correct rollouts of each prompt, shape [P].
        num_rollouts: n, out of so many.

    Returns:
        The fit.

    Raises:
        ValueError: If no prompt has both outcomes: nothing then tells the Beta from the spikes.
    """
    histogram = _histogram(correct_P, num_rollouts)
    if not histogram[1:-1].any():
        raise ValueError(
            f"no prompt had both correct and incorrect outcomes in {num_rollouts} rollouts, so no pass rate can be "
            "fitted; take more rollouts or other prompts"
        )
    a_G, b_G, log_GK = _grid(num_rollouts)
    value_G, _ = _profile(log_GK, histogram[None])
    best = np.argsort(-value_G[:, 0])[: 8 * _STARTS : 8]

    def loss(point: FloatArray) -> float:
        a, b = _parameters(*np.clip(point, [-12.0, -5.0], [12.0, 9.0]))
        value, _ = _profile(_log_beta_binomial(np.array([a]), np.array([b]), num_rollouts), histogram[None])
        return float(-value[0, 0])

    starts = [np.array([np.log(a_G[g] / b_G[g]), np.log(a_G[g] + b_G[g])]) for g in best]
    found = [minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-8}) for start in starts]
    point = min(found, key=lambda result: float(result.fun)).x
    a, b = _parameters(*np.clip(point, [-12.0, -5.0], [12.0, 9.0]))
    _, weights = _profile(_log_beta_binomial(np.array([a]), np.array([b]), num_rollouts), histogram[None])
    never, always = weights[0, 0]
    return PassRates(float(a), float(b), float(never), float(always))


def fit_without_spikes(correct_P: IntArray, num_rollouts: int) -> PassRates:
    """Fit a plain Beta: the reading in which every prompt without a success only has a small pass rate."""
    histogram = _histogram(correct_P, num_rollouts)
    a_G, b_G, log_GK = _grid(num_rollouts)
    start = int(np.argmax(log_GK @ histogram))

    def loss(point: FloatArray) -> float:
        a, b = _parameters(*np.clip(point, [-12.0, -5.0], [12.0, 9.0]))
        return float(-(_log_beta_binomial(np.array([a]), np.array([b]), num_rollouts)[0] @ histogram))

    point = np.array([np.log(a_G[start] / b_G[start]), np.log(a_G[start] + b_G[start])])
    found = minimize(loss, point, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-8})
    a, b = _parameters(*np.clip(found.x, [-12.0, -5.0], [12.0, 9.0]))
    return PassRates(float(a), float(b))


def shares_of_any_shape(correct_P: IntArray, num_rollouts: int, wanted: IntArray) -> tuple[FloatArray, FloatArray]:
    """Predict shares from the most likely distribution of pass rates of any shape: weights on a grid, 0 and 1 included.

    Where pass rates keep away from 0 without being 0, a Beta promises too little; this one does not, but what it says
    far beyond n hangs on a few prompts.

    Args:
        correct_P: Number of correct rollouts of each prompt, shape [P].
        num_rollouts: n, out of so many.
        wanted: Numbers of rollouts N to predict for, shape [J].

    Returns:
        The shares of informative groups and of prompts with a success, each of shape [J].

    Source: Kiefer and Wolfowitz, Annals of Mathematical Statistics 27 (1956); by EM.
    """
    share_K = _histogram(correct_P, num_rollouts) / correct_P.size
    rate_G = np.concatenate([[0.0], 1 / (1 + np.exp(-_RATE_LOGITS)), [1.0]])
    chance_GK = binom(num_rollouts, rate_G[:, None]).pmf(np.arange(num_rollouts + 1))
    weight_G = np.full(rate_G.size, 1 / rate_G.size)
    for _ in range(_EM_ROUNDS):
        weight_G *= chance_GK @ (share_K / np.maximum(weight_G @ chance_GK, np.finfo(np.float64).tiny))
    none_GJ, all_GJ = (1 - rate_G[:, None]) ** wanted, rate_G[:, None] ** wanted
    return weight_G @ (1 - none_GJ - all_GJ), weight_G @ (1 - none_GJ)


def refit_informative(
    correct_P: IntArray, num_rollouts: int, weight_BP: FloatArray, wanted: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Refit on reweighted prompts, many times at once, on the grid alone.

    Args:
        correct_P: Number of correct rollouts of each prompt, shape [P].
        num_rollouts: n, out of so many.
        weight_BP: Weight of each prompt in each of B replicates, shape [B, P].
        wanted: Numbers of rollouts to predict for, shape [J].

    Returns:
        The shares of informative groups and of prompts with a success, each of shape [B, J].
    """
    histogram_BK = np.zeros((len(weight_BP), num_rollouts + 1))
    for histogram_K, weight_P in zip(histogram_BK, weight_BP, strict=True):
        histogram_K[:] = np.bincount(correct_P, weights=weight_P, minlength=num_rollouts + 1)
    a_G, b_G, log_GK = _grid(num_rollouts)
    value_GB, weight_GB2 = _profile(log_GK, histogram_BK)
    best_B = value_GB.argmax(0)
    never_B, always_B = weight_GB2[best_B, np.arange(best_B.size)].T
    a_B, b_B, between_B = a_G[best_B], b_G[best_B], 1.0 - never_B - always_B
    parameters_B3 = np.stack([a_B, b_B, between_B], axis=1)
    informative_BJ = np.stack([_informative(parameters_B3, int(n)) for n in wanted], axis=1)
    none_BJ = np.exp(betaln(a_B[:, None], b_B[:, None] + wanted) - betaln(a_B, b_B)[:, None])
    return informative_BJ, 1.0 - never_B[:, None] - between_B[:, None] * none_BJ


def informative_in_subset(correct_P: IntArray, pilot_rollouts: int, num_rollouts: int) -> FloatArray:
    """Return the chance that N of each prompt's n pilot rollouts, drawn without replacement, have both outcomes.

    1 - [C(n - k, N) + C(k, N)] / C(n, N): the unbiased estimate of a fresh group's chance, for N <= n.

    Args:
        correct_P: k, number of correct rollouts of each prompt, shape [P].
        pilot_rollouts: n.
        num_rollouts: N <= n.

    Returns:
        Chances, shape [P].
    """
    none_P = _drawn_from(pilot_rollouts - correct_P, pilot_rollouts, num_rollouts)
    return 1.0 - none_P - _drawn_from(correct_P, pilot_rollouts, num_rollouts)


def solved_in_subset(correct_P: IntArray, pilot_rollouts: int, num_rollouts: int) -> FloatArray:
    """Return the chance that N of each prompt's n pilot rollouts hold a success: the unbiased estimate of pass@N."""
    return 1.0 - _drawn_from(pilot_rollouts - correct_P, pilot_rollouts, num_rollouts)


def _drawn_from(part_P: IntArray, total: int, drawn: int) -> FloatArray:
    """Return C(part, drawn) / C(total, drawn): the chance that all that is drawn comes from a part of the total."""
    if drawn > total:
        raise ValueError(f"a subset of {drawn} rollouts cannot be drawn from {total}; use the fit beyond the pilot")
    enough_P = part_P >= drawn
    part_P = np.where(enough_P, part_P, drawn)
    log_P = gammaln(part_P + 1) - gammaln(part_P - drawn + 1) - gammaln(total + 1) + gammaln(total - drawn + 1)
    return np.where(enough_P, np.exp(log_P), 0.0)


def _histogram(correct_P: IntArray, num_rollouts: int) -> FloatArray:
    if not correct_P.size or correct_P.min() < 0 or correct_P.max() > num_rollouts:
        raise ValueError(f"counts of correct rollouts must lie between 0 and {num_rollouts}, for one prompt at least")
    return np.bincount(correct_P, minlength=num_rollouts + 1).astype(np.float64)


def _parameters(logit_mean: float, log_size: float) -> tuple[float, float]:
    """Return a and b of a Beta from the logit of its mean and the logarithm of a + b."""
    return float(np.exp(log_size) / (1 + np.exp(-logit_mean))), float(np.exp(log_size) / (1 + np.exp(logit_mean)))


@lru_cache(maxsize=4)
def _grid(num_rollouts: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return a and b of G Betas, shape [G], and their beta-binomial log-probabilities, shape [G, n + 1]."""
    mean, size = (x.ravel() for x in np.meshgrid(_LOGIT_MEANS, _LOG_SIZES))
    a_G, b_G = np.exp(size) / (1 + np.exp(-mean)), np.exp(size) / (1 + np.exp(mean))
    return a_G, b_G, _log_beta_binomial(a_G, b_G, num_rollouts)


def _log_beta_binomial(a_G: FloatArray, b_G: FloatArray, num_rollouts: int) -> FloatArray:
    """Return the log-probability of each count 0 .. n, shape [G, n + 1]."""
    k = np.arange(num_rollouts + 1)
    log_choose = gammaln(num_rollouts + 1) - gammaln(k + 1) - gammaln(num_rollouts - k + 1)
    above = betaln(a_G[:, None] + k, b_G[:, None] + num_rollouts - k)
    log_GK: FloatArray = log_choose + above - betaln(a_G, b_G)[:, None]
    return log_GK


def _profile(log_GK: FloatArray, histogram_BK: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Maximise the likelihood over the two spikes, for G Betas and B histograms.

    With r the observed and q the Beta's shares of the outcomes 0 and n, the unconstrained best is a Beta of weight
    (1 - r_0 - r_n) / (1 - q_0 - q_n), and spikes for the rest. Where a spike would be negative it is 0, and the other
    one is the best that is left.

    Returns:
        Log-likelihoods, shape [G, B], and the spikes at 0 and at 1, shape [G, B, 2].
    """
    total_B = histogram_BK.sum(1)
    r0, rn = histogram_BK[:, 0] / total_B, histogram_BK[:, -1] / total_B
    q0, qn = np.exp(log_GK[:, :1]), np.exp(log_GK[:, -1:])
    middle_GB = log_GK[:, 1:-1] @ histogram_BK[:, 1:-1].T

    best_value = np.full(middle_GB.shape, -np.inf)
    best_spikes = np.zeros((*middle_GB.shape, 2))
    tiny = np.finfo(np.float64).tiny
    weights = (
        (1 - r0 - rn) / np.maximum(1 - q0 - qn, tiny),
        (1 - r0) / np.maximum(1 - q0, tiny),
        (1 - rn) / np.maximum(1 - qn, tiny),
        np.ones_like(middle_GB),
    )
    for (at_0, at_n), weight in zip(((True, True), (True, False), (False, True), (False, False)), weights, strict=True):
        never = r0 - weight * q0 if at_0 else np.zeros_like(middle_GB)
        always = rn - weight * qn if at_n else np.zeros_like(middle_GB)
        p0, pn = never + weight * q0, always + weight * qn
        value = middle_GB + total_B * (
            (1 - r0 - rn) * _log(weight) + np.where(r0 > 0, r0 * _log(p0), 0) + np.where(rn > 0, rn * _log(pn), 0)
        )
        allowed = (never >= 0) & (always >= 0) & (weight <= 1 + 1e-12) & (value > best_value)
        best_value = np.where(allowed, value, best_value)
        best_spikes = np.where(allowed[..., None], np.stack([never, always], -1), best_spikes)
    return best_value, best_spikes


def _log(x: FloatArray) -> FloatArray:
    safe: FloatArray = np.maximum(x, np.finfo(np.float64).tiny)
    return np.log(safe)


def _informative(parameters_B3: FloatArray, num_rollouts: int) -> FloatArray:
    """Chance of both outcomes among N under Betas (a, b) of weight w, shape [B]."""
    a, b, weight = parameters_B3.T
    all_correct = np.exp(betaln(a + num_rollouts, b) - betaln(a, b))
    none_correct = np.exp(betaln(a, b + num_rollouts) - betaln(a, b))
    chance_B: FloatArray = np.maximum(weight * (1.0 - all_correct - none_correct), 0.0)
    return chance_B
