"""The best arm at each budget: the frontier."""

from __future__ import annotations

from dataclasses import dataclass

from brorl.comparison.arms import Comparison, have_same_seeds, scores_at
from brorl.comparison.matching import is_matched
from brorl.evaluation.paired import ROUNDING, conclusion_of, difference_interval
from brorl.format import Estimate


@dataclass(frozen=True)
class BestArm:
    """The best of the matched arms at an evaluation point where two arms or more are matched."""

    eval_point: float  # the budget
    arm: str  # name of the arm with the highest score
    second: str  # name of the next
    lead: Estimate  # its score minus the second's, with a 95% interval
    lead_shown: bool  # whether that interval lies above 0

    @property
    def is_tied(self) -> bool:
        """Whether the second scores the same; the order of the two is then arbitrary."""
        return abs(self.lead.value) < ROUNDING


def frontier(comparison: Comparison, k: int = 1) -> tuple[BestArm, ...]:
    """Find the best arm by pass@k at each evaluation point; arms that are not matched there are left out.

    The best arm's lead over the second is tested after both were picked. Among arms that do not differ the gap of the
    best two is smaller than that of any other two, so picking does not raise the rate of false leads at an evaluation
    point above 5%. Over many evaluation points one may still be false.

    Source: IsoCompute (arXiv 2603.12151): the best N by budget. There the budget is in rollouts and the best N is
    fitted by a sigmoid; here it is in the comparison's unit, and nothing is fitted.
    """
    best = []
    for eval_point in comparison.eval_points:
        matched = [arm for arm in comparison.arms if is_matched(arm, comparison.unit, eval_point)]
        scored = [(arm, scores_at(comparison, arm, eval_point, k)) for arm in matched]
        if len(scored) < 2:
            continue
        # of equal arms the earlier counts as the better
        (first, first_SP), (second, second_SP), *_ = sorted(scored, key=lambda item: -item[1].mean().round(12))
        lead = difference_interval(second_SP, first_SP, seeds_paired=have_same_seeds(second, first))
        best.append(BestArm(eval_point, first.name, second.name, lead, conclusion_of(lead) == "B leads"))
    return tuple(best)
