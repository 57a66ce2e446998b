"""A rise between two levels, y = low + (high - low) / (1 + exp(-slope (x - middle))), fitted by least squares.

In: points at rising x, several sets of y at a time. Out: the best curve of each set among those that do not fall, whose
levels lie between given bounds and whose middle lies among the points. It does not extrapolate, and refuses nothing but
fewer than two points: whether the points carry a fit is for the caller to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from brorl.evaluation.pass_at_k import FloatArray

_NUM_MIDDLES = 81
_NUM_SLOPES = 24
_STEEPEST = 8.0  # over the smallest gap between points: a step, as far as the points can tell


@dataclass(frozen=True, eq=False)
class Rises:
    """The best curve of each of B sets of numbers.

    Attributes:
        low_B: Level on the left, shape [B].
        high_B: Level on the right; equal to `low_B` where nothing that rises fits better than a constant.
        slope_B: Steepness.
        middle_B: Where half of the rise is done.
        squared_error_B: What is left, summed over points.
    """

    low_B: FloatArray
    high_B: FloatArray
    slope_B: FloatArray
    middle_B: FloatArray
    squared_error_B: FloatArray


def rise(x: FloatArray, low: FloatArray, high: FloatArray, slope: FloatArray, middle: FloatArray) -> FloatArray:
    """Return the curve at x (arrays broadcast)."""
    return np.asarray(low + (high - low) * expit(slope * (x - middle)))


def fit_rises(x_M: FloatArray, y_BM: FloatArray, least: float, most: float) -> Rises:
    """Fit a rise to each set of numbers.

    Slopes and middles are looked at on a grid, from gentle to steep, so that of equally good curves the gentlest
    counts; for each pair the best levels follow in closed form.

    Args:
        x_M: Where the points are, rising, shape [M], M >= 2.
        y_BM: Their numbers, shape [B, M].
        least: The levels do not lie below this.
        most: Nor above this.

    Raises:
        ValueError: If there are fewer than two points, or they do not rise.
    """
    if x_M.size < 2 or (np.diff(x_M) <= 0).any():
        raise ValueError(f"a rise needs two or more points at rising x, got {x_M.tolist()}")
    reach = x_M[-1] - x_M[0]
    slopes = np.geomspace(2 / reach, _STEEPEST / np.diff(x_M).min(), _NUM_SLOPES)
    middles = np.linspace(x_M[0], x_M[-1], _NUM_MIDDLES)
    slope_G, middle_G = (grid.ravel() for grid in np.meshgrid(slopes, middles, indexing="ij"))
    zero, one = np.zeros((1, 1)), np.ones((1, 1))
    share_GM = rise(x_M, zero, one, slope_G[:, None], middle_G[:, None])
    low_BG, high_BG, error_BG = _best_levels(share_GM, y_BM, least, most)
    rows = np.arange(len(y_BM))
    best_B = error_BG.round(9).argmin(1)  # what is smaller is rounding
    return Rises(
        low_BG[rows, best_B],
        high_BG[rows, best_B],
        slope_G[best_B],
        middle_G[best_B],
        np.maximum(error_BG[rows, best_B], 0.0),
    )


def _best_levels(
    share_GM: FloatArray, y_BM: FloatArray, least: float, most: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Minimise the squared error over least <= low <= high <= most for each curve; returns of shape [B, G].

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
