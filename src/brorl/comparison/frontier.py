"""The best arm at each budget: the frontier.

An arm that is not matched at an evaluation point is left out there and named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brorl.comparison.arms import PASS_1, Comparison, Measure, have_same_seeds, scores_at
from brorl.comparison.matching import match_at
from brorl.evaluation.paired import ROUNDING, conclusion_of, difference_interval, mean_over_runs
from brorl.format import Estimate


@dataclass(frozen=True)
class FrontierPoint:
    """An arm at an evaluation point."""

    eval_point: float  # the budget
    arm: str
    num_rollouts: int  # its N
    score: Estimate  # its score with a 95% interval over prompts and seeds
    matched: bool  # whether it is compared here: no run overshot the evaluation point


@dataclass(frozen=True)
class BestArm:
    """The best of the matched arms at an evaluation point where two arms or more are matched."""

    eval_point: float  # the budget
    arm: str  # name of the arm with the highest score
    num_rollouts: int  # its N
    second: str  # name of the next
    lead: Estimate  # its score minus the second's, with a 95% interval
    lead_shown: bool  # whether that interval lies above 0

    @property
    def is_tied(self) -> bool:
        """Whether the second scores the same; the order of the two is then arbitrary."""
        return abs(self.lead.value) < ROUNDING


@dataclass(frozen=True)
class Frontier:
    """All arms at all evaluation points by one measure."""

    measure: Measure
    points: tuple[FrontierPoint, ...]  # arms at evaluation points, by point, then in the order of the arms
    best: tuple[BestArm, ...]  # the best arm of each evaluation point at which two arms or more are matched

    def at(self, eval_point: float) -> dict[str, FrontierPoint]:
        """Return the arms at an evaluation point, by name."""
        return {point.arm: point for point in self.points if point.eval_point == eval_point}


def frontier(comparison: Comparison, measure: Measure = PASS_1) -> Frontier:
    """Compute the frontier of a comparison by one measure.

    pass@k shows how widely an arm covers the prompts, worst@k how reliably it solves those that it can.

    The best arm's lead over the second is tested after both were picked. Among arms that do not differ the gap of the
    best two is smaller than that of any other two, so picking does not raise the rate of false leads at an evaluation
    point above 5%. Over many evaluation points one may still be false.

    Source: IsoCompute (arXiv 2603.12151): the best N by budget, sharpening and coverage. There the budget is in
    rollouts and the best N is fitted by a sigmoid; here it is in the comparison's unit, and nothing is fitted.
    """
    arms, eval_points = comparison.arms, comparison.eval_points
    score_AM = [[scores_at(comparison, arm, point, measure) for point in eval_points] for arm in arms]
    mean_AM = np.array([[score_SP.mean() for score_SP in score_M] for score_M in score_AM])
    matched_AM = np.array([
        [all(run.matched for run in match_at([arm], comparison.unit, point)) for point in eval_points] for arm in arms
    ])  # fmt: skip
    points, best = [], []
    for m, eval_point in enumerate(eval_points):
        for a, arm in enumerate(arms):
            score = mean_over_runs(score_AM[a][m])
            points.append(FrontierPoint(eval_point, arm.name, arm.num_rollouts, score, bool(matched_AM[a, m])))
        matched = np.flatnonzero(matched_AM[:, m]).tolist()
        if len(matched) > 1:  # of equal arms the earlier counts as the better
            first, second, *_ = sorted(matched, key=lambda a: -mean_AM[a, m].round(12))
            arm, other = arms[first], arms[second]
            pair = score_AM[second][m], score_AM[first][m]
            lead = difference_interval(*pair, seeds_paired=have_same_seeds(other, arm))
            shown = conclusion_of(lead) == "B leads"
            best.append(BestArm(eval_point, arm.name, arm.num_rollouts, other.name, lead, shown))
    return Frontier(measure, tuple(points), tuple(best))
