"""Fitted rises against scipy's least squares from many starts, and against curves that are known."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from brorl.comparison.frontier import fit_sigmoids


def sigmoid_curve(x, low, high, slope, middle):  # type: ignore[no-untyped-def]
    return low + (high - low) / (1 + np.exp(-slope * (x - middle)))


def test_finds_the_curve_that_the_points_lie_on(rng: np.random.Generator) -> None:
    x_M = np.sort(rng.uniform(0, 1, 9)) + np.arange(9)
    for _ in range(20):
        low, high = np.sort(rng.uniform(2, 8, 2)) + np.array([0.0, 1.0])
        middle, slope = rng.uniform(x_M[2], x_M[6]), rng.uniform(0.8, 3)
        y_1M = sigmoid_curve(x_M[None], low, high, slope, middle)
        *curve, error_B = fit_sigmoids(x_M, y_1M, 0, 12)
        assert curve[3][0] == pytest.approx(middle, abs=0.2)
        assert error_B[0] <= 0.01 * (high - low) ** 2
        fitted = sigmoid_curve(x_M, *(parameter_B[0] for parameter_B in curve))
        assert ((fitted - y_1M[0]) ** 2).sum() == pytest.approx(error_B[0], abs=1e-8)


def test_no_worse_than_least_squares_from_many_starts(rng: np.random.Generator) -> None:
    """Within what the grid leaves, and never outside its bounds."""
    x_M = np.log(10.0 * 2 ** np.arange(6))
    y_BM = rng.integers(2, 9, (4, 6)).astype(float)
    low_B, high_B, _, _, error_B = fit_sigmoids(x_M, y_BM, 3, 7)
    assert (low_B >= 3).all()
    assert (high_B <= 7).all()
    assert (low_B <= high_B).all()
    steepest = 8 / np.log(2)
    for b, y_M in enumerate(y_BM):
        best = np.inf
        for middle in np.linspace(x_M[0], x_M[-1], 3):
            for slope in (1.0, 4.0):
                fit = least_squares(
                    lambda v, y_M=y_M: sigmoid_curve(x_M, v[0], v[0] + v[1] * (7 - v[0]), v[2], v[3]) - y_M,
                    [4.0, 0.5, slope, np.clip(middle, x_M[0] + 1e-3, x_M[-1] - 1e-3)],
                    bounds=([3, 0, 2 / (x_M[-1] - x_M[0]), x_M[0]], [7, 1, steepest, x_M[-1]]),
                    max_nfev=60,
                )
                best = min(best, 2 * fit.cost)
        assert error_B[b] <= best + 0.1 + 0.02 * best


def test_numbers_that_fall_are_fitted_by_a_constant() -> None:
    x_M = np.arange(5.0)
    low_B, high_B, slope_B, _, error_B = fit_sigmoids(x_M, np.array([[8.0, 7, 5, 4, 2], [3.0] * 5]), 2, 8)
    np.testing.assert_allclose(low_B, high_B, atol=1e-9)
    np.testing.assert_allclose(low_B, [5.2, 3.0], atol=1e-9)
    np.testing.assert_allclose(error_B, [22.8, 0.0], atol=1e-8)
    np.testing.assert_allclose(slope_B, 0.5)  # of equally good curves the gentlest


def test_levels_stay_within_their_bounds_where_a_bound_is_best() -> None:
    """Points far below, far above, and on both sides of what the levels may be."""
    x_M = np.arange(6.0)
    y_BM = np.array([[0.0, 0, 0, 4, 4, 4], [4.0, 4, 4, 9, 9, 9], [0.0, 0, 0, 9, 9, 9], [0.0] * 6, [9.0] * 6])
    low_B, high_B, *_ = fit_sigmoids(x_M, y_BM, 2, 6)
    np.testing.assert_allclose(low_B, [2, 4, 2, 2, 6], atol=0.06)
    np.testing.assert_allclose(high_B, [4, 6, 6, 2, 6], atol=0.06)


def test_refuses_points_that_do_not_rise() -> None:
    for x in ([1.0], [1.0, 1.0], [2.0, 1.0, 3.0]):
        with pytest.raises(ValueError, match="two or more points at rising x"):
            fit_sigmoids(np.array(x), np.zeros((1, len(x))), 0, 1)
