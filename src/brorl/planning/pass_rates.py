"""Pass rates of prompts from a pilot, and the fraction of groups that are kept at a different N.

A group is kept if 1 to m of its rollouts are correct: N - 1 keeps all mixed groups, `dynamic_sampling.max_pass_rate`
fewer.

Up to the pilot's n rollouts, the fractions come straight from the counts and are unbiased. Beyond n, they come from a
fit: pass rates follow a Beta(a, b), with spikes at exactly 0 and exactly 1. Counts among n rollouts cannot distinguish
a pass rate of 0 from one far below 1 / n, so report both readings beyond n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, gammaln
from scipy.stats import binom

from brorl.arrays import FloatArray, IntArray

Numbers = NDArray[np.floating[Any]] | float

_LOGIT_MEANS = np.linspace(-9.0, 9.0, 49)
_LOG_SIZES = np.linspace(np.log(0.03), np.log(1000.0), 29)
_ZOOMS = 12  # rounds with a 5 x 5 grid around the best point, each half as wide as the last
_RATE_LOGITS = np.linspace(-9.0, 9.0, 181)
_EM_ROUNDS = 2000


@dataclass(frozen=True)
class PassRates:
    """The distribution of pass rates over prompts: Beta(a, b), with spikes at 0 and 1."""

    a: float  # first Beta parameter, > 0
    b: float  # second Beta parameter, > 0
    never: float = 0.0  # fraction of prompts whose pass rate is exactly 0
    always: float = 0.0  # fraction of prompts whose pass rate is exactly 1

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise ValueError(f"a Beta distribution needs a > 0 and b > 0, got {self.a} and {self.b}")
        if min(self.never, self.always) < 0 or self.never + self.always > 1 + 1e-9:
            raise ValueError(
                f"the spikes must be fractions that add up to at most 1, got {self.never} and {self.always}"
            )

    @property
    def between(self) -> float:
        """Fraction of prompts whose pass rate follows the Beta."""
        return max(0.0, 1.0 - self.never - self.always)

    def kept(self, num_rollouts: int, max_correct: int) -> float:
        """Return the chance that 1 to m of N rollouts are correct, m < N."""
        return float(_kept(np.array([self.a]), np.array([self.b]), self.between, num_rollouts, max_correct)[0])

    def solved(self, num_rollouts: int) -> float:
        """Return the chance that at least one of N rollouts is correct."""
        return float(_solved(self.a, self.b, self.never, self.between, num_rollouts))

    def kept_after(self, correct_P: IntArray, pilot_rollouts: int, num_rollouts: int, max_correct: int) -> FloatArray:
        """Return each prompt's chance that 1 to m of N new rollouts are correct, given its n pilot rollouts: [P]."""
        from_beta_P = np.ones(correct_P.shape)
        log_K = _log_beta_binomial(np.array([self.a]), np.array([self.b]), pilot_rollouts)[0]
        for outcome, spike in ((0, self.never), (pilot_rollouts, self.always)):
            beta = self.between * np.exp(log_K[outcome])
            from_beta_P[correct_P == outcome] = beta / (beta + spike) if beta + spike > 0 else 0.0
        a_P = self.a + correct_P.astype(np.float64)
        b_P = self.b + pilot_rollouts - correct_P.astype(np.float64)
        return _kept(a_P, b_P, from_beta_P, num_rollouts, max_correct)


def fit_pass_rates(correct_P: IntArray, num_rollouts: int) -> PassRates:
    """Fit a Beta with spikes at 0 and 1 to the correct counts among n pilot rollouts, by maximum likelihood.

    Raises:
        ValueError: If no prompt is mixed, because the Beta then cannot be distinguished from the spikes.
    """
    histogram_1K = _histogram(correct_P, num_rollouts)[None]
    if not histogram_1K[0, 1:-1].any():
        raise ValueError(
            f"no prompt had both correct and incorrect rollouts among {num_rollouts}, so no pass rate can be fitted; "
            "take more rollouts or different prompts"
        )

    def fit(log_GK: FloatArray) -> list[FloatArray]:
        value_G1, spikes_G12 = _profile(log_GK, histogram_1K)
        return [value_G1[:, 0], spikes_G12[:, 0]]

    return _most_likely(num_rollouts, fit)


def fit_without_spikes(correct_P: IntArray, num_rollouts: int) -> PassRates:
    """Fit a plain Beta, so a prompt without a success has a small pass rate, never 0."""
    histogram_K = _histogram(correct_P, num_rollouts)
    return _most_likely(num_rollouts, lambda log_GK: [log_GK @ histogram_K, np.zeros((len(log_GK), 2))])


def fractions_of_any_shape(
    correct_P: IntArray, num_rollouts: int, wanted: IntArray, max_correct: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Predict fractions from the most likely distribution of any shape: weights on a grid of pass rates from 0 to 1.

    A Beta predicts too few mixed groups if low pass rates are still well above 0; this distribution does not. Its
    predictions far beyond n depend on a few prompts. Returns the fractions of groups that are kept and of prompts with
    a success for J numbers of rollouts, each with shape [J].

    Source: Kiefer and Wolfowitz, Annals of Mathematical Statistics 27 (1956); fitted by EM.
    """
    fraction_K = _histogram(correct_P, num_rollouts) / correct_P.size
    rate_G = np.concatenate([[0.0], 1 / (1 + np.exp(-_RATE_LOGITS)), [1.0]])
    chance_GK = binom(num_rollouts, rate_G[:, None]).pmf(np.arange(num_rollouts + 1))
    weight_G = np.full(rate_G.size, 1 / rate_G.size)
    for _ in range(_EM_ROUNDS):
        weight_G *= chance_GK @ (fraction_K / np.maximum(weight_G @ chance_GK, np.finfo(np.float64).tiny))
    above_GJ, solved_GJ = (binom(wanted, rate_G[:, None]).sf(least) for least in (max_correct, 0))
    return weight_G @ (solved_GJ - above_GJ), weight_G @ solved_GJ


def refit_fractions(
    correct_P: IntArray, num_rollouts: int, weight_BP: FloatArray, wanted: IntArray, max_correct: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Refit to B reweighted sets of prompts, on the initial grid only, and predict fractions from each fit.

    Returns the fractions of groups that are kept and of prompts with a success for J numbers of rollouts, each with
    shape [B, J].
    """
    histogram_BK = np.array([np.bincount(correct_P, weight_P, num_rollouts + 1) for weight_P in weight_BP], np.float64)
    a_G, b_G, log_GK = _grid(num_rollouts, _LOGIT_MEANS, _LOG_SIZES)
    value_GB, spikes_GB2 = _profile(log_GK, histogram_BK)
    best_B = value_GB.argmax(0)
    never_B1, always_B1 = spikes_GB2[best_B, np.arange(best_B.size)].T[..., None]
    a_B, b_B = a_G[best_B], b_G[best_B]
    between_B1 = 1.0 - never_B1 - always_B1
    sizes = zip(wanted.tolist(), max_correct.tolist(), strict=True)
    kept_BJ = np.stack([_kept(a_B, b_B, between_B1[:, 0], *size) for size in sizes], axis=1)
    return kept_BJ, _solved(a_B[:, None], b_B[:, None], never_B1, between_B1, wanted)


def _histogram(correct_P: IntArray, num_rollouts: int) -> FloatArray:
    if not correct_P.size or correct_P.min() < 0 or correct_P.max() > num_rollouts:
        raise ValueError(f"counts of correct rollouts must be between 0 and {num_rollouts}, for at least one prompt")
    return np.bincount(correct_P, minlength=num_rollouts + 1).astype(np.float64)


def _most_likely(num_rollouts: int, fit: Callable[[FloatArray], Sequence[FloatArray]]) -> PassRates:
    """Return the Beta and spikes with the greatest likelihood, on a grid that narrows around the best point.

    `fit` maps log-probabilities of the counts under G Betas, shape [G, n + 1], to log-likelihoods, shape [G], and
    spikes, shape [G, 2].
    """
    means, sizes = _LOGIT_MEANS, _LOG_SIZES
    steps = np.array([means[1] - means[0], sizes[1] - sizes[0]])
    for _ in range(_ZOOMS + 1):
        a_G, b_G, log_GK = _grid(num_rollouts, means, sizes)
        value_G, spikes_G2 = fit(log_GK)
        best = int(np.argmax(value_G))
        around = np.clip([np.log(a_G[best] / b_G[best]), np.log(a_G[best] + b_G[best])], [-12.0, -5.0], [12.0, 9.0])
        means, sizes = (center + step * np.linspace(-1, 1, 5) for center, step in zip(around, steps, strict=True))
        steps = steps / 2
    return PassRates(float(a_G[best]), float(b_G[best]), *spikes_G2[best].tolist())


def _grid(num_rollouts: int, means: FloatArray, sizes: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return a and b of G Betas, shape [G], and their log-probabilities of each count, shape [G, n + 1].

    Each pair of `means` (the logit of the mean) and `sizes` (the logarithm of a + b) gives one Beta.
    """
    logit_G, log_size_G = (x.ravel() for x in np.meshgrid(means, sizes))
    a_G, b_G = (np.exp(log_size_G) / (1 + np.exp(sign * logit_G)) for sign in (-1, 1))
    return a_G, b_G, _log_beta_binomial(a_G, b_G, num_rollouts)


def _log_beta_binomial(a_G: FloatArray, b_G: FloatArray, num_rollouts: int, least: int = 0) -> FloatArray:
    """Return the log-probability of `least` .. n correct rollouts under each of G Betas, shape [G, n - least + 1]."""
    k = np.arange(least, num_rollouts + 1)
    log_choose = gammaln(num_rollouts + 1) - gammaln(k + 1) - gammaln(num_rollouts - k + 1)
    above = betaln(a_G[:, None] + k, b_G[:, None] + num_rollouts - k)
    log_GK: FloatArray = log_choose + above - betaln(a_G, b_G)[:, None]
    return log_GK


def _profile(log_GK: FloatArray, histogram_BK: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Maximize the likelihood over the two spikes, for G Betas and B histograms.

    r_0 and r_n are the observed fractions of prompts with 0 and n correct; q_0 and q_n are the Beta's. The
    unconstrained optimum is a Beta with weight (1 - r_0 - r_n) / (1 - q_0 - q_n), and spikes for the rest. A spike that
    would be negative is set to 0, and the other spike is optimized given that.
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


def _kept(a_G: FloatArray, b_G: FloatArray, weight: Numbers, num_rollouts: int, max_correct: int) -> FloatArray:
    """Return the chance of 1 to m correct if pass rates are Beta(a, b) with this weight, else 0 or 1, shape [G]."""
    above_G = np.exp(_log_beta_binomial(a_G, b_G, num_rollouts, max_correct + 1)).sum(1)
    none_G = np.exp(betaln(a_G, b_G + num_rollouts) - betaln(a_G, b_G))
    chance_G: FloatArray = np.maximum(weight * (1.0 - above_G - none_G), 0.0)
    return chance_G


def _solved(a: Numbers, b: Numbers, never: Numbers, weight: Numbers, num_rollouts: IntArray | int) -> FloatArray:
    """Return the chance of a success among N rollouts under a Beta and a spike at 0. The arguments broadcast."""
    return np.asarray(1.0 - never - weight * np.exp(betaln(a, b + num_rollouts) - betaln(a, b)))
