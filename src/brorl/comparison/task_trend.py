"""The trend of each task: both arms improve, one degrades while the other improves, neither gains.

In: a comparison of two arms. Out: for each task (source of prompts) the changes of pass@1 since the start and the
difference at the end, with intervals, and the trend that they show. A change counts only if its interval excludes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brorl.comparison.arms import Comparison
from brorl.comparison.paired import Conclusion, conclusion_of, difference_interval, mean_over_runs
from brorl.comparison.scores import have_same_seeds, scores_at
from brorl.evaluation.pass_at_k import Estimate

Movement = Literal["improves", "degrades", "no change shown"]


@dataclass(frozen=True)
class TaskTrend:
    """Changes of the scores of two arms on one task since the start.

    Attributes:
        task: The prompts' source.
        num_prompts: Number of its prompts.
        change_a: A's score less the start's, with a 95% interval.
        change_b: B's.
        difference: B's score less A's.
        movement_a: The movement that `change_a` shows.
        movement_b: The movement that `change_b` shows.
        lead: The conclusion from `difference`.
        kind: The trend as text, e.g. "both improve and B leads".
    """

    task: str
    num_prompts: int
    change_a: Estimate
    change_b: Estimate
    difference: Estimate
    movement_a: Movement
    movement_b: Movement
    lead: Conclusion
    kind: str


_KINDS: dict[tuple[Movement, Movement], str] = {
    ("improves", "improves"): "both improve",
    ("degrades", "degrades"): "both degrade",
    ("degrades", "improves"): "A degrades while B improves",
    ("improves", "degrades"): "B degrades while A improves",
    ("improves", "no change shown"): "only A improves",
    ("no change shown", "improves"): "only B improves",
    ("degrades", "no change shown"): "only A degrades",
    ("no change shown", "degrades"): "only B degrades",
    ("no change shown", "no change shown"): "neither gains",
}
_EXPECTED_LEAD: dict[str, Conclusion] = {
    "A degrades while B improves": "B leads",
    "B degrades while A improves": "A leads",
}


def movement_of(change: Estimate) -> Movement:
    """Return the movement that a change of a score shows; none unless its interval excludes 0."""
    shown: dict[Conclusion, Movement] = {"B leads": "improves", "A leads": "degrades"}
    return shown.get(conclusion_of(change), "no change shown")


def kind_of(movement_a: Movement, movement_b: Movement, lead: Conclusion) -> str:
    """Name a task's trend: the movements of the arms, and the leader at the end.

    The paper's three are "both improve and B leads", "A degrades while B improves" and "neither gains".

    Args:
        movement_a: A's movement since the start.
        movement_b: B's movement since the start.
        lead: The arm that leads at the end.

    Source: BroRL (arXiv 2510.01180, Figure 4), which sorts by the curves' looks; here an interval must show it.
    """
    kind = _KINDS[movement_a, movement_b]
    if lead == "no difference shown":
        return f"{kind}, no lead shown" if movement_a == movement_b != "no change shown" else kind
    return kind if _EXPECTED_LEAD.get(kind) == lead else f"{kind} and {lead}"


def task_trends(comparison: Comparison, spent: float) -> tuple[TaskTrend, ...]:
    """Return the trend of each task of a comparison of two arms, by name.

    Every task has its own 95% interval: of tasks without a change, up to one in 20 will
    seem to have changed in each of the three respects.

    Args:
        comparison: The comparison, of two arms.
        spent: Amount of the budget, in the comparison's unit.

    Raises:
        ValueError: If a run was not evaluated there and did not end early.
    """
    a, b = comparison.arms
    end_a_SP, end_b_SP = (scores_at(comparison, arm, spent) for arm in (a, b))
    gain_a_SP, gain_b_SP = end_a_SP - scores_at(comparison, a, 0), end_b_SP - scores_at(comparison, b, 0)
    rows = []
    for task in comparison.task_names():
        of_task = comparison.prompts_of(task)
        change_a, change_b = (mean_over_runs(gain_SP[:, of_task], lowest=-1) for gain_SP in (gain_a_SP, gain_b_SP))
        difference = difference_interval(end_a_SP[:, of_task], end_b_SP[:, of_task], seeds_paired=have_same_seeds(a, b))
        moved_a, moved_b, lead = movement_of(change_a), movement_of(change_b), conclusion_of(difference)
        kind = kind_of(moved_a, moved_b, lead)
        rows.append(TaskTrend(task, len(of_task), change_a, change_b, difference, moved_a, moved_b, lead, kind))
    return tuple(rows)
