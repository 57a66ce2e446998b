"""All numbers of a comparison, computed once for its tables, text, record and figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from brorl.comparison.arms import (
    PASS_1,
    Arm,
    Comparison,
    Measure,
    have_same_seeds,
    score_at,
    scores_at,
    start_scores,
)
from brorl.comparison.equal import EqualCost, EqualScore, at_equal_cost, at_equal_score
from brorl.comparison.frontier import Frontier, frontier
from brorl.comparison.matching import (
    RunMatch,
    Spread,
    TokenEfficiency,
    costs_at,
    match_at,
    token_efficiency,
    training_efficiency,
)
from brorl.comparison.prompt_changes import (
    CoverageChange,
    CoverageDifference,
    TaskTrend,
    coverage_change,
    coverage_difference,
    task_trends,
)
from brorl.cost import UNITS
from brorl.evaluation.paired import (
    ROUNDING,
    CorrectedInterval,
    PairedDifference,
    SeedsNeeded,
    difference_parts,
    mean_over_runs,
    paired_difference,
    seeds_needed,
)
from brorl.format import Estimate, counted


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
    start: Mapping[int, Estimate]  # pass@1 and pass@k (of the largest k) of the checkpoint
    arms: Mapping[str, Mapping[int, Estimate]]  # the same of each arm, by name
    differences: Mapping[int, PairedDifference]  # B minus A in each, for two arms; else empty


@dataclass(frozen=True)
class Pair:
    """B, the second arm, against A, the first."""

    differences: Mapping[int, PairedDifference]  # B minus A at the budget, by k
    # the same at every evaluation point, for pass@1 and the largest k
    by_point: Mapping[float, Mapping[int, PairedDifference]]
    worst: PairedDifference | None  # B minus A in worst@k of the largest k; None if that is 1
    worst_at: tuple[Estimate, Estimate, Estimate] | None  # worst@k of the start, A and B; None if `worst` is
    trends: tuple[TaskTrend, ...]  # trends of the tasks
    coverage: CoverageDifference  # prompts that one solves and the other does not
    seeds_ahead: int | None  # number of seeds in which B's pass@1 is above A's; None unless both have the same seeds


@dataclass(frozen=True)
class AgainstFirst:
    """A later arm of a sweep against the first, where both had spent the same of one unit."""

    arm: str
    equal: Mapping[int, EqualCost]  # the scores of both, by k: pass@1 and pass@k of the largest k
    # by k, the difference with an interval corrected for the number of known differences of all later arms in
    # all units and both k; None if the difference is not known
    corrected: Mapping[int, CorrectedInterval | None]


@dataclass(frozen=True, eq=False)
class ComparisonResults:
    """All numbers of a comparison."""

    comparison: Comparison  # the comparison
    key: Mapping[str, str]  # titles of the arms by letter; empty if the arms have names
    ks: tuple[int, ...]  # the k of every pass@k, rising; 1 is always among them
    start: Mapping[int, Estimate]  # pass@k of the checkpoint, for every k
    arms: Mapping[str, tuple[ArmScores, ...]]  # each arm at each evaluation point, by name
    matches: tuple[RunMatch, ...]  # the cost of every run at the budget, and whether it is matched
    # pass@1 of the arms where all runs had spent the same: first of the budget's unit, if the runs ended with different
    # amounts of it, then of each other unit
    equal: tuple[EqualCost, ...]
    # coverage of the arms where each had the same pass@1; None if too few rose above the start, or pass@1 is the only
    # measure
    equal_score: EqualScore | None
    efficiency: tuple[TokenEfficiency, ...]  # scores per token of the start and the arms, at the budget
    # throughput and mixed fraction of the arms, by name (`training_efficiency`)
    training: Mapping[str, Mapping[str, Spread | None]]
    coverage: tuple[CoverageChange, ...]  # prompts gained and lost since the start, by arm
    tasks: tuple[TaskScores, ...]  # scores by task; empty if there is one
    pair: Pair | None  # the difference of two arms; None if there are more
    # each later arm against the first at equal cost in each unit, if there are more than two arms
    against_first: tuple[AgainstFirst, ...]
    frontiers: tuple[Frontier, ...]  # the frontier in each measure, if there are more than two arms
    # by later arm, the seeds with which a difference of 0.02 from the first arm in pass@1 at the budget is shown,
    # without correction; None if the arms have one seed or there is one prompt
    seeds_needed: Mapping[str, SeedsNeeded | None]

    @property
    def names(self) -> list[str]:
        """Names of the arms."""
        return [arm.name for arm in self.comparison.arms]

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
    """Return a conclusion or a trend with the names of the arms for A and B."""
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
    two, k = len(names) == 2, ks[-1]
    measures = [PASS_1, *([Measure(k), Measure(k, worst=True)] if k > 1 else [])]
    return ComparisonResults(
        comparison=comparison,
        key={arm.name: arm.title for arm in arms if arm.title},
        ks=ks,
        start={k: mean_over_runs(start_scores(comparison, Measure(k))) for k in ks},
        arms={arm.name: tuple(_arm_scores(comparison, arm, p, ks) for p in comparison.eval_points) for arm in arms},
        matches=match_at(arms, comparison.unit, budget),
        equal=_equal(comparison),
        equal_score=at_equal_score(comparison, k) if k > 1 else None,
        efficiency=sum((token_efficiency(comparison, arm, budget) for arm in arms), token_efficiency(comparison)),
        training={arm.name: training_efficiency(arm) for arm in arms},
        coverage=tuple(coverage_change(comparison, arm, budget, k, len(arms)) for arm in arms),
        tasks=_task_scores(comparison, (1, k) if k > 1 else (1,)),
        pair=_pair(comparison, ks) if two else None,
        against_first=() if two else _against_first(comparison, (1, k) if k > 1 else (1,)),
        frontiers=() if two else tuple(frontier(comparison, measure) for measure in measures),
        seeds_needed=_seeds_needed(comparison),
    )


def _arm_scores(comparison: Comparison, arm: Arm, eval_point: float, ks: tuple[int, ...]) -> ArmScores:
    shown_ks = ks if eval_point == comparison.eval_points[-1] else (ks[0], ks[-1])
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
    arms, budget = comparison.arms, comparison.eval_points[-1]
    start = {k: start_scores(comparison, Measure(k)) for k in ks}
    ends = {arm.name: {k: scores_at(comparison, arm, budget, Measure(k)) for k in ks} for arm in arms}
    tasks = []
    for name in names:
        chosen = comparison.prompts_of(name)
        start_by_k = {k: mean_over_runs(start[k][:, chosen]) for k in ks}
        end_by_k = {a: {k: mean_over_runs(by_k[k][:, chosen]) for k in ks} for a, by_k in ends.items()}
        differences = {}
        if len(arms) == 2:
            pairs = {k: [by_k[k][:, chosen] for by_k in ends.values()] for k in ks}
            differences = {k: paired_difference(*pairs[k], seeds_paired=have_same_seeds(*arms)) for k in ks}
        tasks.append(TaskScores(name, len(chosen), start_by_k, end_by_k, differences))
    return tuple(tasks)


def _pair(comparison: Comparison, ks: tuple[int, ...]) -> Pair:
    budget, worst = comparison.eval_points[-1], Measure(ks[-1], worst=True)
    paired = have_same_seeds(*comparison.arms)

    def difference(spent: float, measure: Measure) -> PairedDifference:
        return paired_difference(
            *(scores_at(comparison, a, spent, measure) for a in comparison.arms), seeds_paired=paired
        )

    by_point = {p: {k: difference(p, Measure(k)) for k in dict.fromkeys((1, ks[-1]))} for p in comparison.eval_points}
    worst_at = None
    if worst.k > 1:
        at_a, at_b = (mean_over_runs(scores_at(comparison, arm, budget, worst)) for arm in comparison.arms)
        worst_at = mean_over_runs(start_scores(comparison, worst)), at_a, at_b
    end_a_S, end_b_S = (scores_at(comparison, arm, budget).mean(1) for arm in comparison.arms)
    return Pair(
        differences=by_point[budget] | {k: difference(budget, Measure(k)) for k in ks[1:-1]},
        by_point=by_point,
        worst=difference(budget, worst) if worst.k > 1 else None,
        worst_at=worst_at,
        trends=task_trends(comparison, budget),
        coverage=coverage_difference(comparison, budget, ks[-1]),
        seeds_ahead=int((end_b_S > end_a_S + ROUNDING).sum()) if paired else None,
    )


def _equal(comparison: Comparison) -> tuple[EqualCost, ...]:
    """Compare at equal cost in each unit that every run spent something of.

    The unit of the budget comes first, but only if the runs that used up the budget spent different amounts.
    """
    unit, budget = comparison.unit, comparison.eval_points[-1]
    runs = [run for arm in comparison.arms for run in arm.runs if run.ended_early is None]
    spent = {score_at(run, unit, budget).cost.of(unit) for run in runs}
    units = [*([unit] if len(spent) > 1 else []), *(other for other in UNITS if other != unit)]
    return tuple(equal for equal in (at_equal_cost(comparison, unit) for unit in units) if equal.amount > 0)


def _against_first(comparison: Comparison, ks: tuple[int, ...]) -> tuple[AgainstFirst, ...]:
    """Compare every later arm with the first as two arms, at the largest cost that every run of the two reached.

    Steps are left out unless the budget counts them: a step costs more at a larger N.
    """
    first, *others = comparison.arms
    units = (comparison.unit, *(unit for unit in UNITS if unit not in (comparison.unit, "steps")))
    rows = [
        (arm.name, {k: at_equal_cost(replace(comparison, arms=(first, arm)), unit, Measure(k)) for k in ks})
        for arm in others
        for unit in units
    ]
    rows = [(name, equal) for name, equal in rows if equal[1].amount > 0]
    number = sum(e.difference is not None for _, equal in rows for e in equal.values())

    def corrected(difference: PairedDifference | None) -> CorrectedInterval | None:
        return None if difference is None else CorrectedInterval.of(difference.at_level, number)

    return tuple(
        AgainstFirst(name, equal, {k: corrected(e.difference) for k, e in equal.items()}) for name, equal in rows
    )


def _seeds_needed(comparison: Comparison) -> dict[str, SeedsNeeded | None]:
    first, *others = comparison.arms
    budget = comparison.eval_points[-1]
    scores = {arm.name: scores_at(comparison, arm, budget) for arm in comparison.arms}
    parts = {
        arm.name: difference_parts(scores[first.name], scores[arm.name], seeds_paired=have_same_seeds(first, arm))
        for arm in others
    }
    return {name: seeds_needed(part) for name, part in parts.items()}
