"""All numbers of a comparison, computed once for its tables, text, record and figures.

In: a comparison of two arms or more. Out: scores and costs of each arm at each evaluation point, whether the runs are
matched, and either the differences of the pair (two arms) or the frontier (more).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.corrected_interval import CorrectedInterval, corrected_level
from brorl.comparison.coverage import CoverageChange, CoverageDifference, coverage_change, coverage_difference
from brorl.comparison.equal_cost import EqualCost, at_equal_cost
from brorl.comparison.equal_score import EqualScore, at_equal_score
from brorl.comparison.frontier import Frontier, frontier
from brorl.comparison.matching import ArmCosts, RunMatch, costs_at, match_at, unmatched_runs
from brorl.comparison.paired import PairedDifference, difference_parts, mean_over_runs, paired_difference
from brorl.comparison.scores import PASS_1, Measure, have_same_seeds, score_at, scores_at, start_scores
from brorl.comparison.seeds_needed import SeedsNeeded, seeds_needed
from brorl.comparison.task_trend import TaskTrend, task_trends
from brorl.comparison.token_efficiency import (
    TokenEfficiency,
    TrainingEfficiency,
    start_efficiency,
    token_efficiency,
    training_efficiency,
)
from brorl.cost import UNITS
from brorl.evaluation.pass_at_k import Estimate
from brorl.format import counted


@dataclass(frozen=True)
class ArmScores:
    """An arm at an evaluation point.

    Attributes:
        eval_point: The evaluation point.
        costs: Costs of its runs.
        matched: Whether none of its runs overshot the evaluation point by more than the tolerance.
        pass_at: pass@1 and pass@k of the largest k; at the budget, every k.
    """

    eval_point: float
    costs: ArmCosts
    matched: bool
    pass_at: Mapping[int, Estimate]


@dataclass(frozen=True)
class TaskScores:
    """One task's scores at the budget.

    Attributes:
        task: The prompts' source.
        num_prompts: Number of its prompts.
        start: pass@1 and pass@k (of the largest k) of the checkpoint.
        arms: The same of each arm, by name.
        differences: B less A in each, for two arms; else empty.
    """

    task: str
    num_prompts: int
    start: Mapping[int, Estimate]
    arms: Mapping[str, Mapping[int, Estimate]]
    differences: Mapping[int, PairedDifference]


@dataclass(frozen=True)
class Pair:
    """B, the second arm, against A, the first.

    Attributes:
        differences: B less A at the budget, by k.
        by_point: The same at every evaluation point, for pass@1 and the largest k.
        worst: B less A in worst@k of the largest k; None if that is 1.
        worst_at: worst@k of the start, A and B; None if `worst` is.
        trends: Trends of the tasks.
        coverage: Prompts that one solves and the other does not.
        seeds_ahead: Number of seeds in which B's pass@1 is above A's; None unless both have the same seeds.
    """

    differences: Mapping[int, PairedDifference]
    by_point: Mapping[float, Mapping[int, PairedDifference]]
    worst: PairedDifference | None
    worst_at: tuple[Estimate, Estimate, Estimate] | None
    trends: tuple[TaskTrend, ...]
    coverage: CoverageDifference
    seeds_ahead: int | None


@dataclass(frozen=True)
class AgainstFirst:
    """A later arm of a sweep against the first, where both had spent the same of one unit.

    Attributes:
        arm: The later arm's name.
        equal: The scores of both, by k: pass@1 and pass@k of the largest k.
        corrected: By k, the difference with an interval corrected for the number of known differences of all later
            arms in all units and both k; None if the difference is not known.
    """

    arm: str
    equal: Mapping[int, EqualCost]
    corrected: Mapping[int, CorrectedInterval | None]


@dataclass(frozen=True, eq=False)
class ComparisonResults:
    """All numbers of a comparison.

    Attributes:
        comparison: The comparison.
        key: Titles of the arms by letter; empty if the arms have names.
        ks: The k of every pass@k, rising; 1 is always among them.
        start: pass@k of the checkpoint, for every k.
        arms: Each arm at each evaluation point, by name.
        matches: The cost of every run at the budget, and whether it is matched.
        unmatched: A sentence for each run that is not matched at the budget.
        equal: pass@1 of the arms where all runs had spent the same: first of the budget's unit, if the runs ended with
            different amounts of it, then of each other unit.
        equal_score: Coverage of the arms where each had the same pass@1; None if too few rose above the start, or
            pass@1 is the only measure.
        efficiency: Scores per token of the start and the arms, at the budget.
        training: Throughput and mixed fraction of the arms.
        coverage: Prompts gained and lost since the start, by arm.
        tasks: Scores by task; empty if there is one.
        pair: The difference of two arms; None if there are more.
        against_first: Each later arm against the first at equal cost in each unit, if there are more than two arms.
        frontiers: The frontier in each measure, if there are more than two arms.
        seeds_needed: By later arm, the seeds with which a difference of 0.02 from the first arm in pass@1 at the budget
            is shown, without correction; None if the arms have one seed or there is one prompt.
    """

    comparison: Comparison
    key: Mapping[str, str]
    ks: tuple[int, ...]
    start: Mapping[int, Estimate]
    arms: Mapping[str, tuple[ArmScores, ...]]
    matches: tuple[RunMatch, ...]
    unmatched: tuple[str, ...]
    equal: tuple[EqualCost, ...]
    equal_score: EqualScore | None
    efficiency: tuple[TokenEfficiency, ...]
    training: tuple[TrainingEfficiency, ...]
    coverage: tuple[CoverageChange, ...]
    tasks: tuple[TaskScores, ...]
    pair: Pair | None
    against_first: tuple[AgainstFirst, ...]
    frontiers: tuple[Frontier, ...]
    seeds_needed: Mapping[str, SeedsNeeded | None]

    @property
    def names(self) -> list[str]:
        """Names of the arms."""
        return [arm.name for arm in self.comparison.arms]

    @property
    def end_ks(self) -> tuple[int, ...]:
        """The smallest and the largest k; one if they are equal."""
        return _ends(self.ks)

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
    """Return a conclusion or a trend with the names of the arms for A and B."""
    return re.sub(r"\b[AB]\b", lambda letter: a if letter[0] == "A" else b, text)


@lru_cache(maxsize=2)  # tables, text, record and figures of a comparison are made one after the other
def results_of(comparison: Comparison) -> ComparisonResults:
    """Compute all numbers of a comparison.

    Raises:
        ValueError: If it has fewer than two arms, two arms of one name, or a run without an evaluation at an evaluation
            point.
    """
    arms, names = comparison.arms, [arm.name for arm in comparison.arms]
    if len(names) < 2:
        raise ValueError(f"a comparison needs at least two arms, not {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"arms need different names, not {', '.join(names)}")
    budget, ks = comparison.eval_points[-1], tuple(sorted({1, *comparison.ks}))
    matches = match_at(arms, comparison.unit, budget)
    two = len(names) == 2
    efficiency = [token_efficiency(comparison, arm, budget) for arm in arms]
    return ComparisonResults(
        comparison=comparison,
        key={arm.name: arm.title for arm in arms if arm.title},
        ks=ks,
        start={k: mean_over_runs(start_scores(comparison, Measure(k))) for k in ks},
        arms={arm.name: tuple(_arm_scores(comparison, arm, p, ks) for p in comparison.eval_points) for arm in arms},
        matches=matches,
        unmatched=unmatched_runs(matches),
        equal=_equal(comparison),
        equal_score=at_equal_score(comparison, ks[-1]) if ks[-1] > 1 else None,
        efficiency=sum(efficiency, start_efficiency(comparison)),
        training=tuple(training_efficiency(arm) for arm in arms),
        coverage=tuple(coverage_change(comparison, arm, budget, ks[-1], len(arms)) for arm in arms),
        tasks=_task_scores(comparison, ks),
        pair=_pair(comparison, ks) if two else None,
        against_first=() if two else _against_first(comparison, ks),
        frontiers=() if two else _frontiers(comparison, ks[-1]),
        seeds_needed=_seeds_needed(comparison),
    )


def _ends(ks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((ks[0], ks[-1])))


def _arm_scores(comparison: Comparison, arm: Arm, eval_point: float, ks: tuple[int, ...]) -> ArmScores:
    shown_ks = ks if eval_point == comparison.eval_points[-1] else _ends(ks)
    return ArmScores(
        eval_point=eval_point,
        costs=costs_at(arm, comparison.unit, eval_point),
        matched=all(run.matched for run in match_at([arm], comparison.unit, eval_point)),
        pass_at={k: mean_over_runs(scores_at(comparison, arm, eval_point, Measure(k))) for k in shown_ks},
    )


def _task_scores(comparison: Comparison, ks: tuple[int, ...]) -> tuple[TaskScores, ...]:
    names = comparison.task_names()
    if len(names) < 2:
        return ()
    arms, ks, budget = comparison.arms, _ends(ks), comparison.eval_points[-1]
    start = {k: start_scores(comparison, Measure(k)) for k in ks}
    ends = {arm.name: {k: scores_at(comparison, arm, budget, Measure(k)) for k in ks} for arm in arms}
    found = []
    for name in names:
        chosen = comparison.prompts_of(name)
        differences = {}
        if len(arms) == 2:
            paired = have_same_seeds(*arms)
            for k in ks:
                score_a_SP, score_b_SP = (by_k[k][:, chosen] for by_k in ends.values())
                differences[k] = paired_difference(score_a_SP, score_b_SP, seeds_paired=paired)
        found.append(
            TaskScores(
                task=name,
                num_prompts=len(chosen),
                start={k: mean_over_runs(start[k][:, chosen]) for k in ks},
                arms={a: {k: mean_over_runs(by_k[k][:, chosen]) for k in ks} for a, by_k in ends.items()},
                differences=differences,
            )
        )
    return tuple(found)


def _difference(comparison: Comparison, spent: float, measure: Measure = PASS_1) -> PairedDifference:
    """Compare two arms at an amount of the budget."""
    score_a_SP, score_b_SP = (scores_at(comparison, arm, spent, measure) for arm in comparison.arms)
    return paired_difference(score_a_SP, score_b_SP, seeds_paired=have_same_seeds(*comparison.arms))


def _pair(comparison: Comparison, ks: tuple[int, ...]) -> Pair:
    budget, worst = comparison.eval_points[-1], Measure(ks[-1], worst=True)
    at_end = [scores_at(comparison, arm, budget) for arm in comparison.arms]
    by_point = {
        point: {k: _difference(comparison, point, Measure(k)) for k in _ends(ks)} for point in comparison.eval_points
    }
    worst_at = None
    if worst.k > 1:
        at_a, at_b = (mean_over_runs(scores_at(comparison, arm, budget, worst)) for arm in comparison.arms)
        worst_at = mean_over_runs(start_scores(comparison, worst)), at_a, at_b
    return Pair(
        differences=by_point[budget] | {k: _difference(comparison, budget, Measure(k)) for k in ks[1:-1]},
        by_point=by_point,
        worst=_difference(comparison, budget, worst) if worst.k > 1 else None,
        worst_at=worst_at,
        trends=task_trends(comparison, budget),
        coverage=coverage_difference(comparison, budget, ks[-1]),
        seeds_ahead=(int((at_end[1].mean(1) > at_end[0].mean(1)).sum()) if have_same_seeds(*comparison.arms) else None),
    )


def _equal(comparison: Comparison) -> tuple[EqualCost, ...]:
    """Compare at equal cost in each unit that every run spent something of.

    The unit of the budget comes first, but only if the runs that used up the budget spent different amounts.
    """
    unit, budget = comparison.unit, comparison.eval_points[-1]
    runs = [run for arm in comparison.arms for run in arm.runs if run.ended_early is None]
    spent = {score_at(run, unit, budget).cost.of(unit) for run in runs}
    units = [*([unit] if len(spent) > 1 else []), *(other for other in UNITS if other != unit)]
    return tuple(equal for equal in (at_equal_cost(comparison, one) for one in units) if equal.amount > 0)


def _against_first(comparison: Comparison, ks: tuple[int, ...]) -> tuple[AgainstFirst, ...]:
    """Compare every later arm with the first as two arms, at the largest cost that every run of the two reached.

    Steps are left out unless the budget counts them: steps of a larger N are larger.
    """
    first, *others = comparison.arms
    units = (comparison.unit, *(unit for unit in UNITS if unit not in (comparison.unit, "steps")))
    found = []
    for arm in others:
        two = replace(comparison, arms=(first, arm))
        for unit in units:
            equal = {k: at_equal_cost(two, unit, Measure(k)) for k in _ends(ks)}
            if equal[1].amount > 0:
                found.append((arm.name, equal))
    number = sum(one.difference is not None for _, equal in found for one in equal.values())
    return tuple(
        AgainstFirst(name, equal, {k: _corrected(one.difference, number) for k, one in equal.items()})
        for name, equal in found
    )


def _corrected(difference: PairedDifference | None, num_intervals: int) -> CorrectedInterval | None:
    if difference is None:
        return None
    return CorrectedInterval.of(difference.at_level(corrected_level(num_intervals)), num_intervals)


def _seeds_needed(comparison: Comparison) -> dict[str, SeedsNeeded | None]:
    first, *others = comparison.arms
    budget, found = comparison.eval_points[-1], {}
    for arm in others:
        scores = (scores_at(comparison, one, budget) for one in (first, arm))
        found[arm.name] = seeds_needed(difference_parts(*scores, seeds_paired=have_same_seeds(first, arm)))
    return found


def _frontiers(comparison: Comparison, largest_k: int) -> tuple[Frontier, ...]:
    measures = [PASS_1, *([Measure(largest_k), Measure(largest_k, worst=True)] if largest_k > 1 else [])]
    return tuple(frontier(comparison, measure) for measure in measures)
