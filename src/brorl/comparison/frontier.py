"""The best arm at each budget: the frontier, the ranges of budgets that one arm leads, and whether arms still rise.

In: a comparison of several arms. Out: every arm's score at every evaluation point, the best arm of each point with
the evidence for its lead, a fit of the best N against the budget if the data support one, and each arm's last change.
An arm that is not matched at an evaluation point is left out there and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.matching import match_at, unmatched_runs
from brorl.comparison.paired import conclusion_of, difference_interval, mean_over_runs, resamples
from brorl.comparison.scores import PASS_1, Measure, have_same_seeds, score_at, scores_at
from brorl.comparison.sigmoid import Sigmoid, fit_best_rollouts
from brorl.comparison.task_trend import Movement, movement_of
from brorl.evaluation.pass_at_k import Estimate, FloatArray

_TIE = 1e-12


@dataclass(frozen=True)
class FrontierPoint:
    """An arm at an evaluation point.

    Attributes:
        eval_point: The budget.
        arm: Its name.
        num_rollouts: Its N; None if it is adaptive.
        score: Its score with a 95% interval over prompts and seeds.
        best_fraction: Fraction of bootstrap resamples over prompts and seeds in which it is the best of the matched
            arms; None if it is not matched. It shows how firm the order is; `BestArm.lead_shown` states whether a lead
            is shown.
        why_left_out: Why the arm is not compared here (a run overshot the evaluation point); None if it is.
    """

    eval_point: float
    arm: str
    num_rollouts: int | None
    score: Estimate
    best_fraction: float | None
    why_left_out: str | None


@dataclass(frozen=True)
class BestArm:
    """The best of the matched arms at an evaluation point where two arms or more are matched.

    Attributes:
        eval_point: The budget.
        arm: Name of the arm with the highest score.
        num_rollouts: Its N; None if it is adaptive.
        best_fraction: Fraction of bootstrap resamples in which it is the best.
        second: Name of the next.
        lead: Its score less the second's, with a 95% interval.
        lead_shown: Whether that interval lies above 0.
    """

    eval_point: float
    arm: str
    num_rollouts: int | None
    best_fraction: float
    second: str
    lead: Estimate
    lead_shown: bool

    @property
    def is_tied(self) -> bool:
        """Whether the second scores the same; the order of the two is then arbitrary."""
        return abs(self.lead.value) < _TIE


@dataclass(frozen=True)
class LeadingRange:
    """Consecutive evaluation points at which one arm is best.

    Attributes:
        arm: The arm's name.
        first_point: The first of them.
        last_point: The last of them.
        shown_at: Those at which its lead over the second is shown.
    """

    arm: str
    first_point: float
    last_point: float
    shown_at: tuple[float, ...]


@dataclass(frozen=True)
class Saturation:
    """Whether an arm still rose between the last two evaluation points.

    Attributes:
        arm: The arm's name.
        eval_points: The latest point before the last one at which all runs had another evaluation, and the last one.
        before: Score at the first of them.
        after: Score at the last.
        change: The difference with a 95% interval, runs and prompts paired.
        movement: The movement that it shows.
    """

    arm: str
    eval_points: tuple[float, float]
    before: Estimate
    after: Estimate
    change: Estimate
    movement: Movement


@dataclass(frozen=True)
class Frontier:
    """All arms at all evaluation points by one measure.

    Attributes:
        measure: The score.
        points: Arms at evaluation points, by point, then in the order of the arms.
        best: The best arm of each evaluation point at which two arms or more are matched.
        leading_ranges: The arms that are best, and the budgets from which on they are.
        sigmoid: Fit of the best N against the budget; None if the data do not support one.
        why_no_sigmoid: Why not; None if there is one.
        saturation: Each arm's last two evaluation points; without arms that have one evaluation after the start.
    """

    measure: Measure
    points: tuple[FrontierPoint, ...]
    best: tuple[BestArm, ...]
    leading_ranges: tuple[LeadingRange, ...]
    sigmoid: Sigmoid | None
    why_no_sigmoid: str | None
    saturation: tuple[Saturation, ...]

    def at(self, eval_point: float) -> dict[str, FrontierPoint]:
        """Return the arms at an evaluation point, by name."""
        return {point.arm: point for point in self.points if point.eval_point == eval_point}


@dataclass(frozen=True, eq=False)
class _Scores:
    """Scores of A arms at M evaluation points.

    Attributes:
        score_AM: Each arm's scores at each evaluation point, each of shape [S, P].
        mean_AM: Their means, shape [A, M].
        drawn_BAM: The means in B resamples, shape [B, A, M].
        left_out_AM: Why an arm is not compared at an evaluation point; None if it is.
        matched_AM: Whether it is compared, shape [A, M].
        best_share_AM: Fraction of resamples in which it is the best of those compared, ties split, shape [A, M].
    """

    score_AM: list[list[FloatArray]]
    mean_AM: FloatArray
    drawn_BAM: FloatArray
    left_out_AM: list[list[str | None]]
    matched_AM: NDArray[np.bool_]
    best_share_AM: FloatArray


def frontier(comparison: Comparison, measure: Measure = PASS_1, seed: int = 0) -> Frontier:
    """Compute the frontier of a comparison by one measure.

    pass@k shows how widely an arm covers the prompts, worst@k how reliably it solves those that it can.

    The best arm's lead over the second is tested after both were picked. Among arms that do not differ the gap of the
    best two is smaller than that of any other two, so picking does not raise the rate of false leads at an evaluation
    point above 5%. Over many evaluation points one may still be false.

    Args:
        comparison: The comparison.
        measure: The score.
        seed: Seed of the bootstrap.

    Raises:
        ValueError: If a run was not evaluated at an evaluation point and did not end early, or k is above n.

    Source: IsoCompute (arXiv 2603.12151): the best N as a sigmoid of the budget, sharpening and coverage. There the
    budget is in rollouts and every fit is drawn; here it is in the comparison's unit, and the data must support a fit.
    """
    arms, points = comparison.arms, comparison.eval_points
    scores = _scores(comparison, measure, seed)
    best = [_best_arm(arms, point, scores, m) for m, point in enumerate(points)]
    shown = tuple(row for row in best if row is not None)
    sigmoid, why_not = fit_best_rollouts(
        points, [arm.num_rollouts for arm in arms], scores.mean_AM, scores.drawn_BAM, scores.matched_AM
    )
    saturation = [_saturation(comparison, arm, measure) for arm in arms]
    return Frontier(
        measure=measure,
        points=tuple(
            FrontierPoint(
                eval_point=point,
                arm=arm.name,
                num_rollouts=arm.num_rollouts,
                score=mean_over_runs(scores.score_AM[a][m]),
                best_fraction=float(scores.best_share_AM[a, m]) if scores.matched_AM[a, m] else None,
                why_left_out=scores.left_out_AM[a][m],
            )
            for m, point in enumerate(points)
            for a, arm in enumerate(arms)
        ),
        best=shown,
        leading_ranges=_leading_ranges(shown),
        sigmoid=sigmoid,
        why_no_sigmoid=why_not,
        saturation=tuple(row for row in saturation if row is not None),
    )


def _scores(comparison: Comparison, measure: Measure, seed: int) -> _Scores:
    arms, points = comparison.arms, comparison.eval_points
    score_AM = [[scores_at(comparison, arm, point, measure) for point in points] for arm in arms]
    runs = [tuple(sorted(run.seed for run in arm.runs)) for arm in arms]
    drawn = []
    for prompts_BP, runs_ABS in resamples(len(comparison.prompts), runs, np.random.default_rng(seed)):
        means = [
            np.stack([(runs_BS * (prompts_BP @ score_SP.T)).sum(1) for score_SP in score_M], axis=1)
            for runs_BS, score_M in zip(runs_ABS, score_AM, strict=True)
        ]
        drawn.append(np.stack(means, axis=1))
    mean_AM = np.array([[score_SP.mean() for score_SP in score_M] for score_M in score_AM])
    left_out_AM = [
        ["; ".join(unmatched_runs(match_at([arm], comparison.unit, point))) or None for point in points] for arm in arms
    ]
    matched_AM = np.array([[why is None for why in why_M] for why_M in left_out_AM])
    drawn_BAM = np.concatenate(drawn)
    compared_BAM = np.where(matched_AM, drawn_BAM, -np.inf)
    best_BAM = matched_AM & (compared_BAM >= compared_BAM.max(1, keepdims=True) - _TIE)
    share_AM = (best_BAM / np.maximum(best_BAM.sum(1, keepdims=True), 1)).mean(0)
    return _Scores(score_AM, mean_AM, drawn_BAM, left_out_AM, matched_AM, share_AM)


def _best_arm(arms: Sequence[Arm], eval_point: float, scores: _Scores, m: int) -> BestArm | None:
    """Compare the best two of an evaluation point; of equal arms the earlier counts as the better."""
    matched = np.flatnonzero(scores.matched_AM[:, m]).tolist()
    if len(matched) < 2:
        return None
    first, second, *_ = sorted(matched, key=lambda a: -scores.mean_AM[a, m])
    arm, other = arms[first], arms[second]
    pair = scores.score_AM[second][m], scores.score_AM[first][m]
    lead = difference_interval(*pair, seeds_paired=have_same_seeds(other, arm))
    fraction, shown = float(scores.best_share_AM[first, m]), conclusion_of(lead) == "B leads"
    return BestArm(eval_point, arm.name, arm.num_rollouts, fraction, other.name, lead, shown)


def _leading_ranges(best: Sequence[BestArm]) -> tuple[LeadingRange, ...]:
    ranges = []
    for name, group in groupby(best, key=lambda row: row.arm):
        rows = list(group)
        shown = tuple(row.eval_point for row in rows if row.lead_shown)
        ranges.append(LeadingRange(name, rows[0].eval_point, rows[-1].eval_point, shown))
    return tuple(ranges)


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
