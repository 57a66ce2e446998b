"""Which arm is best at which budget: the frontier, where leads change hands, and whether arms still rise.

In: a comparison of any number of arms. Out: every arm's score at every mark, the best of each mark with what shows it,
a fit of the best N against the budget where the data carry one, and each arm's last move. Arms that are not matched at
a mark are left out there and named. It refuses marks that a run did not reach, unless it ended by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.matching import mismatch, score_at
from brorl.comparison.paired import (
    Measure,
    difference_interval,
    have_same_seeds,
    mean_over_runs,
    resamples,
    scores_at,
    verdict_of,
)
from brorl.comparison.sigmoid import fit_rises, rise
from brorl.comparison.task_trend import Movement, movement_of
from brorl.evaluation.pass_at_k import Estimate, FloatArray
from brorl.format import plain

_MIN_MARKS = 5
_MIN_DIFFERENT = 3  # so one of them at least lies within the sweep
_MUST_RISE = 0.95  # share of resamples
_WIDEST = 0.5  # of the range of log budgets
_NUM_FITS = 500  # of the resamples: fits take longer than means
_TIE = 1e-12


@dataclass(frozen=True)
class FrontierPoint:
    """An arm at a mark.

    Attributes:
        mark: Budget.
        arm: Its name.
        num_rollouts: Its N; None where it is adaptive.
        score: Its score with a 95% interval over prompts and seeds.
        best_share: Share of bootstrap resamples over prompts and seeds in which it is the best of the matched arms;
            None if it is not matched. It tells how firm the order is; that a lead is shown is for `BestAt.lead` to say.
        why_left_out: Why the point is not compared (a run overshot the mark); None if it is.
    """

    mark: float
    arm: str
    num_rollouts: int | None
    score: Estimate
    best_share: float | None
    why_left_out: str | None


@dataclass(frozen=True)
class BestAt:
    """The best of the matched arms at a mark where there are at least two: who is alone has beaten nobody.

    Attributes:
        mark: Budget.
        arm: Name of the arm with the highest score.
        num_rollouts: Its N; None where it is adaptive.
        best_share: Share of bootstrap resamples in which it is the best.
        second: Name of the next.
        lead: Its score less the second's, with a 95% interval.
        lead_shown: Whether that interval lies above 0.
    """

    mark: float
    arm: str
    num_rollouts: int | None
    best_share: float
    second: str
    lead: Estimate
    lead_shown: bool


@dataclass(frozen=True)
class Reign:
    """Consecutive marks at which one arm is best.

    Attributes:
        arm: The arm's name.
        first_mark: From this budget on.
        last_mark: Up to this one.
        shown_at: Those of the marks at which its lead over the second is shown.
    """

    arm: str
    first_mark: float
    last_mark: float
    shown_at: tuple[float, ...]


@dataclass(frozen=True)
class Sigmoid:
    """The best N as a function of the budget C: log2 N = low + (high - low) / (1 + exp(-slope (log C - log midpoint))).

    Attributes:
        low: log2 N far below the midpoint.
        high: log2 N far above it.
        slope: Per unit of log C (natural).
        midpoint: Budget at which half of the rise is done, with a 95% bootstrap interval.

    The levels lie between the smallest and the largest N of the arms, the midpoint among the marks: nothing is said of
    what was not tried.
    """

    low: float
    high: float
    slope: float
    midpoint: Estimate

    def num_rollouts_at(self, budget: float) -> float:
        """Return the fitted best N at a budget."""
        parameters = (np.array(v) for v in (self.low, self.high, self.slope, log(self.midpoint.value)))
        return float(2 ** rise(np.array(log(budget)), *parameters))


@dataclass(frozen=True)
class Saturation:
    """Whether an arm still rose between the last two marks.

    Attributes:
        arm: The arm's name.
        marks: The last mark, and the latest before it at which all runs had another evaluation.
        before: Score at the first of them.
        after: Score at the last.
        change: The difference with a 95% interval, runs and prompts paired.
        movement: What it shows.
    """

    arm: str
    marks: tuple[float, float]
    before: Estimate
    after: Estimate
    change: Estimate
    movement: Movement


@dataclass(frozen=True)
class Frontier:
    """One measure of all arms at all marks.

    Attributes:
        measure: "pass@1", "best@k" (coverage) or "worst@k" (sharpening).
        k: Its k (1 for pass@1).
        points: Arms at marks, by mark, then in the order of the arms.
        best: The best arm of each mark at which two arms or more are matched.
        reigns: Which arm is best from which budget on.
        sigmoid: Fit of the best N against the budget; None where the data do not carry one.
        why_no_sigmoid: Why not; None if there is one.
        saturation: Each arm's last two marks; arms that have but one evaluation after the start are left out.
    """

    measure: Measure
    k: int
    points: tuple[FrontierPoint, ...]
    best: tuple[BestAt, ...]
    reigns: tuple[Reign, ...]
    sigmoid: Sigmoid | None
    why_no_sigmoid: str | None
    saturation: tuple[Saturation, ...]


@dataclass(frozen=True, eq=False)
class _Field:
    """Scores of A arms at M marks.

    Attributes:
        arms: The arms.
        marks: The marks.
        score_AM: Each arm's scores at each mark, each of shape [S, P].
        mean_AM: Their means, shape [A, M].
        drawn_BAM: The means in B resamples, shape [B, A, M].
        left_out_AM: Why an arm is not compared at a mark; None if it is.
    """

    arms: tuple[Arm, ...]
    marks: tuple[float, ...]
    score_AM: list[list[FloatArray]]
    mean_AM: FloatArray
    drawn_BAM: FloatArray
    left_out_AM: list[list[str | None]]

    def matched(self, m: int) -> list[int]:
        """Return the arms that are compared at a mark."""
        return [a for a, why_M in enumerate(self.left_out_AM) if why_M[m] is None]


def frontier(comparison: Comparison, measure: Measure = "pass@1", k: int = 1, seed: int = 0) -> Frontier:
    """Draw the frontier of a comparison in one measure.

    best@k (pass@k) tells how widely an arm covers the prompts, worst@k how sharply it solves those that it can.

    The best arm's lead over the second is looked at after both were picked. Among arms that do not differ the gap of
    the best two is smaller than that of any other two, so that picking does not raise the rate of false leads at a mark
    above its 5%; over many marks one may still be false.

    Args:
        comparison: What is compared.
        measure: What is scored.
        k: Of best@k and worst@k, 1 to n.
        seed: Of the bootstrap.

    Raises:
        ValueError: If a run was not evaluated at a mark and did not end by itself, or k is not 1 to n.

    Source: IsoCompute (arXiv 2603.12151): the best N as a sigmoid of the budget, sharpening and coverage. There the
    budget is in rollouts and every fit is drawn; here it is in the comparison's unit, and a fit must be earned.
    """
    field = _field(comparison, measure, k, seed)
    share_AM = _best_shares(field)
    points = tuple(
        FrontierPoint(
            mark=mark,
            arm=arm.name,
            num_rollouts=arm.num_rollouts,
            score=mean_over_runs(field.score_AM[a][m]),
            best_share=None if field.left_out_AM[a][m] else float(share_AM[a, m]),
            why_left_out=field.left_out_AM[a][m],
        )
        for m, mark in enumerate(field.marks)
        for a, arm in enumerate(field.arms)
    )
    best = tuple(_best_at(field, share_AM, m) for m in range(len(field.marks)) if len(field.matched(m)) > 1)
    sigmoid, why_not = _sigmoid(field)
    saturation = [_saturation(comparison, arm, measure, k) for arm in field.arms]
    return Frontier(
        measure=measure,
        k=1 if measure == "pass@1" else k,
        points=points,
        best=best,
        reigns=_reigns(best),
        sigmoid=sigmoid,
        why_no_sigmoid=why_not,
        saturation=tuple(row for row in saturation if row is not None),
    )


def _field(comparison: Comparison, measure: Measure, k: int, seed: int) -> _Field:
    arms, marks = comparison.arms, comparison.marks
    score_AM = [[scores_at(comparison, arm, mark, measure, k) for mark in marks] for arm in arms]
    runs = [tuple(sorted(run.seed for run in arm.trajectories)) for arm in arms]
    drawn = [
        np.stack(
            [
                np.stack([(runs_BS * (prompts_BP @ score_SP.T)).sum(1) for score_SP in score_M], axis=1)
                for runs_BS, score_M in zip(runs_ABS, score_AM, strict=True)
            ],
            axis=1,
        )
        for prompts_BP, runs_ABS in resamples(len(comparison.prompts), runs, np.random.default_rng(seed))
    ]
    return _Field(
        arms,
        marks,
        score_AM,
        np.array([[score_SP.mean() for score_SP in score_M] for score_M in score_AM]),
        np.concatenate(drawn),
        [["; ".join(mismatch([arm], comparison.unit, mark)) or None for mark in marks] for arm in arms],
    )


def _best_shares(field: _Field) -> FloatArray:
    """Return the share of resamples in which each arm is the best of those compared, ties split, shape [A, M]."""
    share_AM = np.zeros(field.mean_AM.shape)
    for m in range(len(field.marks)):
        matched = field.matched(m)
        if matched:
            drawn_BA = field.drawn_BAM[:, matched, m]
            best_BA = drawn_BA >= drawn_BA.max(1, keepdims=True) - _TIE
            share_AM[matched, m] = (best_BA / best_BA.sum(1, keepdims=True)).mean(0)
    return share_AM


def _best_at(field: _Field, share_AM: FloatArray, m: int) -> BestAt:
    """Compare the best two of a mark; of equal arms the earlier counts as the better."""
    first, second, *_ = sorted(field.matched(m), key=lambda a: -field.mean_AM[a, m])
    arm, other = field.arms[first], field.arms[second]
    lead = difference_interval(
        field.score_AM[second][m], field.score_AM[first][m], seeds_paired=have_same_seeds(other, arm)
    )
    share, shown = float(share_AM[first, m]), verdict_of(lead) == "B leads"
    return BestAt(field.marks[m], arm.name, arm.num_rollouts, share, other.name, lead, shown)


def _reigns(best: Sequence[BestAt]) -> tuple[Reign, ...]:
    reigns = []
    for name, group in groupby(best, key=lambda row: row.arm):
        rows = list(group)
        shown = tuple(row.mark for row in rows if row.lead_shown)
        reigns.append(Reign(name, rows[0].mark, rows[-1].mark, shown))
    return tuple(reigns)


def _sigmoid(field: _Field) -> tuple[Sigmoid | None, str | None]:
    """Fit the best N against the budget, or say why the data do not carry a fit.

    They carry one with at least 5 marks at which arms of two or more N are matched; at least 3 different best Ns, so
    that one is not at an end of the sweep; a fit that rises in 95% of the resamples; and a midpoint whose 95% interval
    touches neither the first nor the last mark and spans at most half of the range of log budgets. "Best" is here the
    highest mean, shown to lead or not: the resamples tell how much of the order is noise.
    """
    numbered = {a: arm.num_rollouts for a, arm in enumerate(field.arms) if arm.num_rollouts is not None}
    arms_M = [[a for a in field.matched(m) if a in numbered] for m in range(len(field.marks))]
    used = [m for m, arms in enumerate(arms_M) if len({numbered[a] for a in arms}) > 1]
    if len(used) < _MIN_MARKS:
        return None, f"{len(used)} marks with two or more numbers of rollouts matched; a fit needs {_MIN_MARKS}"
    log_number_A = np.array([np.log2(numbered.get(a, 1)) for a in range(len(field.arms))])
    y_1M = np.stack([_log_best(field.mean_AM[None, :, m], arms_M[m], log_number_A) for m in used], axis=1)
    num_different = np.unique(y_1M).size
    if num_different < _MIN_DIFFERENT:
        return None, (
            f"only {num_different} different numbers of rollouts are best at some mark; a fit needs {_MIN_DIFFERENT}"
        )
    drawn_BAM = field.drawn_BAM[:_NUM_FITS]
    y_BM = np.stack([_log_best(drawn_BAM[:, :, m], arms_M[m], log_number_A) for m in used], axis=1)
    x_M = np.log([field.marks[m] for m in used])
    least, most = min(log_number_A[list(numbered)]), max(log_number_A[list(numbered)])
    fit, drawn = fit_rises(x_M, y_1M, least, most), _fit_distinct(x_M, y_BM, least, most)
    rising_B = drawn[:, 0] > _TIE
    if fit.high_B[0] - fit.low_B[0] <= _TIE or rising_B.mean() < _MUST_RISE:
        return (
            None,
            f"the best N rises with the budget in {rising_B.mean():.1%} of resamples; a fit needs {_MUST_RISE:.0%}",
        )
    low, high = np.quantile(drawn[rising_B, 1], [0.025, 0.975])
    at_end = low < x_M[0] + _TIE or high > x_M[-1] - _TIE  # the rise may have begun before the marks, or go on after
    if at_end or high - low > _WIDEST * (x_M[-1] - x_M[0]):
        return None, (
            f"where the best N rises is not known: half-way anywhere between budgets of {plain(np.exp(low), 4)} and "
            f"{plain(np.exp(high), 4)} (95%), of marks from {plain(np.exp(x_M[0]), 4)} to {plain(np.exp(x_M[-1]), 4)}"
        )
    middle = float(fit.middle_B[0])
    midpoint = Estimate(*(float(np.exp(v)) for v in (middle, min(low, middle), max(high, middle))))
    return Sigmoid(float(fit.low_B[0]), float(fit.high_B[0]), float(fit.slope_B[0]), midpoint), None


def _log_best(mean_BA: FloatArray, arms: Sequence[int], log_number_A: FloatArray) -> FloatArray:
    """Return log2 N of the best of some arms in each resample, shape [B]."""
    best_B: NDArray[np.int64] = np.array(arms)[mean_BA[:, list(arms)].argmax(1)]
    return np.asarray(log_number_A[best_B])


def _fit_distinct(x_M: FloatArray, y_BM: FloatArray, least: float, most: float) -> FloatArray:
    """Return the rise and the middle of each resample's fit, shape [B, 2]; resamples that agree are fitted once."""
    distinct_DM, of_B = np.unique(y_BM, axis=0, return_inverse=True)
    found: list[NDArray[np.float64]] = []
    for start in range(0, len(distinct_DM), 100):
        fits = fit_rises(x_M, distinct_DM[start : start + 100], least, most)
        found.append(np.stack([fits.high_B - fits.low_B, fits.middle_B], axis=1))
    return np.concatenate(found)[of_B.ravel()]


def _saturation(comparison: Comparison, arm: Arm, measure: Measure, k: int) -> Saturation | None:
    """Compare the last mark with the latest before it at which all runs had another evaluation."""
    last = comparison.marks[-1]
    for mark in reversed(comparison.marks[:-1]):
        pairs = [[score_at(run, comparison.unit, at) for at in (mark, last)] for run in arm.trajectories]
        if all(before is not after for before, after in pairs):
            before_SP, after_SP = (scores_at(comparison, arm, at, measure, k) for at in (mark, last))
            change = mean_over_runs(after_SP - before_SP, lowest=-1)
            ends = mean_over_runs(before_SP), mean_over_runs(after_SP)
            return Saturation(arm.name, (mark, last), *ends, change, movement_of(change))
    return None
