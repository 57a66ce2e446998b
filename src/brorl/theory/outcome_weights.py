"""Outcome weights in expectation: what N changes in the gradient of a prompt, and what it does not.

The weights themselves are in `brorl.algorithms.outcome_weights`.

One prompt has pass rate p, N independent rollouts y_i with verdicts r_i in {0, 1}, c correct ones, and x = c/N. Its
gradient is g = (1/N) sum_i A_i s_i with A_i = w(N, c) (r_i - x) and the scores s_i = grad log pi(y_i).

*Mean.* Given the verdicts, the scores of correct rollouts are independent with mean grad p / p, and those of incorrect
ones with mean -grad p / (1-p). So E[g | c] = w(N, c) x(1-x) / (p(1-p)) grad p. With x(1-x) Binom(c; N, p) =
(1 - 1/N) p(1-p) Binom(c-1; N-2, p),

    E[g] = coef(N, p) grad p,    coef(N, p) = (1 - 1/N) E'[w(N, c)]

where E' takes c = 1 + Binom(N-2, p): one correct rollout, one incorrect, and N-2 draws. coef is the Bernstein
polynomial of degree N-2 in p whose coefficients are the weights. Every polynomial of that degree is the coef of exactly
one weight, and the derivatives of pass@1, ..., pass@(N-1) span them. Hence N rollouts give unbiased
gradients of the linear combinations of these N-1 objectives and of no others.

*Noise.* With the traces v_1 and v_0 of the score's covariance among correct and among incorrect responses,

    E|g|^2 - |E g|^2 = a |grad p|^2 + b_1 v_1 + b_0 v_0
    a   = (1 - 1/N) E'[w^2 x(1-x)] / (p(1-p)) - coef^2
    b_1 = (1 - 1/N) p(1-p) E'[w^2 (1-x)] / N
    b_0 = (1 - 1/N) p(1-p) E'[w^2 x] / N

The first term is the variance of E[g | c], the others are the mean of the variance given c.

*Difficulty.* In a softmax over correct and incorrect with log-odds z, p = 1/(1+e^-z) and dp/dz = p(1-p). So a prompt
moves its own log-odds with the weight coef(N, p) p(1-p), and its fraction of the gradient is its fraction of the sum of
these weights. The weight of MaxRL is (1-p) (1 - (1-p)^(N-1)): for large N the weight of a prompt is its failure rate.
This leaves out how prompts share parameters.

Source: derived here. `coef` is that of MaxRL (arXiv 2602.02710) and of PKPO (arXiv 2505.15201) at their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, logit
from scipy.stats import beta, binom

from brorl.theory.pass_rates import PassRates
from brorl.tree import FloatArray

BIN_EDGES = (1 / 512, 1 / 64, 1 / 16, 1 / 4, 3 / 4)
"""Pass rates between the bins of difficulty. A bin includes its lower edge; the outer ends are 0 and 1."""
_LOG_ODDS = np.arange(-20.0, 20.1, 0.2)
_EMPTY = 1e-9  # below this fraction, rounding decides the mean of a cell
_DEVIATIONS, _MIN_COUNTS = 10, 40  # counts further than this from the mean have no weight in float64


@dataclass(frozen=True)
class GradientMoments:
    """Mean and variance of one prompt's gradient, at G pass rates; each of shape [..., G]."""

    coefficient: FloatArray  # coef, the factor of grad p in the mean
    between: FloatArray  # a, the factor of |grad p|^2 in the variance: the noise of the number of correct rollouts
    correct: FloatArray  # b_1, the factor of the variance of the scores of correct responses
    incorrect: FloatArray  # b_0, the factor of the variance of the scores of incorrect responses

    def variance(
        self, squared_gradient: ArrayLike, correct_variance: ArrayLike, incorrect_variance: ArrayLike
    ) -> FloatArray:
        """Return E|g|^2 - |E g|^2, the trace of the gradient's covariance.

        Args:
            squared_gradient: |grad p|^2.
            correct_variance: v_1, trace of the covariance of grad log pi among correct responses.
            incorrect_variance: v_0, the same among incorrect responses.
        """
        signal, correct, incorrect = map(np.asarray, (squared_gradient, correct_variance, incorrect_variance))
        total: FloatArray = self.between * signal + self.correct * correct + self.incorrect * incorrect
        return total


def gradient_coefficient(weight_C: ArrayLike, pass_rate_G: ArrayLike) -> FloatArray:
    """Return coef(N, p): the expected gradient of a prompt is coef(N, p) grad p.

    Args:
        weight_C: w(N, c) for c = 0..N, shape [..., N + 1]. The entries at 0 and N have no effect.
        pass_rate_G: p in [0, 1], shape [G].

    Returns:
        coef, shape [..., G].

    Raises:
        ValueError: If N < 2, or a pass rate is outside [0, 1].
    """
    weight_C = _checked(weight_C)
    coefficient: FloatArray = (1 - 1 / (weight_C.shape[-1] - 1)) * _mean_over_others(weight_C, pass_rate_G)
    return coefficient


def gradient_moments(weight_C: ArrayLike, pass_rate_G: ArrayLike) -> GradientMoments:
    """Return the mean and the variance of a prompt's gradient.

    Args:
        weight_C: w(N, c) for c = 0..N, shape [..., N + 1].
        pass_rate_G: p in (0, 1), shape [G].

    Raises:
        ValueError: If N < 2, or a pass rate is not in (0, 1).
    """
    weight_C = _checked(weight_C)
    rate_G = np.asarray(pass_rate_G, np.float64)
    if not ((rate_G > 0) & (rate_G < 1)).all():
        raise ValueError("pass rates must be between 0 and 1; at 0 and 1 a prompt has no gradient")
    num_rollouts = weight_C.shape[-1] - 1
    kept, spread_G = 1 - 1 / num_rollouts, rate_G * (1 - rate_G)
    x_C = np.arange(num_rollouts + 1) / num_rollouts
    coefficient = kept * _mean_over_others(weight_C, rate_G)
    squared = weight_C**2
    return GradientMoments(
        coefficient=coefficient,
        between=kept * _mean_over_others(squared * x_C * (1 - x_C), rate_G) / spread_G - coefficient**2,
        correct=kept * spread_G * _mean_over_others(squared * (1 - x_C), rate_G) / num_rollouts,
        incorrect=kept * spread_G * _mean_over_others(squared * x_C, rate_G) / num_rollouts,
    )


def noise_to_rloo(weight_C: ArrayLike, pass_rate_G: ArrayLike, fraction_G: ArrayLike) -> FloatArray:
    """Return the relative noise of a batch's gradient divided by that of RLOO at the same N and prompts.

    Relative noise is the variance divided by the squared length of the mean. The model: the score variance v is the
    same for correct and incorrect responses and for all prompts, it is far above |grad p|^2, and grad p is p(1-p) times
    one direction. A batch then has variance v (b_1 + b_0) and mean coef p(1-p), both summed over prompts. With E'' the
    mean of E' over prompts with weights p(1-p), the ratio is

        E''[w^2] / E''[w]^2 = 1 + (standard deviation / mean)^2 of the weight

    It is at least 1, and 1 for RLOO. It is Kish's design effect: a batch has the noise of RLOO with this many times
    fewer prompts.

    Args:
        weight_C: w(N, c) >= 0 for c = 0..N, shape [..., N + 1].
        pass_rate_G: p in [0, 1], shape [G].
        fraction_G: Fraction of the prompts with this pass rate, >= 0, shape [G].

    Returns:
        The ratio, shape [...].

    Raises:
        ValueError: If no prompt has a pass rate between 0 and 1.

    Source: Kish, Survey Sampling (1965), for the effect of weights on variance.
    """
    first_G, second_G, spread_G = _weight_moments(weight_C, pass_rate_G, fraction_G)
    ratio: FloatArray = (second_G @ spread_G) / (first_G @ spread_G) ** 2
    return ratio


def noise_to_known_rates(weight_C: ArrayLike, pass_rate_G: ArrayLike, fraction_G: ArrayLike) -> FloatArray:
    """Return the relative noise of a batch's gradient divided by that of RLOO weighted with the exact coef(N, p).

    Both have the same mean. The ratio is the price of not knowing the pass rates: E''[w^2] / E''[E'[w]^2], at least 1.

    Args, Returns, Raises and the model are those of `noise_to_rloo`.
    """
    first_G, second_G, spread_G = _weight_moments(weight_C, pass_rate_G, fraction_G)
    ratio: FloatArray = (second_G @ spread_G) / (first_G**2 @ spread_G)
    return ratio


def rate_cells(rates: PassRates) -> tuple[FloatArray, FloatArray]:
    """Return pass rates and the fraction of the prompts at each: the Beta in narrow cells, and the spikes.

    No cell is in two bins of `BIN_EDGES`.

    Args:
        rates: A distribution of pass rates.

    Returns:
        G pass rates in [0, 1], ascending, each the mean of its cell, and their fractions with sum 1; each of shape [G].
    """
    edge_E = expit(np.unique(np.concatenate([_LOG_ODDS, logit(BIN_EDGES)])))
    edge_E[[0, -1]] = 0.0, 1.0
    fraction_G = np.diff(beta.cdf(edge_E, rates.a, rates.b))
    sum_G = np.diff(beta.cdf(edge_E, rates.a + 1, rates.b)) * rates.a / (rates.a + rates.b)
    middle_G = (edge_E[1:] + edge_E[:-1]) / 2
    mean_G = np.where(fraction_G > _EMPTY, sum_G / np.maximum(fraction_G, _EMPTY), middle_G)
    rate_G = np.concatenate([[0.0], np.clip(mean_G, edge_E[:-1], edge_E[1:]), [1.0]])
    return rate_G, np.concatenate([[rates.never], rates.between * fraction_G, [rates.always]])


def prompt_fraction(pass_rate_G: ArrayLike, fraction_G: ArrayLike) -> FloatArray:
    """Return the fraction of the prompts in each bin of `BIN_EDGES`.

    Args:
        pass_rate_G: p in [0, 1], shape [G].
        fraction_G: Fraction of the prompts with this pass rate, >= 0, shape [G].

    Returns:
        Fractions with sum 1, shape [B].
    """
    return _binned(np.asarray(fraction_G, np.float64), pass_rate_G)


def gradient_fraction(coefficient_G: ArrayLike, pass_rate_G: ArrayLike, fraction_G: ArrayLike) -> FloatArray:
    """Return the fraction of the gradient that goes to the prompts in each bin of `BIN_EDGES`.

    Args:
        coefficient_G: coef(N, p) of an estimator, >= 0, shape [..., G].
        pass_rate_G: p in [0, 1], shape [G].
        fraction_G: Fraction of the prompts with this pass rate, >= 0, shape [G].

    Returns:
        Fractions with sum 1, shape [..., B].

    Raises:
        ValueError: If no prompt has a gradient.
    """
    return _binned(gradient_weight(coefficient_G, pass_rate_G) * np.asarray(fraction_G), pass_rate_G)


def gradient_weight(coefficient_G: ArrayLike, pass_rate_G: ArrayLike) -> FloatArray:
    """Return coef(N, p) p(1-p), the weight of a prompt in the gradient of the log-odds, shape [..., G].

    Args:
        coefficient_G: coef(N, p), shape [..., G].
        pass_rate_G: p in [0, 1], shape [G].
    """
    rate_G = np.asarray(pass_rate_G, np.float64)
    weight: FloatArray = np.asarray(coefficient_G, np.float64) * rate_G * (1 - rate_G)
    return weight


def _weight_moments(
    weight_C: ArrayLike, pass_rate_G: ArrayLike, fraction_G: ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return E'[w] and E'[w^2], each of shape [..., G], and the prompts' fractions times p(1-p), with sum 1."""
    weight_C = _checked(weight_C)
    first_G, second_G = _mean_over_others(np.stack([weight_C, weight_C**2]), pass_rate_G)
    spread_G = gradient_weight(fraction_G, pass_rate_G)
    if not spread_G.sum() > 0:
        raise ValueError("every pass rate is 0 or 1, so there is no gradient")
    return first_G, second_G, spread_G / spread_G.sum()


def _checked(weight_C: ArrayLike) -> FloatArray:
    weight = np.asarray(weight_C, np.float64)
    if weight.ndim < 1 or weight.shape[-1] < 3:
        raise ValueError(f"weights for c = 0..N with N >= 2 are needed, got an array of shape {weight.shape}")
    return weight


def _mean_over_others(value_C: FloatArray, pass_rate_G: ArrayLike) -> FloatArray:
    """Return E'[value(c)] with c = 1 + Binom(N-2, p), shape [..., G].

    Only counts near the mean are summed, so the cost grows with sqrt(N).
    """
    rate_G = np.asarray(pass_rate_G, np.float64)
    if rate_G.size and not (rate_G.min() >= 0 and rate_G.max() <= 1):
        raise ValueError("pass rates must be in [0, 1]")
    others = value_C.shape[-1] - 3
    reach_G = np.ceil(_DEVIATIONS * np.sqrt(others * rate_G * (1 - rate_G))) + _MIN_COUNTS
    width = int(min(2 * reach_G.max(initial=0), others)) + 1
    first_G = np.clip(np.rint(others * rate_G - (width - 1) / 2), 0, others + 1 - width).astype(np.int64)
    count_GW = first_G[..., None] + np.arange(width)
    chance_GW = binom.pmf(count_GW, others, rate_G[..., None])
    mean: FloatArray = np.einsum("...gw,gw->...g", value_C[..., count_GW + 1], chance_GW)
    return mean


def _binned(amount_G: FloatArray, pass_rate_G: ArrayLike) -> FloatArray:
    """Return the fraction of the amounts in each bin, shape [..., B]."""
    total = amount_G.sum(-1, keepdims=True)
    if not (total > 0).all():
        raise ValueError("every pass rate is 0 or 1, so there is no gradient")
    in_bin_G = np.searchsorted(BIN_EDGES, np.asarray(pass_rate_G), side="right")
    fraction: FloatArray = (amount_G / total) @ np.eye(len(BIN_EDGES) + 1)[in_bin_G]
    return fraction
