"""Which prompts and which tasks changed: prompts gained and lost since the checkpoint, and the trend of each task.

A prompt is solved if at least one of n responses is correct. At low pass rates that depends on n, so every count comes
with the expected number of prompts solved in k attempts, which does not, and with the gains and losses that luck alone
would give. A change counts only if its interval excludes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison, have_same_seeds, num_correct_at, scores_at
from brorl.comparison.matching import Spread
from brorl.evaluation.paired import (
    Conclusion,
    CorrectedInterval,
    conclusion_of,
    difference_interval,
    mean_over_runs,
)
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate

Movement = Literal["improves", "degrades", "no change shown"]


@dataclass(frozen=True)
class CoverageChange:
    """Prompts that the runs of an arm solve and the start did not, and the reverse."""

    arm: str
    gained: Spread  # prompts solved now and not at the start, over runs
    lost: Spread  # prompts solved at the start and not now
    kept: Spread  # prompts solved at both
    by_chance: Spread  # gains (and as many losses) to expect if no pass rate had changed
    k: int  # attempts of the expected numbers
    expected_start: Spread  # prompts that k attempts of the start are expected to solve (the sum of pass@k)
    expected_end: Spread  # the same now
    expected_change: Estimate  # their difference with a 95% interval, in prompts
    # the same with an interval corrected for the number of arms; in its conclusion the start is A
    corrected: CorrectedInterval
    gained_ids: tuple[str, ...]  # prompts that a majority of the runs gained
    lost_ids: tuple[str, ...]  # prompts that a majority of the runs lost


@dataclass(frozen=True)
class CoverageDifference:
    """Prompts that one arm solves and the other does not; one that exactly half of the runs solve is on no side."""

    only_a: tuple[str, ...]  # prompts that more than half of A's runs solve and fewer than half of B's
    only_b: tuple[str, ...]  # the reverse
    both: int  # number of prompts that more than half of the runs of each solve
    neither: int  # number of prompts that fewer than half of the runs of each solve
    k: int  # attempts of the expected number
    expected: Estimate  # B's expected number of prompts solved in k attempts minus A's, with a 95% interval


def coverage_change(comparison: Comparison, arm: Arm, spent: float, k: int, num_intervals: int = 1) -> CoverageChange:
    """Count the prompts that the runs of an arm gained and lost since the start.

    Gains and losses by chance: if a prompt's pass rate had not changed, its c correct responses of both evaluations
    would fall on either with equal probability, and all of them on one evaluation of n with the probability
    C(2n - c, n) / C(2n, n). Evaluations that share random numbers differ less, so this is rather too many.

    The expected numbers are of k attempts. The corrected interval holds together with those of `num_intervals` arms.
    """
    n = comparison.num_samples
    start_SP, end_SP = num_correct_at(comparison, arm, 0), num_correct_at(comparison, arm, spent)
    gained_SP, lost_SP = (start_SP == 0) & (end_SP > 0), (start_SP > 0) & (end_SP == 0)
    total_SP = start_SP + end_SP
    before_SP, after_SP = pass_at_k(start_SP, n, k), pass_at_k(end_SP, n, k)

    def change_at(level: float) -> Estimate:
        return _in_prompts(mean_over_runs(after_SP - before_SP, lowest=-1, level=level), comparison)

    return CoverageChange(
        arm=arm.name,
        gained=_total(gained_SP),
        lost=_total(lost_SP),
        kept=_total((start_SP > 0) & (end_SP > 0)),
        by_chance=_total(np.where(total_SP > 0, 1 - pass_at_k(total_SP, 2 * n, n), 0.0)),
        k=k,
        expected_start=_total(before_SP),
        expected_end=_total(after_SP),
        expected_change=change_at(0.95),
        corrected=CorrectedInterval.of(change_at, num_intervals),
        gained_ids=_ids(comparison, gained_SP.mean(0) > 0.5),
        lost_ids=_ids(comparison, lost_SP.mean(0) > 0.5),
    )


def coverage_difference(comparison: Comparison, spent: float, k: int) -> CoverageDifference:
    """Find the prompts that only one arm solves, and the expected difference in prompts solved in k attempts."""
    counts = [num_correct_at(comparison, arm, spent) for arm in comparison.arms]
    fraction_a_P, fraction_b_P = ((count_SP > 0).mean(0) for count_SP in counts)
    score_a_SP, score_b_SP = (pass_at_k(count_SP, comparison.num_samples, k) for count_SP in counts)
    difference = difference_interval(score_a_SP, score_b_SP, seeds_paired=have_same_seeds(*comparison.arms))
    return CoverageDifference(
        only_a=_ids(comparison, (fraction_a_P > 0.5) & (fraction_b_P < 0.5)),
        only_b=_ids(comparison, (fraction_b_P > 0.5) & (fraction_a_P < 0.5)),
        both=int(((fraction_a_P > 0.5) & (fraction_b_P > 0.5)).sum()),
        neither=int(((fraction_a_P < 0.5) & (fraction_b_P < 0.5)).sum()),
        k=k,
        expected=_in_prompts(difference, comparison),
    )


@dataclass(frozen=True)
class TaskTrend:
    """Changes of the scores of two arms on one task since the start."""

    task: str
    num_prompts: int
    change_a: Estimate  # A's score minus the start's, with a 95% interval
    change_b: Estimate  # B's
    difference: Estimate  # B's score minus A's
    movement_a: Movement  # the movement that `change_a` shows
    movement_b: Movement  # the movement that `change_b` shows
    lead: Conclusion  # the conclusion from `difference`
    kind: str  # the trend as text, e.g. "both improve and B leads"


def movement_of(change: Estimate) -> Movement:
    """Return the movement that a change of a score shows; none unless its interval excludes 0."""
    shown: dict[Conclusion, Movement] = {"B leads": "improves", "A leads": "degrades"}
    return shown.get(conclusion_of(change), "no change shown")


def kind_of(movement_a: Movement, movement_b: Movement, lead: Conclusion) -> str:
    """Name a task's trend: the movements of the arms, and the leader at the end.

    The paper's three are "both improve and B leads", "A degrades while B improves" and "neither gains".

    Source: BroRL (arXiv 2510.01180, Figure 4), which sorts by the curves' looks; here an interval must show it.
    """
    unchanged = "no change shown"
    if movement_a == movement_b:
        kind = "neither gains" if movement_a == unchanged else f"both {movement_a.removesuffix('s')}"
        if lead == "no difference shown":
            return kind if movement_a == unchanged else f"{kind}, no lead shown"
    elif unchanged in (movement_a, movement_b):
        kind = f"only A {movement_a}" if movement_b == unchanged else f"only B {movement_b}"
    else:
        worse, better = "AB" if movement_a == "degrades" else "BA"
        kind = f"{worse} degrades while {better} improves"
        if lead == f"{better} leads":
            return kind
    return kind if lead == "no difference shown" else f"{kind} and {lead}"


def task_trends(comparison: Comparison, spent: float) -> tuple[TaskTrend, ...]:
    """Return the trend of each task of a comparison of two arms, by name.

    Every task has its own 95% interval: of tasks without a change, up to one in 20 will
    seem to have changed in each of the three respects.
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


def _total(value_SP: NDArray[Any]) -> Spread:
    """Return the spread over runs of a sum over prompts."""
    return Spread.of([float(total) for total in value_SP.sum(1)])


def _in_prompts(fraction: Estimate, comparison: Comparison) -> Estimate:
    number = len(comparison.prompts)
    return Estimate(fraction.value * number, fraction.low * number, fraction.high * number)


def _ids(comparison: Comparison, chosen_P: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(prompt.id for prompt, chosen in zip(comparison.prompts, chosen_P, strict=True) if chosen)
