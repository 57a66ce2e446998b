"""Everything that a comparison shows, computed once for its tables, words, record and figures.

In: a comparison. Out: scores and costs of each arm at each mark, whether the runs are matched, and either the pair's
differences (two arms) or the frontier (more). Nothing is estimated here; `brorl.evaluation` does that. It refuses a
comparison of fewer than two arms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.coverage import CoverageChange, CoverageDifference, coverage_change, coverage_difference
from brorl.comparison.equal_cost import EqualCost, at_equal_cost
from brorl.comparison.equal_score import EqualScore, at_equal_score
from brorl.comparison.frontier import BestAt, Frontier, frontier
from brorl.comparison.matching import ArmCosts, RunMatch, costs_at, match_at, mismatch, score_at, starts_by_seed
from brorl.comparison.paired import (
    Measure,
    PairedDifference,
    difference_at,
    have_same_seeds,
    mean_over_runs,
    paired_difference,
    scores_at,
)
from brorl.comparison.task_trend import TaskTrajectory, task_trajectories
from brorl.comparison.token_efficiency import (
    TokenEfficiency,
    TrainingEfficiency,
    start_efficiency,
    token_efficiency,
    training_efficiency,
)
from brorl.cost import UNITS
from brorl.evaluation.pass_at_k import Estimate, FloatArray, pass_at_k, worst_at_k

_TIE = 1e-12


@dataclass(frozen=True)
class ArmAt:
    """An arm at a mark.

    Attributes:
        mark: The mark.
        costs: What its runs had spent by then.
        matched: Whether none of its runs spent more than the tolerance beyond the mark.
        pass_at: pass@1 and pass@k of the largest k; at the budget, every k.
    """

    mark: float
    costs: ArmCosts
    matched: bool
    pass_at: Mapping[int, Estimate]


@dataclass(frozen=True)
class TaskScores:
    """One task's scores at the budget.

    Attributes:
        task: The prompts' source.
        num_prompts: How many.
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
        by_mark: The same at every mark, for pass@1 and the largest k.
        worst: B less A in worst@k of the largest k; None if that is 1.
        worst_at: worst@k of the start, A and B.
        kinds: Kinds of trajectories of the tasks.
        coverage: Prompts that one solves and the other does not.
        seeds_ahead: Number of seeds in which B's pass@1 is above A's; None unless both have the same seeds.
    """

    differences: Mapping[int, PairedDifference]
    by_mark: Mapping[float, Mapping[int, PairedDifference]]
    worst: PairedDifference | None
    worst_at: tuple[Estimate, Estimate, Estimate] | None
    kinds: tuple[TaskTrajectory, ...]
    coverage: CoverageDifference
    seeds_ahead: int | None


@dataclass(frozen=True)
class AgainstFirst:
    """A later arm of a sweep against the first, where both had spent the same of one unit.

    Attributes:
        arm: The later arm's name.
        equal: What both scored, by k: pass@1 and pass@k of the largest k.
    """

    arm: str
    equal: Mapping[int, EqualCost]


@dataclass(frozen=True, eq=False)
class Findings:
    """What a comparison shows.

    Attributes:
        comparison: The comparison.
        key: Titles of the arms by letter; empty if they are called by names of their own.
        ks: The k of every pass@k, rising; 1 is always among them.
        start: pass@k of the checkpoint, for every k.
        arms: Each arm at each mark, by name.
        runs: Where every run stood at the budget.
        mismatch: What is not matched at the budget; empty if all runs are.
        equal: pass@1 of the arms where all runs had spent the same of a unit: of the budget's, first, if they ended
            with different amounts of it; of each other.
        equal_score: Coverage of the arms where each had the same pass@1; None if too few rose above the start, or
            pass@1 is all there is.
        efficiency: What the start and the arms score per token, at the budget.
        training: What the arms made of their time.
        coverage: Prompts gained and lost since the start, by arm.
        tasks: Scores by task; empty if there is one.
        pair: The difference of two arms; None if there are more.
        against_first: Each later arm against the first at equal cost in each unit, if there are more than two arms.
        frontiers: The frontier in each measure, if there are more than two arms.
    """

    comparison: Comparison
    key: Mapping[str, str]
    ks: tuple[int, ...]
    start: Mapping[int, Estimate]
    arms: Mapping[str, tuple[ArmAt, ...]]
    runs: tuple[RunMatch, ...]
    mismatch: tuple[str, ...]
    equal: tuple[EqualCost, ...]
    equal_score: EqualScore | None
    efficiency: tuple[TokenEfficiency, ...]
    training: tuple[TrainingEfficiency, ...]
    coverage: tuple[CoverageChange, ...]
    tasks: tuple[TaskScores, ...]
    pair: Pair | None
    against_first: tuple[AgainstFirst, ...]
    frontiers: tuple[Frontier, ...]

    @property
    def largest_k(self) -> int:
        """The largest k."""
        return self.ks[-1]

    @property
    def budget(self) -> float:
        """The last mark, at which the arms are compared."""
        return self.comparison.marks[-1]


@lru_cache(maxsize=2)  # tables, words, record and figures of a comparison are made one after the other
def findings(comparison: Comparison) -> Findings:
    """Compute what a comparison shows.

    Raises:
        ValueError: If it has fewer than two arms, two arms of one name, or runs that were not evaluated at a mark.
    """
    names = [arm.name for arm in comparison.arms]
    if len(names) < 2:
        raise ValueError(f"a comparison needs at least two arms, not {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"arms need different names, not {', '.join(names)}")
    budget, ks = comparison.marks[-1], tuple(sorted({1, *comparison.ks}))
    two = len(names) == 2
    return Findings(
        comparison=comparison,
        key={arm.name: arm.title for arm in comparison.arms if arm.title},
        ks=ks,
        start={k: mean_over_runs(start_scores(comparison, measure_of(k), k)) for k in ks},
        arms={arm.name: tuple(_arm_at(comparison, arm, m, ks) for m in comparison.marks) for arm in comparison.arms},
        runs=match_at(comparison.arms, comparison.unit, budget),
        mismatch=mismatch(comparison.arms, comparison.unit, budget),
        equal=_equal(comparison),
        equal_score=at_equal_score(comparison, ks[-1]) if ks[-1] > 1 else None,
        efficiency=(
            *start_efficiency(comparison),
            *(found for arm in comparison.arms for found in token_efficiency(comparison, arm, budget)),
        ),
        training=tuple(training_efficiency(arm) for arm in comparison.arms),
        coverage=tuple(coverage_change(comparison, arm, budget, ks[-1]) for arm in comparison.arms),
        tasks=_task_scores(comparison, ks),
        pair=_pair(comparison, ks) if two else None,
        against_first=() if two else _against_first(comparison, ks),
        frontiers=() if two else _frontiers(comparison, ks[-1]),
    )


def ends_of(ks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and the last k, once if they are one."""
    return tuple(dict.fromkeys((ks[0], ks[-1])))


def ordered_by_number(arms: Sequence[Arm]) -> bool:
    """Return whether the arms can be told apart by N, at most one of them being adaptive."""
    return len({arm.num_rollouts for arm in arms}) == len(arms)


def tied(best: BestAt) -> bool:
    """Return whether the best arm of a mark is no better than the second, which of them comes first being arbitrary."""
    return abs(best.lead.value) < _TIE


def measure_of(k: int) -> Measure:
    """Return the measure that pass@k is."""
    return "pass@1" if k == 1 else "best@k"


def task_names(comparison: Comparison) -> list[str]:
    """Return the sources of the held-out prompts, by name."""
    return sorted({prompt.source for prompt in comparison.prompts})


def prompts_of(comparison: Comparison, task: str) -> NDArray[np.int64]:
    """Return the indices of a task's prompts."""
    return np.array([i for i, prompt in enumerate(comparison.prompts) if prompt.source == task])


def start_scores(comparison: Comparison, measure: Measure, k: int) -> FloatArray:
    """Return the checkpoint's scores as each seed found them, shape [seeds of all arms, P]."""
    estimate = worst_at_k if measure == "worst@k" else pass_at_k
    return np.stack([
        np.mean([estimate(score.num_correct_P, comparison.num_samples, k) for score in of_seed], axis=0)
        for of_seed in starts_by_seed(comparison.arms)
    ])  # fmt: skip


def _estimate(comparison: Comparison, arm: Arm, mark: float, k: int) -> Estimate:
    return mean_over_runs(scores_at(comparison, arm, mark, measure_of(k), k))


def _arm_at(comparison: Comparison, arm: Arm, mark: float, ks: tuple[int, ...]) -> ArmAt:
    return ArmAt(
        mark=mark,
        costs=costs_at(arm, comparison.unit, mark),
        matched=all(run.matched for run in match_at([arm], comparison.unit, mark)),
        pass_at={k: _estimate(comparison, arm, mark, k) for k in (ks if mark == comparison.marks[-1] else ends_of(ks))},
    )


def _task_scores(comparison: Comparison, ks: tuple[int, ...]) -> tuple[TaskScores, ...]:
    names = task_names(comparison)
    if len(names) < 2:
        return ()
    arms, ks, budget = comparison.arms, ends_of(ks), comparison.marks[-1]
    start = {k: start_scores(comparison, measure_of(k), k) for k in ks}
    ends = {arm.name: {k: scores_at(comparison, arm, budget, measure_of(k), k) for k in ks} for arm in arms}
    paired = len(arms) == 2 and have_same_seeds(*arms)
    found = []
    for name in names:
        chosen = prompts_of(comparison, name)
        pair = [ends[arm.name] for arm in arms] if len(arms) == 2 else None
        found.append(
            TaskScores(
                task=name,
                num_prompts=len(chosen),
                start={k: mean_over_runs(start[k][:, chosen]) for k in ks},
                arms={a: {k: mean_over_runs(by_k[k][:, chosen]) for k in ks} for a, by_k in ends.items()},
                differences={
                    k: paired_difference(pair[0][k][:, chosen], pair[1][k][:, chosen], seeds_paired=paired)
                    for k in ks
                } if pair else {},
            )
        )  # fmt: skip
    return tuple(found)


def _pair(comparison: Comparison, ks: tuple[int, ...]) -> Pair:
    a, b = comparison.arms
    budget, largest = comparison.marks[-1], ks[-1]
    ahead = None
    if have_same_seeds(a, b):
        score_a_S, score_b_S = (scores_at(comparison, arm, budget).mean(1) for arm in (a, b))
        ahead = int((score_b_S > score_a_S).sum())
    by_mark = {
        mark: {k: difference_at(comparison, a, b, mark, measure_of(k), k) for k in ends_of(ks)}
        for mark in comparison.marks
    }
    return Pair(
        differences=by_mark[budget] | {k: difference_at(comparison, a, b, budget, measure_of(k), k) for k in ks[1:-1]},
        by_mark=by_mark,
        worst=difference_at(comparison, a, b, budget, "worst@k", largest) if largest > 1 else None,
        worst_at=_worst(comparison, largest) if largest > 1 else None,
        kinds=task_trajectories(comparison, a, b, budget),
        coverage=coverage_difference(comparison, a, b, budget, largest),
        seeds_ahead=ahead,
    )


def _worst(comparison: Comparison, k: int) -> tuple[Estimate, Estimate, Estimate]:
    a, b = comparison.arms
    at_a, at_b = (mean_over_runs(scores_at(comparison, arm, comparison.marks[-1], "worst@k", k)) for arm in (a, b))
    return mean_over_runs(start_scores(comparison, "worst@k", k)), at_a, at_b


def _equal(comparison: Comparison) -> tuple[EqualCost, ...]:
    """Compare at equal cost in each unit, but for one that some run spent nothing of.

    The budget's own is among them, first, unless the runs that used it up spent the very same.
    """
    unit, budget = comparison.unit, comparison.marks[-1]
    runs = [run for arm in comparison.arms for run in arm.trajectories if run.ended_early is None]
    spent = {score_at(run, unit, budget).cost.of(unit) for run in runs}
    units = [*([unit] if len(spent) > 1 else []), *(other for other in UNITS if other != unit)]
    return tuple(equal for equal in (at_equal_cost(comparison, one) for one in units) if equal.amount > 0)


def _against_first(comparison: Comparison, ks: tuple[int, ...]) -> tuple[AgainstFirst, ...]:
    """Compare every later arm with the first as two arms are, as far as every run of those two went.

    Steps are left out unless they are what the budget counts: those of a larger N are larger.
    """
    first, *others = comparison.arms
    units = (comparison.unit, *(unit for unit in UNITS if unit not in (comparison.unit, "steps")))
    found = []
    for arm in others:
        two = replace(comparison, arms=(first, arm))
        for unit in units:
            equal = {k: at_equal_cost(two, unit, measure_of(k), k) for k in ends_of(ks)}
            if equal[1].amount > 0:
                found.append(AgainstFirst(arm.name, equal))
    return tuple(found)


def _frontiers(comparison: Comparison, largest: int) -> tuple[Frontier, ...]:
    one = frontier(comparison)
    if largest == 1:
        return (one,)
    return one, frontier(comparison, "best@k", largest), frontier(comparison, "worst@k", largest)
