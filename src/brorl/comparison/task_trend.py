"""What kind of trajectory each task shows: both arms improve, one degrades while the other improves, neither gains.

In: a comparison of two arms, and a mark. Out: for each task (source of prompts) the changes since the start and the
difference at the mark, with intervals, and the kind that they show. Nothing is sorted by a bare sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.paired import (
    Verdict,
    difference_interval,
    have_same_seeds,
    mean_over_runs,
    scores_at,
    verdict_of,
)
from brorl.evaluation.pass_at_k import Estimate

Movement = Literal["improves", "degrades", "no change shown"]


@dataclass(frozen=True)
class TaskTrajectory:
    """How two arms fared on one task between the start and a mark.

    Attributes:
        task: The prompts' source.
        num_prompts: How many.
        change_a: A's score at the mark less the start's, with a 95% interval.
        change_b: B's.
        difference: B's score at the mark less A's.
        movement_a: What `change_a` shows.
        movement_b: What `change_b` shows.
        lead: What `difference` shows.
        kind: The kind in words, e.g. "both improve and B leads".
    """

    task: str
    num_prompts: int
    change_a: Estimate
    change_b: Estimate
    difference: Estimate
    movement_a: Movement
    movement_b: Movement
    lead: Verdict
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


def movement_of(change: Estimate) -> Movement:
    """Return what a change of a score shows: a movement if its interval excludes 0."""
    shown: dict[Verdict, Movement] = {"B leads": "improves", "A leads": "degrades"}
    return shown.get(verdict_of(change), "no change shown")


def kind_of(movement_a: Movement, movement_b: Movement, lead: Verdict) -> str:
    """Name the kind of a task's trajectories: how the arms moved, and which leads at the end.

    The paper's three are "both improve and B leads", "A degrades while B improves" and "neither gains".

    Args:
        movement_a: What A did since the start.
        movement_b: What B did.
        lead: Which leads at the end.

    Source: BroRL (arXiv 2510.01180, Figure 4), which sorts by the curves' looks; here an interval must show it.
    """
    kind = _KINDS[movement_a, movement_b]
    if lead == "no difference shown":
        return f"{kind}, no lead shown" if movement_a == movement_b != "no change shown" else kind
    expected: dict[str, Verdict] = {"A degrades while B improves": "B leads", "B degrades while A improves": "A leads"}
    if expected.get(kind) == lead:  # it goes without saying
        return kind
    return f"{kind} and {lead}"


def task_trajectories(comparison: Comparison, a: Arm, b: Arm, mark: float) -> tuple[TaskTrajectory, ...]:
    """Sort the tasks of a comparison, by name, into kinds of trajectories of pass@1 between the start and a mark.

    Every task is judged by itself at 95%: of tasks on which nothing changed, up to one in 20 will seem to have changed
    in each of the three respects.

    Args:
        comparison: What is compared.
        a: The arm that the other is measured against.
        b: The other.
        mark: How much the runs had spent, in the comparison's unit.

    Raises:
        ValueError: If a run was not evaluated there and did not end by itself.
    """
    start_a_SP, start_b_SP = (scores_at(comparison, arm, 0) for arm in (a, b))
    end_a_SP, end_b_SP = (scores_at(comparison, arm, mark) for arm in (a, b))
    source_P = np.array([prompt.source for prompt in comparison.prompts])
    rows = []
    for task in sorted({prompt.source for prompt in comparison.prompts}):
        of_task_P = source_P == task
        change_a, change_b = (
            mean_over_runs((end_SP - start_SP)[:, of_task_P], lowest=-1)
            for start_SP, end_SP in ((start_a_SP, end_a_SP), (start_b_SP, end_b_SP))
        )
        difference = difference_interval(
            end_a_SP[:, of_task_P], end_b_SP[:, of_task_P], seeds_paired=have_same_seeds(a, b)
        )
        moved_a, moved_b, lead = movement_of(change_a), movement_of(change_b), verdict_of(difference)
        kind = kind_of(moved_a, moved_b, lead)
        rows.append(
            TaskTrajectory(task, int(of_task_P.sum()), change_a, change_b, difference, moved_a, moved_b, lead, kind)
        )
    return tuple(rows)
