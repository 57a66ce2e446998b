"""The best arm at each budget: the frontier, the ranges of budgets that one arm leads, and whether arms still rise.

An arm that is not matched at an evaluation point is left out there and named. The best N against the budget C is fitted
by least squares, if the data support it, as

    log2 N = low + (high - low) / (1 + exp(-slope (log C - middle)))

The levels lie between the smallest and the largest N of the arms and the middle among the evaluation points: the fit
does not extrapolate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from brorl.comparison.arms import PASS_1, Arm, Comparison, Measure, have_same_seeds, score_at, scores_at
from brorl.comparison.matching import match_at, unmatched_runs
from brorl.comparison.paired import ROUNDING, conclusion_of, difference_interval, mean_over_runs, resamples
from brorl.comparison.prompts import Movement, movement_of
from brorl.format import Estimate, plain
from brorl.tree import FloatArray

_NUM_MIDDLES = 81
_NUM_SLOPES = 24
_STEEPEST = 8.0  # over the smallest gap between points: a step, as far as the points can resolve it
_MIN_POINTS = 5
_MIN_DIFFERENT = 3  # so at least one of them lies inside the sweep
_MUST_RISE = 0.95  # fraction of resamples
_WIDEST = 0.5  # of the range of log budgets
_NUM_FITS = 500  # of the resamples: fits take longer than means


@dataclass(frozen=True)
class FrontierPoint:
    """An arm at an evaluation point."""

    eval_point: float  # the budget
    arm: str
    num_rollouts: int  # its N
    score: Estimate  # its score with a 95% interval over prompts and seeds
    # fraction of bootstrap resamples over prompts and seeds in which it is the best of the matched arms; None
    # if it is not matched. It shows how firm the order is; `BestArm.lead_shown` states whether a lead is shown.
    best_fraction: float | None
    why_left_out: str | None  # why the arm is not compared here (a run overshot the evaluation point); None if it is


@dataclass(frozen=True)
class BestArm:
    """The best of the matched arms at an evaluation point where two arms or more are matched."""

    eval_point: float  # the budget
    arm: str  # name of the arm with the highest score
    num_rollouts: int  # its N
    best_fraction: float  # fraction of bootstrap resamples in which it is the best
    second: str  # name of the next
    lead: Estimate  # its score minus the second's, with a 95% interval
    lead_shown: bool  # whether that interval lies above 0

    @property
    def is_tied(self) -> bool:
        """Whether the second scores the same; the order of the two is then arbitrary."""
        return abs(self.lead.value) < ROUNDING


@dataclass(frozen=True)
class LeadingRange:
    """Consecutive evaluation points at which one arm is best."""

    arm: str
    first_point: float  # the first of them
    last_point: float  # the last of them
    shown_at: tuple[float, ...]  # those at which its lead over the second is shown


@dataclass(frozen=True)
class Saturation:
    """Whether an arm still rose between the last two evaluation points."""

    arm: str
    # the latest point before the last one at which all runs had another evaluation, and the last one
    eval_points: tuple[float, float]
    before: Estimate  # score at the first of them
    after: Estimate  # score at the last
    change: Estimate  # the difference with a 95% interval, runs and prompts paired
    movement: Movement  # the movement that it shows


@dataclass(frozen=True)
class Sigmoid:
    """The best N as a function of the budget."""

    low: float  # log2 N far below the midpoint
    high: float  # log2 N far above it
    slope: float  # per unit of log C (natural)
    midpoint: Estimate  # budget at half of the rise, with a 95% bootstrap interval

    def num_rollouts_at(self, budget: float) -> float:
        """Return the fitted best N at a budget."""
        rise = float(expit(self.slope * (log(budget) - log(self.midpoint.value))))
        return float(2 ** (self.low + (self.high - self.low) * rise))


@dataclass(frozen=True)
class Frontier:
    """All arms at all evaluation points by one measure."""

    measure: Measure
    points: tuple[FrontierPoint, ...]  # arms at evaluation points, by point, then in the order of the arms
    best: tuple[BestArm, ...]  # the best arm of each evaluation point at which two arms or more are matched
    leading_ranges: tuple[LeadingRange, ...]  # the arms that are best, and the budgets from which on they are
    sigmoid: Sigmoid | None  # fit of the best N against the budget; None if the data do not support one
    why_no_sigmoid: str | None  # why not; None if there is one
    # each arm's last two evaluation points; without arms that have one evaluation after the start
    saturation: tuple[Saturation, ...]

    def at(self, eval_point: float) -> dict[str, FrontierPoint]:
        """Return the arms at an evaluation point, by name."""
        return {point.arm: point for point in self.points if point.eval_point == eval_point}


def frontier(comparison: Comparison, measure: Measure = PASS_1) -> Frontier:
    """Compute the frontier of a comparison by one measure.

    pass@k shows how widely an arm covers the prompts, worst@k how reliably it solves those that it can.

    The best arm's lead over the second is tested after both were picked. Among arms that do not differ the gap of the
    best two is smaller than that of any other two, so picking does not raise the rate of false leads at an evaluation
    point above 5%. Over many evaluation points one may still be false.

    Args:
        comparison: The comparison.
        measure: The score.

    Source: IsoCompute (arXiv 2603.12151): the best N as a sigmoid of the budget, sharpening and coverage. There the
    budget is in rollouts and every fit is drawn; here it is in the comparison's unit, and the data must support a fit.
    """
    arms, eval_points = comparison.arms, comparison.eval_points
    score_AM = [[scores_at(comparison, arm, point, measure) for point in eval_points] for arm in arms]
    mean_AM = np.array([[score_SP.mean() for score_SP in score_M] for score_M in score_AM])
    drawn_BAM = _resampled_means(comparison, score_AM)
    why_AM = [
        ["; ".join(unmatched_runs(match_at([arm], comparison.unit, p))) or None for p in eval_points] for arm in arms
    ]
    matched_AM = np.array([[why is None for why in why_M] for why_M in why_AM])
    compared_BAM = np.where(matched_AM, drawn_BAM, -np.inf)
    best_BAM = matched_AM & (compared_BAM >= compared_BAM.max(1, keepdims=True) - ROUNDING)
    best_fraction_AM = (best_BAM / np.maximum(best_BAM.sum(1, keepdims=True), 1)).mean(0)  # ties split
    points, best = [], []
    for m, eval_point in enumerate(eval_points):
        for a, arm in enumerate(arms):
            fraction = float(best_fraction_AM[a, m]) if matched_AM[a, m] else None
            score = mean_over_runs(score_AM[a][m])
            points.append(FrontierPoint(eval_point, arm.name, arm.num_rollouts, score, fraction, why_AM[a][m]))
        matched = np.flatnonzero(matched_AM[:, m]).tolist()
        if len(matched) > 1:  # of equal arms the earlier counts as the better
            first, second, *_ = sorted(matched, key=lambda a: -mean_AM[a, m].round(12))
            arm, other = arms[first], arms[second]
            pair = score_AM[second][m], score_AM[first][m]
            lead = difference_interval(*pair, seeds_paired=have_same_seeds(other, arm))
            fraction, shown = float(best_fraction_AM[first, m]), conclusion_of(lead) == "B leads"
            best.append(BestArm(eval_point, arm.name, arm.num_rollouts, fraction, other.name, lead, shown))
    ranges = []
    for name, group in groupby(best, key=lambda row: row.arm):
        rows = list(group)
        shown_at = tuple(row.eval_point for row in rows if row.lead_shown)
        ranges.append(LeadingRange(name, rows[0].eval_point, rows[-1].eval_point, shown_at))
    fit = _fit_best_rollouts(eval_points, [arm.num_rollouts for arm in arms], mean_AM, drawn_BAM, matched_AM)
    sigmoid, why_no_sigmoid = (None, fit) if isinstance(fit, str) else (fit, None)
    saturation = [_saturation(comparison, arm, measure) for arm in arms]
    known = tuple(row for row in saturation if row is not None)
    return Frontier(measure, tuple(points), tuple(best), tuple(ranges), sigmoid, why_no_sigmoid, known)


def _resampled_means(comparison: Comparison, score_AM: list[list[FloatArray]]) -> FloatArray:
    """Return the mean score of each arm at each evaluation point in B resamples, shape [B, A, M]."""
    runs = [tuple(sorted(run.seed for run in arm.runs)) for arm in comparison.arms]
    drawn = []
    for prompts_BP, runs_ABS in resamples(len(comparison.prompts), runs, np.random.default_rng(0)):
        means = [
            np.stack([(runs_BS * (prompts_BP @ score_SP.T)).sum(1) for score_SP in score_M], axis=1)
            for runs_BS, score_M in zip(runs_ABS, score_AM, strict=True)
        ]
        drawn.append(np.stack(means, axis=1))
    return np.concatenate(drawn)


def _saturation(comparison: Comparison, arm: Arm, measure: Measure) -> Saturation | None:
    """Compare the last evaluation point with the latest one before it at which all runs had another evaluation."""
    last = comparison.eval_points[-1]
    for point in reversed(comparison.eval_points[:-1]):
        pairs = [[score_at(run, comparison.unit, at) for at in (point, last)] for run in arm.runs]
        if all(before is not after for before, after in pairs):
            before_SP, after_SP = (scores_at(comparison, arm, at, measure) for at in (point, last))
            change = mean_over_runs(after_SP - before_SP, lowest=-1)
            ends = mean_over_runs(before_SP), mean_over_runs(after_SP)
            return Saturation(arm.name, (point, last), *ends, change, movement_of(change))
    return None


def _fit_best_rollouts(
    eval_points: Sequence[float],
    num_rollouts_A: Sequence[int],
    mean_AM: FloatArray,
    drawn_BAM: FloatArray,
    matched_AM: NDArray[np.bool_],
) -> Sigmoid | str:
    """Fit the best N against the budget, or return why the data do not support a fit.

    They support one with at least 5 evaluation points at which arms of two or more N are matched; at least 3 different
    best Ns, so that one is not at an end of the sweep; a fit that rises in 95% of the resamples; and a midpoint whose
    95% interval touches neither the first nor the last evaluation point and spans at most half of the range of log
    budgets. "Best" is the highest mean, whether or not its lead is shown: the resamples measure the noise of the order.
    """
    number_A = np.array(num_rollouts_A, np.float64)
    used = [m for m in range(len(eval_points)) if np.unique(number_A[matched_AM[:, m]]).size > 1]
    if len(used) < _MIN_POINTS:
        return f"{len(used)} evaluation points with two or more numbers of rollouts matched; a fit needs {_MIN_POINTS}"
    log_number_A = np.log2(number_A)

    def log_best(score_BAM: FloatArray) -> FloatArray:
        """Return log2 N of the best arm of each used evaluation point, shape [B, M]."""
        compared_BAM = np.where(matched_AM, score_BAM, -np.inf)
        return np.asarray(log_number_A[compared_BAM.argmax(1)[:, used]])

    y_1M = log_best(mean_AM[None])
    if (num_different := np.unique(y_1M).size) < _MIN_DIFFERENT:
        return (
            f"only {num_different} different numbers of rollouts are best at some evaluation point; a fit needs "
            f"{_MIN_DIFFERENT}"
        )
    x_M = np.log([eval_points[m] for m in used])
    return _supported_fit(
        x_M, y_1M, log_best(drawn_BAM[:_NUM_FITS]), float(log_number_A.min()), float(log_number_A.max())
    )


def _supported_fit(
    x_M: FloatArray, y_1M: FloatArray, y_BM: FloatArray, low_limit: float, high_limit: float
) -> Sigmoid | str:
    """Fit the numbers and their resamples; the resamples give the certainty of the rise and of the midpoint."""
    low_1, high_1, slope_1, middle_1, _ = fit_sigmoids(x_M, y_1M, low_limit, high_limit)
    distinct_DM, of_B = np.unique(y_BM, axis=0, return_inverse=True)  # equal resamples are fitted once
    parts = [
        fit_sigmoids(x_M, distinct_DM[i : i + 100], low_limit, high_limit) for i in range(0, len(distinct_DM), 100)
    ]
    low_B, high_B, _, middle_B, _ = np.concatenate(parts, axis=1)[:, of_B.ravel()]
    rising_B = high_B - low_B > ROUNDING
    if high_1[0] - low_1[0] <= ROUNDING or rising_B.mean() < _MUST_RISE:
        rises = f"the best N rises with the budget in {rising_B.mean():.1%} of resamples"
        return f"{rises}; a fit needs {_MUST_RISE:.0%}"
    low, high = np.quantile(middle_B[rising_B], [0.025, 0.975])
    # The rise may begin before the points or end after them.
    at_end = low < x_M[0] + ROUNDING or high > x_M[-1] - ROUNDING
    if at_end or high - low > _WIDEST * (x_M[-1] - x_M[0]):
        min_budget, max_budget, first, last = (plain(np.exp(v), 4) for v in (low, high, x_M[0], x_M[-1]))
        return (
            f"the midpoint of the rise is not known: it lies anywhere between budgets of {min_budget} and "
            f"{max_budget} (95%), with evaluation points from {first} to {last}"
        )
    middle = float(middle_1[0])
    midpoint = Estimate(*(float(np.exp(v)) for v in (middle, min(low, middle), max(high, middle))))
    return Sigmoid(float(low_1[0]), float(high_1[0]), float(slope_1[0]), midpoint)


def fit_sigmoids(x_M: FloatArray, y_BM: FloatArray, low_limit: float, high_limit: float) -> FloatArray:
    """Fit a sigmoid that does not fall to each set of numbers.

    Slopes and middles are searched on a grid, from gentle to steep: of equally good curves the gentlest wins.
    For each pair the best levels follow in closed form.

    Args:
        x_M: Positions of the points, rising, shape [M], M >= 2.
        y_BM: Their numbers, shape [B, M].
        low_limit: The levels are at least this.
        high_limit: The levels are at most this.

    Returns:
        Shape [5, B]: the level on the left, the level on the right (the same if nothing that rises fits better than a
        constant), the slope, the position of half of the rise, and the squared error that remains.

    Raises:
        ValueError: If there are fewer than two points, or they do not rise.
    """
    if x_M.size < 2 or (np.diff(x_M) <= 0).any():
        raise ValueError(f"a sigmoid needs two or more points at rising x, got {x_M.tolist()}")
    reach = x_M[-1] - x_M[0]
    slopes = np.geomspace(2 / reach, _STEEPEST / np.diff(x_M).min(), _NUM_SLOPES)
    middles = np.linspace(x_M[0], x_M[-1], _NUM_MIDDLES)
    slope_G, middle_G = (grid.ravel() for grid in np.meshgrid(slopes, middles, indexing="ij"))
    rise_GM = expit(slope_G[:, None] * (x_M - middle_G[:, None]))
    low_BG, high_BG, error_BG = _best_levels(rise_GM, y_BM, low_limit, high_limit)
    rows = np.arange(len(y_BM))
    best_B = error_BG.round(9).argmin(1)  # smaller differences are rounding
    low_B, high_B, error_B = (values_BG[rows, best_B] for values_BG in (low_BG, high_BG, error_BG))
    return np.stack([low_B, high_B, slope_G[best_B], middle_G[best_B], np.maximum(error_B, 0.0)])


def _best_levels(
    rise_GM: FloatArray, y_BM: FloatArray, low_limit: float, high_limit: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Minimize the squared error over low_limit <= low <= high <= high_limit for each curve; returns of shape [B, G].

    The error is a convex quadratic in (low, high) and the levels form a triangle: the minimum is the free one if it
    lies inside, else it lies on one of the three sides.
    """
    rest_GM = 1 - rise_GM
    ss_G, rr_G, sr_G = (rise_GM**2).sum(1), (rest_GM**2).sum(1), (rise_GM * rest_GM).sum(1)
    ys_BG, yr_BG = y_BM @ rise_GM.T, y_BM @ rest_GM.T
    yy_B1 = (y_BM**2).sum(1)[:, None]
    determinant_G = np.maximum(ss_G * rr_G - sr_G**2, np.finfo(np.float64).tiny)
    free_low_BG = (ss_G * yr_BG - sr_G * ys_BG) / determinant_G
    free_high_BG = (rr_G * ys_BG - sr_G * yr_BG) / determinant_G
    free_BG = (low_limit <= free_low_BG) & (free_low_BG <= free_high_BG) & (free_high_BG <= high_limit)
    flat_BG = np.broadcast_to(np.clip(y_BM.mean(1), low_limit, high_limit)[:, None], ys_BG.shape)
    sides = [
        (np.where(free_BG, free_low_BG, flat_BG), np.where(free_BG, free_high_BG, flat_BG)),
        (np.full_like(ys_BG, low_limit), np.clip((ys_BG - low_limit * sr_G) / ss_G, low_limit, high_limit)),
        (np.clip((yr_BG - high_limit * sr_G) / rr_G, low_limit, high_limit), np.full_like(ys_BG, high_limit)),
    ]
    errors = [
        yy_B1 - 2 * (low * yr_BG + high * ys_BG) + low**2 * rr_G + high**2 * ss_G + 2 * low * high * sr_G
        for low, high in sides
    ]
    choice_BG = np.argmin(errors, axis=0)
    low_BG, high_BG = (np.choose(choice_BG, [side[i] for side in sides]) for i in (0, 1))
    return low_BG, high_BG, np.choose(choice_BG, errors)
