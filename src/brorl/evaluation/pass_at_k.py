"""pass@k and worst@k: the chance that at least one, or all, of k responses to a prompt are correct.

The estimates are unbiased: 1 correct response out of 4 gives pass@2 = 1/2. Counts above n and k above n are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import newton
from scipy.special import ndtri

from brorl.arrays import FloatArray, IntArray
from brorl.format import Estimate


def pass_at_k(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> FloatArray:
    """Estimate pass@k of each prompt from c correct responses out of n: 1 - C(n - c, k) / C(n, k).

    Source: Codex (arXiv 2107.03374, Eq. 1).
    """
    num_correct = _checked(num_correct_P, num_rollouts, k)
    return 1 - _all_drawn_from(num_rollouts, k)[num_rollouts - num_correct]


def pass_at_k_of_each(num_correct_P: NDArray[np.int64], num_rollouts_P: NDArray[np.int64], k: int) -> FloatArray:
    """Estimate pass@k of each prompt with at least k responses, in order; n may differ between prompts."""
    enough_P = num_rollouts_P >= k
    value_P = np.empty(num_correct_P.size)
    for n in np.unique(num_rollouts_P[enough_P]).tolist():
        value_P[num_rollouts_P == n] = pass_at_k(num_correct_P[num_rollouts_P == n], n, k)
    return value_P[enough_P]


def worst_at_k(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> FloatArray:
    """Estimate worst@k of each prompt, the chance that all k responses are correct: C(c, k) / C(n, k).

    pass@k shows how many prompts the model can solve; worst@k shows how reliably it solves them.

    Source: worst@k is from IsoCompute (arXiv 2603.12151); the estimator follows Codex (arXiv 2107.03374, Eq. 1).
    """
    return _all_drawn_from(num_rollouts, k)[_checked(num_correct_P, num_rollouts, k)]


def _checked(num_correct_P: Sequence[int] | NDArray[np.int64], num_rollouts: int, k: int) -> NDArray[np.int64]:
    num_correct = np.asarray(num_correct_P, np.int64)
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"k must be between 1 and the number of samples {num_rollouts}, got {k}")
    if ((num_correct < 0) | (num_correct > num_rollouts)).any():
        raise ValueError(f"counts of correct samples must be between 0 and {num_rollouts}, got {num_correct}")
    return num_correct


def _all_drawn_from(num_rollouts: int, k: int) -> FloatArray:
    """Return C(m, k) / C(n, k), the chance that k of n items are all among m given ones; m = 0 .. n, shape [n + 1]."""
    # C(m, k) / C(n, k) = product over j = m + 1 .. n of (1 - k / j)
    factor_J = np.maximum(1 - k / np.arange(1, num_rollouts + 1), 0.0)
    return np.append(1.0, np.cumprod(factor_J[::-1]))[::-1]


_TAIL = 0.025  # the chance that the truth is beyond one end of the interval

# Step size and end point of the trapezoidal rule in `_chance_at_most`. Its relative error is below 1e-7 for every P.
_STEP, _END = 0.5, 8.5


def mean_with_interval(value_P: FloatArray) -> Estimate:
    """Average estimates over prompts, with a 95% confidence interval for the mean over the population of prompts.

    To the P values, add one that represents the prompts not drawn: 0 for the low end, 1 for the high end.
    Weight the P + 1 values at random, with all weights that sum to 1 equally likely (a flat Dirichlet distribution).
    The ends are the 2.5% and 97.5% quantiles of the weighted mean. Raising a value never lowers an end. The interval
    contains the mean, because the density of a weighted mean is log-concave (Grünbaum). If all values are 0 or 1, it is
    the Clopper-Pearson interval. The quantiles are computed without random numbers; docs/explanation/intervals.md shows
    measured coverage.

    Source: Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable", Mathematical Methods of Statistics 14 (2005); as a bound in Learned-Miller and Thomas, arXiv 1905.06208.
    """
    if not value_P.size or not ((value_P >= 0) & (value_P <= 1)).all():
        raise ValueError(f"a mean over prompts needs at least one value, each from 0 to 1, got {value_P}")
    return Estimate(float(value_P.mean()), _low_end(value_P), 1 - _low_end(1 - value_P))


def _low_end(value_P: FloatArray) -> float:
    """Return the 2.5% quantile of the randomly weighted mean of the values and a 0."""
    value_J, count_J = np.unique(value_P, return_counts=True)
    return _low_quantile(tuple(value_J.tolist()), tuple(count_J.tolist()))


@lru_cache(maxsize=4096)  # a comparison shows the interval of the same score in several tables
def _low_quantile(values: tuple[float, ...], counts: tuple[int, ...]) -> float:
    if values[-1] == 0:
        return 0.0
    value_J = np.array([*values, 0.0])
    count_J = np.array([*counts, 1])
    total = count_J.sum()
    expected = count_J @ value_J / total
    variance = (count_J @ value_J**2 / total - expected**2) / (total + 1)
    spread = np.log1p(variance / expected**2) ** 0.5  # start from the log-normal with these moments
    start = np.log(expected) - spread**2 / 2 + ndtri(_TAIL) * spread

    def excess(log_mean: float) -> float:
        # On a log and normal-quantile scale the distribution is nearly linear, so the secant method needs few steps.
        chance = _chance_at_most(np.exp(log_mean), value_J, count_J)
        return float(ndtri(np.clip(chance, 1e-300, 1 - 1e-15)) - ndtri(_TAIL))

    tolerance = min(1e-6, 1e-4 * spread)  # of the log; a narrow distribution needs more precision
    return float(np.exp(newton(excess, start, x1=start + spread / 8, tol=tolerance)))


def _chance_at_most(mean: float, value_J: FloatArray, count_J: IntArray) -> float:
    """Return the chance that the randomly weighted mean of the values is at most `mean`.

    Flat Dirichlet weights are exponential variables divided by their sum. So this is the chance that S <= 0, where S is
    the sum over distinct values of (value - mean) g, and g has a gamma distribution with shape `count`. By Fourier
    inversion it is the integral of exp(f(z)) / (2 pi i), f(z) = log E[exp(z S)] - log(-z), along any line from the
    lower to the upper half-plane that crosses the real axis between the first pole below 0 and 0.

    We follow the path of steepest descent from the saddle point, along which f stays real and falls by u^2 / 2. The
    upper half-plane contains exactly one such path, because f' has a positive imaginary part there.
    Integration by parts leaves the smooth integrand u exp(-u^2 / 2) Im z(u), for which 16 nodes suffice.
    """
    excess_J = value_J - mean
    saddle, width = _saddle_point(excess_J, count_J)
    peak = -(count_J @ np.log1p(-excess_J * saddle)) - np.log(-saddle)
    total = 0.0
    z = complex(saddle)
    slope = 1j * width  # dz/du
    ahead = z + _STEP * slope
    for u in np.arange(_STEP, _END, _STEP).tolist():
        z_before, slope_before, z = z, slope, ahead
        for _ in range(20):  # Newton's method, which takes two or three steps
            factor_J = 1 - excess_J * z
            value = -(count_J @ np.log(factor_J)) - np.log(-z)
            derivative = count_J @ (excess_J / factor_J) - 1 / z
            change = (value - peak + u**2 / 2) / derivative
            z -= change
            if abs(change) < 1e-4 * abs(z - saddle):  # convergence is quadratic: the rest is near 1e-8
                break
        total += u * np.exp(-(u**2) / 2) * z.imag
        slope = -u / derivative
        ahead = 5 * z_before - 4 * z + _STEP * (4 * slope + 2 * slope_before)  # extrapolate the cubic through both
    return float(np.exp(peak) * _STEP / np.pi * total)


def _saddle_point(excess_J: FloatArray, count_J: IntArray) -> tuple[float, float]:
    """Find the minimum of f between its first pole below 0 and 0. Return its z, and the width 1 / sqrt(f'') there.

    On that interval f is a sum of terms -log(linear function), hence self-concordant: damped Newton steps stay in the
    interval and converge from any start.

    Source: Nesterov and Nemirovskii, "Interior-Point Polynomial Algorithms in Convex Programming" (1994), section 2.2.
    """
    total = count_J @ excess_J
    square = count_J @ excess_J**2
    z = max((-total - (total**2 + 4 * square) ** 0.5) / (2 * square), 0.5 / excess_J.min())  # exact for a normal S
    distance = np.inf
    while distance > 1e-6:
        pull_J = excess_J / (1 - excess_J * z)
        slope = count_J @ pull_J - 1 / z
        curvature = count_J @ pull_J**2 + 1 / z**2
        distance = abs(slope) / curvature**0.5
        z -= slope / curvature / (1 + distance)
    return float(z), float(curvature**-0.5)
