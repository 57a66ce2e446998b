"""All numbers of a comparison, computed once for its tables, text, record and figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from brorl.arrays import IntArray
from brorl.comparison.arms import Arm, Comparison, have_same_seeds, scores_at, start_scores
from brorl.comparison.matching import (
    BestArm,
    CoverageChange,
    EqualCost,
    RunMatch,
    Spread,
    TokenEfficiency,
    at_equal_cost,
    costs_at,
    coverage_change,
    frontier,
    is_matched,
    match_at,
    token_efficiency,
    training_efficiency,
)
from brorl.cost import UNITS
from brorl.evaluation.paired import PairedDifference, SeedsNeeded, mean_over_runs, paired_difference, seeds_needed
from brorl.format import Estimate, counted

START = "start"  # the checkpoint, among the arms


@dataclass(frozen=True)
class ArmScores:
    """An arm at an evaluation point."""

    eval_point: float
    costs: Mapping[str, Spread]  # costs of its runs, by name: steps, seconds, samples, sampled_tokens, unique_tokens
    matched: bool  # whether none of its runs overshot the evaluation point by more than the tolerance
    pass_at: Mapping[int, Estimate]  # pass@1 and pass@k of the largest k; at the budget, every k


@dataclass(frozen=True)
class TaskScores:
    """One task's scores at the budget."""

    task: str
    num_prompts: int
    scores: Mapping[str, Mapping[int, Estimate]]  # pass@1 and pass@k (of the largest k) of the start and of each arm
    differences: Mapping[str, Mapping[int, PairedDifference]]  # each later arm minus the first


@dataclass(frozen=True, eq=False)
class ComparisonResults:
    """All numbers of a comparison."""

    comparison: Comparison  # the comparison
    key: Mapping[str, str]  # titles of the arms by letter; empty if the arms have names
    ks: tuple[int, ...]  # the k of every pass@k, rising; 1 is always among them
    start: Mapping[int, Estimate]  # pass@k of the checkpoint, for every k
    arms: Mapping[str, tuple[ArmScores, ...]]  # each arm at each evaluation point, by name
    matches: tuple[RunMatch, ...]  # the cost of every run at the budget, and whether it is matched
    differences: Mapping[str, Mapping[int, PairedDifference]]  # each later arm minus the first at the budget, by k
    # each later arm minus the first where both had spent the same: of the budget's unit, then of each other unit
    equal: tuple[EqualCost, ...]
    best: Mapping[int, tuple[BestArm, ...]]  # the best arm of each evaluation point, by k: the smallest and the largest
    efficiency: Mapping[str, TokenEfficiency]  # scores per token of the start and the arms, at the budget
    # throughput and mixed fraction of the arms, by name (`training_efficiency`)
    training: Mapping[str, Mapping[str, Spread | None]]
    coverage: tuple[CoverageChange, ...]  # prompts gained and lost since the start, by arm
    tasks: tuple[TaskScores, ...]  # scores by task; empty if there is one
    # by later arm, the seeds with which a difference of 0.02 from the first arm in pass@1 at the budget is shown,
    # without correction; None if the arms have one seed or there is one prompt
    seeds_needed: Mapping[str, SeedsNeeded | None]

    @property
    def names(self) -> list[str]:
        """Names of the arms."""
        return [arm.name for arm in self.comparison.arms]

    @property
    def pair(self) -> Mapping[int, PairedDifference] | None:
        """The second arm minus the first at the budget, by k, if these are the only arms."""
        return next(iter(self.differences.values())) if len(self.differences) == 1 else None

    @property
    def matched(self) -> bool:
        """Whether no run overshot the budget by more than the tolerance."""
        return all(run.matched for run in self.matches)

    @property
    def end_ks(self) -> tuple[int, ...]:
        """The smallest and the largest k; one if they are equal."""
        return tuple(dict.fromkeys((self.ks[0], self.ks[-1])))

    @property
    def seeds_text(self) -> str:
        """Number of seeds of the arms: 5 seeds, or 3 to 5 seeds."""
        numbers = sorted({len(arm.runs) for arm in self.comparison.arms})
        return f"{numbers[0]} to {numbers[-1]} seeds" if len(numbers) > 1 else counted(numbers[0], "seed")

    @property
    def budget(self) -> float:
        """The last evaluation point, at which the arms are compared."""
        return self.comparison.eval_points[-1]


def with_names(text: str, a: str, b: str) -> str:
    """Return a conclusion with the names of the arms for A and B."""
    return re.sub(r"\b[AB]\b", lambda letter: a if letter[0] == "A" else b, text)


def results_of(comparison: Comparison) -> ComparisonResults:
    """Compute all numbers of a comparison.

    Raises:
        ValueError: If it has fewer than two arms, two arms of one name, or a run without an evaluation at an evaluation
            point.
    """
    arms, names = comparison.arms, [arm.name for arm in comparison.arms]
    if len(names) < 2:
        raise ValueError(f"a comparison needs at least two arms, got {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"arms need different names, not {', '.join(names)}")
    budget, ks = comparison.eval_points[-1], tuple(sorted({1, *comparison.ks}))
    end_ks = tuple(dict.fromkeys((1, ks[-1])))
    differences = _differences(comparison, ks)
    return ComparisonResults(
        comparison=comparison,
        key={arm.name: arm.title for arm in arms if arm.title},
        ks=ks,
        start={k: mean_over_runs(start_scores(comparison, k)) for k in ks},
        arms={arm.name: tuple(_arm_scores(comparison, arm, p, ks) for p in comparison.eval_points) for arm in arms},
        matches=match_at(arms, comparison.unit, budget),
        differences=differences,
        equal=_equal(comparison, end_ks),
        best={k: frontier(comparison, k) for k in end_ks},
        efficiency={
            START: token_efficiency(comparison),
            **{arm.name: token_efficiency(comparison, arm, budget) for arm in arms},
        },
        training={arm.name: training_efficiency(arm) for arm in arms},
        coverage=tuple(coverage_change(comparison, arm, budget, ks[-1], len(arms)) for arm in arms),
        tasks=_task_scores(comparison, end_ks),
        seeds_needed={name: seeds_needed(by_k[1].parts) for name, by_k in differences.items()},
    )


def _arm_scores(comparison: Comparison, arm: Arm, eval_point: float, ks: tuple[int, ...]) -> ArmScores:
    shown_ks = ks if eval_point == comparison.eval_points[-1] else (ks[0], ks[-1])
    return ArmScores(
        eval_point=eval_point,
        costs=costs_at(arm, comparison.unit, eval_point),
        matched=is_matched(arm, comparison.unit, eval_point),
        pass_at={k: mean_over_runs(scores_at(comparison, arm, eval_point, k)) for k in shown_ks},
    )


def _differences(
    comparison: Comparison, ks: Sequence[int], prompts: IntArray | slice = slice(None)
) -> dict[str, dict[int, PairedDifference]]:
    """Compare each later arm with the first at the budget, on all prompts or some."""
    first, *others = comparison.arms
    budget = comparison.eval_points[-1]

    def difference(arm: Arm, k: int) -> PairedDifference:
        a_SP, b_SP = (scores_at(comparison, one, budget, k)[:, prompts] for one in (first, arm))
        return paired_difference(a_SP, b_SP, seeds_paired=have_same_seeds(first, arm))

    return {arm.name: {k: difference(arm, k) for k in ks} for arm in others}


def _task_scores(comparison: Comparison, ks: tuple[int, ...]) -> tuple[TaskScores, ...]:
    names, budget = comparison.task_names(), comparison.eval_points[-1]
    if len(names) < 2:
        return ()
    scores = {START: {k: start_scores(comparison, k) for k in ks}}
    scores |= {arm.name: {k: scores_at(comparison, arm, budget, k) for k in ks} for arm in comparison.arms}
    tasks = []
    for name in names:
        chosen = comparison.prompts_of(name)
        means = {a: {k: mean_over_runs(by_k[k][:, chosen]) for k in ks} for a, by_k in scores.items()}
        tasks.append(TaskScores(name, len(chosen), means, _differences(comparison, ks, chosen)))
    return tuple(tasks)


def _equal(comparison: Comparison, ks: tuple[int, ...]) -> tuple[EqualCost, ...]:
    """Compare every later arm with the first at the largest cost that every run of the two reached.

    Steps are left out unless the budget counts them: a step costs more at a larger N.
    """
    units = (comparison.unit, *(unit for unit in UNITS if unit not in (comparison.unit, "steps")))
    rows = [at_equal_cost(comparison, arm, unit, ks) for arm in comparison.arms[1:] for unit in units]
    rows = [row for row in rows if row.amount > 0]
    number = sum(d is not None for row in rows for d in row.differences.values())
    return tuple(replace(row, corrected=row.corrected_for(number)) for row in rows)
