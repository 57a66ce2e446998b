"""A sigmoid fit of the best number of rollouts against the budget.

In: scores of arms at evaluation points, and their bootstrap resamples. Out: log2 N = low + (high - low) / (1 +
exp(-slope (log C - middle))) for the budget C, fitted by least squares, or the reason why the data support no fit.
The levels lie between the smallest and the largest N of the arms and the middle among the evaluation points: the fit
does not extrapolate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from brorl.evaluation.pass_at_k import Estimate, FloatArray
from brorl.format import plain

_NUM_MIDDLES = 81
_NUM_SLOPES = 24
_STEEPEST = 8.0  # over the smallest gap between points: a step, as far as the points can resolve it
_MIN_POINTS = 5
_MIN_DIFFERENT = 3  # so at least one of them lies inside the sweep
_MUST_RISE = 0.95  # fraction of resamples
_WIDEST = 0.5  # of the range of log budgets
_NUM_FITS = 500  # of the resamples: fits take longer than means
_TIE = 1e-12


@dataclass(frozen=True)
class Sigmoid:
    """The best N as a function of the budget.

    Attributes:
        low: log2 N far below the midpoint.
        high: log2 N far above it.
        slope: Per unit of log C (natural).
        midpoint: Budget at half of the rise, with a 95% bootstrap interval.
    """

    low: float
    high: float
    slope: float
    midpoint: Estimate

    def num_rollouts_at(self, budget: float) -> float:
        """Return the fitted best N at a budget."""
        parameters = (np.array(v) for v in (self.low, self.high, self.slope, log(self.midpoint.value)))
        return float(2 ** sigmoid_curve(np.array(log(budget)), *parameters))


@dataclass(frozen=True, eq=False)
class SigmoidFits:
    """The best curve for each of B sets of numbers.

    Attributes:
        low_B: Level on the left, shape [B].
        high_B: Level on the right; equal to `low_B` if nothing that rises fits better than a constant.
        slope_B: Steepness.
        middle_B: Position of half of the rise.
        squared_error_B: Squared error that remains, summed over points.
    """

    low_B: FloatArray
    high_B: FloatArray
    slope_B: FloatArray
    middle_B: FloatArray
    squared_error_B: FloatArray


def fit_best_rollouts(
    eval_points: Sequence[float],
    num_rollouts_A: Sequence[int | None],
    mean_AM: FloatArray,
    drawn_BAM: FloatArray,
    matched_AM: NDArray[np.bool_],
) -> tuple[Sigmoid | None, str | None]:
    """Fit the best N against the budget, or return why the data do not support a fit.

    They support one with at least 5 evaluation points at which arms of two or more N are matched; at least 3 different
    best Ns, so that one is not at an end of the sweep; a fit that rises in 95% of the resamples; and a midpoint whose
    95% interval touches neither the first nor the last evaluation point and spans at most half of the range of log
    budgets. "Best" is the highest mean, whether or not its lead is shown: the resamples measure the noise of the order.

    Args:
        eval_points: Budgets, rising, M of them.
        num_rollouts_A: N of each arm; None for an adaptive one, which is left out.
        mean_AM: Mean score of each arm at each evaluation point, shape [A, M].
        drawn_BAM: The same in B resamples, shape [B, A, M].
        matched_AM: Whether an arm is compared there, shape [A, M].

    Returns:
        The fit and None, or None and the reason.
    """
    numbered = [a for a, number in enumerate(num_rollouts_A) if number is not None]
    number_A = np.array([num_rollouts_A[a] or 1 for a in numbered], np.float64)
    compared_AM = matched_AM[numbered]
    used = [m for m in range(len(eval_points)) if np.unique(number_A[compared_AM[:, m]]).size > 1]
    if len(used) < _MIN_POINTS:
        return None, (
            f"{len(used)} evaluation points with two or more numbers of rollouts matched; a fit needs {_MIN_POINTS}"
        )
    log_number_A = np.log2(number_A)

    def log_best(score_BAM: FloatArray) -> FloatArray:
        """Return log2 N of the best arm of each used evaluation point, shape [B, M]."""
        compared_BAM = np.where(compared_AM, score_BAM[:, numbered], -np.inf)
        return np.asarray(log_number_A[compared_BAM.argmax(1)[:, used]])

    y_1M = log_best(mean_AM[None])
    if (num_different := np.unique(y_1M).size) < _MIN_DIFFERENT:
        return None, (
            f"only {num_different} different numbers of rollouts are best at some evaluation point; a fit needs "
            f"{_MIN_DIFFERENT}"
        )
    x_M = np.log([eval_points[m] for m in used])
    return _supported_fit(
        x_M, y_1M, log_best(drawn_BAM[:_NUM_FITS]), float(log_number_A.min()), float(log_number_A.max())
    )


def _supported_fit(
    x_M: FloatArray, y_1M: FloatArray, y_BM: FloatArray, least: float, most: float
) -> tuple[Sigmoid | None, str | None]:
    """Fit the numbers and their resamples; the resamples give the certainty of the rise and of the midpoint."""
    fit, drawn = fit_sigmoids(x_M, y_1M, least, most), _fit_distinct(x_M, y_BM, least, most)
    rising_B = drawn[:, 0] > _TIE
    if fit.high_B[0] - fit.low_B[0] <= _TIE or rising_B.mean() < _MUST_RISE:
        rises = f"the best N rises with the budget in {rising_B.mean():.1%} of resamples"
        return None, f"{rises}; a fit needs {_MUST_RISE:.0%}"
    low, high = np.quantile(drawn[rising_B, 1], [0.025, 0.975])
    at_end = low < x_M[0] + _TIE or high > x_M[-1] - _TIE  # the rise may begin before the points or end after them
    if at_end or high - low > _WIDEST * (x_M[-1] - x_M[0]):
        least_budget, most_budget, first, last = (plain(np.exp(v), 4) for v in (low, high, x_M[0], x_M[-1]))
        return None, (
            f"the midpoint of the rise is not known: it lies anywhere between budgets of {least_budget} and "
            f"{most_budget} (95%), with evaluation points from {first} to {last}"
        )
    middle = float(fit.middle_B[0])
    midpoint = Estimate(*(float(np.exp(v)) for v in (middle, min(low, middle), max(high, middle))))
    return Sigmoid(float(fit.low_B[0]), float(fit.high_B[0]), float(fit.slope_B[0]), midpoint), None


def _fit_distinct(x_M: FloatArray, y_BM: FloatArray, least: float, most: float) -> FloatArray:
    """Return the rise and the middle of each resample's fit, shape [B, 2]; equal resamples are fitted once."""
    distinct_DM, of_B = np.unique(y_BM, axis=0, return_inverse=True)
    found: list[FloatArray] = []
    for start in range(0, len(distinct_DM), 100):
        fits = fit_sigmoids(x_M, distinct_DM[start : start + 100], least, most)
        found.append(np.stack([fits.high_B - fits.low_B, fits.middle_B], axis=1))
    return np.concatenate(found)[of_B.ravel()]


def sigmoid_curve(
    x: FloatArray, low: FloatArray, high: FloatArray, slope: FloatArray, middle: FloatArray
) -> FloatArray:
    """Return low + (high - low) / (1 + exp(-slope (x - middle))); arrays broadcast."""
    return np.asarray(low + (high - low) * expit(slope * (x - middle)))


def fit_sigmoids(x_M: FloatArray, y_BM: FloatArray, least: float, most: float) -> SigmoidFits:
    """Fit a sigmoid that does not fall to each set of numbers.

    Slopes and middles are searched on a grid, from gentle to steep: of equally good curves the gentlest wins.
    For each pair the best levels follow in closed form.

    Args:
        x_M: Positions of the points, rising, shape [M], M >= 2.
        y_BM: Their numbers, shape [B, M].
        least: The levels do not lie below this.
        most: Nor above this.

    Raises:
        ValueError: If there are fewer than two points, or they do not rise.
    """
    if x_M.size < 2 or (np.diff(x_M) <= 0).any():
        raise ValueError(f"a sigmoid needs two or more points at rising x, got {x_M.tolist()}")
    reach = x_M[-1] - x_M[0]
    slopes = np.geomspace(2 / reach, _STEEPEST / np.diff(x_M).min(), _NUM_SLOPES)
    middles = np.linspace(x_M[0], x_M[-1], _NUM_MIDDLES)
    slope_G, middle_G = (grid.ravel() for grid in np.meshgrid(slopes, middles, indexing="ij"))
    share_GM = expit(slope_G[:, None] * (x_M - middle_G[:, None]))
    low_BG, high_BG, error_BG = _best_levels(share_GM, y_BM, least, most)
    rows = np.arange(len(y_BM))
    best_B = error_BG.round(9).argmin(1)  # smaller differences are rounding
    low_B, high_B, error_B = (values_BG[rows, best_B] for values_BG in (low_BG, high_BG, error_BG))
    return SigmoidFits(low_B, high_B, slope_G[best_B], middle_G[best_B], np.maximum(error_B, 0.0))


def _best_levels(
    share_GM: FloatArray, y_BM: FloatArray, least: float, most: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Minimize the squared error over least <= low <= high <= most for each curve; returns of shape [B, G].

    The error is a convex quadratic in (low, high) and the levels form a triangle: the minimum is the free one if it
    lies inside, else it lies on one of the three sides.
    """
    rest_GM = 1 - share_GM
    ss_G, rr_G, sr_G = (share_GM**2).sum(1), (rest_GM**2).sum(1), (share_GM * rest_GM).sum(1)
    ys_BG, yr_BG = y_BM @ share_GM.T, y_BM @ rest_GM.T
    yy_B1 = (y_BM**2).sum(1)[:, None]
    determinant_G = np.maximum(ss_G * rr_G - sr_G**2, np.finfo(np.float64).tiny)
    free_low_BG = (ss_G * yr_BG - sr_G * ys_BG) / determinant_G
    free_high_BG = (rr_G * ys_BG - sr_G * yr_BG) / determinant_G
    free_BG = (least <= free_low_BG) & (free_low_BG <= free_high_BG) & (free_high_BG <= most)
    flat_BG = np.broadcast_to(np.clip(y_BM.mean(1), least, most)[:, None], ys_BG.shape)
    sides = [
        (np.where(free_BG, free_low_BG, flat_BG), np.where(free_BG, free_high_BG, flat_BG)),
        (np.full_like(ys_BG, least), np.clip((ys_BG - least * sr_G) / ss_G, least, most)),
        (np.clip((yr_BG - most * sr_G) / rr_G, least, most), np.full_like(ys_BG, most)),
    ]
    errors = [
        yy_B1 - 2 * (low * yr_BG + high * ys_BG) + low**2 * rr_G + high**2 * ss_G + 2 * low * high * sr_G
        for low, high in sides
    ]
    choice_BG = np.argmin(errors, axis=0)
    low_BG, high_BG = (np.choose(choice_BG, [side[i] for side in sides]) for i in (0, 1))
    return low_BG, high_BG, np.choose(choice_BG, errors)
