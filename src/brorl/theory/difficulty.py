"""The fraction of the gradient by difficulty: which prompts an estimator trains on.

In: pass rates of prompts, one for each or a fitted distribution, and coef(N, p) of an estimator. Out: the fraction of
the prompts, and the fraction of the gradient, in bins of the pass rate.

The gradient of a prompt is coef(N, p) grad p. In a softmax over correct and incorrect with log-odds z, p = 1/(1+e^-z)
and dp/dz = p(1-p). So a prompt moves its own log-odds with the weight coef(N, p) p(1-p), and its fraction of the
gradient is its fraction of the sum of these weights. The weight of MaxRL is (1-p) (1 - (1-p)^(N-1)): for large N a
prompt counts as much as it fails. The share leaves out how prompts share parameters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit
from scipy.stats import beta

from brorl.theory.pass_rates import PassRates

FloatArray = NDArray[np.float64]

BIN_EDGES = (1 / 512, 1 / 64, 1 / 16, 1 / 4, 3 / 4)
"""Pass rates between the bins of difficulty; the first bin starts at 0, the last one ends at 1."""
_LOG_ODDS = np.arange(-20.0, 20.1, 0.2)
_EMPTY = 1e-9  # below this fraction, rounding decides the mean of a cell


def rate_cells(rates: PassRates, edges: tuple[float, ...] = BIN_EDGES) -> tuple[FloatArray, FloatArray]:
    """Return pass rates and the fraction of the prompts at each: the Beta in narrow cells, and the spikes.

    Args:
        rates: A distribution of pass rates.
        edges: Pass rates at which a cell must end.

    Returns:
        G pass rates in [0, 1], ascending, each the mean of its cell, and their fractions with sum 1; each of shape [G].
    """
    edge_E = expit(np.unique(np.concatenate([_LOG_ODDS, logit(edges)])))
    edge_E[[0, -1]] = 0.0, 1.0
    share_G = np.diff(beta.cdf(edge_E, rates.a, rates.b))
    sum_G = np.diff(beta.cdf(edge_E, rates.a + 1, rates.b)) * rates.a / (rates.a + rates.b)
    middle_G = (edge_E[1:] + edge_E[:-1]) / 2
    mean_G = np.where(share_G > _EMPTY, sum_G / np.maximum(share_G, _EMPTY), middle_G)
    rate_G = np.concatenate([[0.0], np.clip(mean_G, edge_E[:-1], edge_E[1:]), [1.0]])
    return rate_G, np.concatenate([[rates.never], rates.between * share_G, [rates.always]])


def prompt_fraction(pass_rate_G: ArrayLike, share_G: ArrayLike, edges: tuple[float, ...] = BIN_EDGES) -> FloatArray:
    """Return the fraction of the prompts in each bin of difficulty.

    Args:
        pass_rate_G: p in [0, 1], shape [G].
        share_G: Fraction of the prompts with this pass rate, >= 0, shape [G].
        edges: Pass rates between the bins, ascending, B - 1 of them. A bin includes its lower edge.

    Returns:
        Shares with sum 1, shape [B].
    """
    return _binned(np.asarray(share_G, np.float64), pass_rate_G, edges)


def gradient_fraction(
    coefficient_G: ArrayLike, pass_rate_G: ArrayLike, share_G: ArrayLike, edges: tuple[float, ...] = BIN_EDGES
) -> FloatArray:
    """Return the fraction of the gradient that goes to the prompts in each bin of difficulty.

    Args:
        coefficient_G: coef(N, p) of an estimator, >= 0, shape [..., G].
        pass_rate_G: p in [0, 1], shape [G].
        share_G: Fraction of the prompts with this pass rate, >= 0, shape [G].
        edges: Pass rates between the bins, ascending, B - 1 of them. A bin includes its lower edge.

    Returns:
        Shares with sum 1, shape [..., B].

    Raises:
        ValueError: If no prompt has a gradient.
    """
    return _binned(gradient_weight(coefficient_G, pass_rate_G) * np.asarray(share_G), pass_rate_G, edges)


def gradient_weight(coefficient_G: ArrayLike, pass_rate_G: ArrayLike) -> FloatArray:
    """Return coef(N, p) p(1-p), the weight of a prompt in the gradient of the log-odds, shape [..., G].

    Args:
        coefficient_G: coef(N, p), shape [..., G].
        pass_rate_G: p in [0, 1], shape [G].
    """
    rate_G = np.asarray(pass_rate_G, np.float64)
    weight: FloatArray = np.asarray(coefficient_G, np.float64) * rate_G * (1 - rate_G)
    return weight


def _binned(amount_G: FloatArray, pass_rate_G: ArrayLike, edges: tuple[float, ...]) -> FloatArray:
    """Return the fraction of the amounts in each bin, shape [..., B]."""
    total = amount_G.sum(-1, keepdims=True)
    if not (total > 0).all():
        raise ValueError("every pass rate is 0 or 1, so there is no gradient")
    in_bin_G = np.searchsorted(edges, np.asarray(pass_rate_G), side="right")
    fraction: FloatArray = (amount_G / total) @ np.eye(len(edges) + 1)[in_bin_G]
    return fraction
