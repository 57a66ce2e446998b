"""All numbers of a comparison, computed once for its tables, answer, record and figure.

Runs are matched if none spent more than the budget plus a tolerance. A ratio is None if its denominator is 0 in every
run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import FloatArray, IntArray
from brorl.comparison.scores import (
    Arm,
    Comparison,
    have_same_seeds,
    num_correct_at,
    score_at,
    scores_at,
    start_scores,
    starts_by_seed,
)
from brorl.cost import UNITS, Cost, Unit
from brorl.evaluation.paired import (
    ROUNDING,
    CorrectedInterval,
    PairedDifference,
    SeedsNeeded,
    mean_over_runs,
    paired_difference,
    seeds_needed,
)
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate, counted

TOLERANCE = 0.05  # a matched run may exceed the evaluation point by this fraction
START = "start"  # the checkpoint's name in tables of arms
_FARTHEST = 2.1  # interpolate between evaluations within this factor of each other: points double, plus 5% overshoot


@dataclass(frozen=True)
class Spread:
    """The mean and range over an arm's runs."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if not values:
            raise ValueError("a spread needs the value of at least one run")
        return cls(sum(values) / len(values), min(values), max(values))


def is_matched(arm: Arm, unit: Unit, eval_point: float) -> bool:
    """Return whether every run exceeded the evaluation point by at most the fraction `TOLERANCE`."""
    limit = eval_point * (1 + TOLERANCE)
    return all(score_at(run, unit, eval_point).cost.of(unit) <= limit for run in arm.runs)


def costs_at(arm: Arm, unit: Unit, eval_point: float) -> dict[str, Spread]:
    """Return the costs of an arm's runs at an evaluation point, in every unit."""
    costs = [score_at(run, unit, eval_point).cost for run in arm.runs]
    return {name: Spread.of([getattr(cost, name) for cost in costs]) for name in Cost.__dataclass_fields__}


def use_of_samples(comparison: Comparison, arm: Arm | None = None) -> dict[str, Spread | None]:
    """Return measures of how an arm used its samples and tokens.

    Without an arm, return only the token measures of the start. `samples_per_s` divides by the seconds of the whole
    run, `generated_per_s` (the paper's throughput) by the seconds of generation alone. `mixed_fraction` is the paper's
    dynamic-sampling pass rate. `tokens_per_response` and `correct_per_1000_tokens` come from the evaluation at the
    start or at the budget.
    """
    ratios: dict[str, list[tuple[float, float]]] = {}
    if arm is None:
        scores = [score for seed_scores in starts_by_seed(comparison.arms) for score in seed_scores]
    else:
        scores = [score_at(run, comparison.unit, comparison.eval_points[-1]) for run in arm.runs]
        ratios = {
            "samples_per_s": [(r.cost.samples, r.cost.seconds) for r in arm.runs],
            "generated_per_s": [(r.cost.samples, r.stage_seconds.get("generation", 0.0)) for r in arm.runs],
            "unique_tokens_per_s": [(r.cost.unique_tokens, r.cost.seconds) for r in arm.runs],
            "mixed_fraction": [(r.groups_mixed, r.groups) for r in arm.runs],
            "tokens_per_unique": [(r.cost.sampled_tokens, r.cost.unique_tokens) for r in arm.runs],
        }
    tokens = [float(score.sampled_tokens_P.sum()) for score in scores]
    ratios["tokens_per_response"] = [(t, comparison.num_samples * len(comparison.prompts)) for t in tokens]
    correct = [1000.0 * float(score.num_correct_P.sum()) for score in scores]
    ratios["correct_per_1000_tokens"] = list(zip(correct, tokens, strict=True))
    known = {name: [above / below for above, below in pairs if below > 0] for name, pairs in ratios.items()}
    return {name: Spread.of(values) if values else None for name, values in known.items()}


@dataclass(frozen=True)
class CoverageChange:
    """Prompts solved by an arm's runs but not at the start, and vice versa."""

    arm: str
    gained: Spread  # prompts solved at the budget but not at the start, over runs
    lost: Spread  # prompts solved at the start but not at the budget
    by_chance: Spread  # expected gains (and losses) if no pass rate changed
    expected: Spread  # expected prompts solved in k attempts at the budget (the sum of pass@k)
    expected_change: Estimate  # `expected` minus its value at the start, in prompts, with a 95% interval
    # The same change with an interval corrected for the number of arms; in its conclusion, the start is A.
    corrected: CorrectedInterval


def coverage_change(comparison: Comparison, arm: Arm, spent: float, k: int, num_intervals: int = 1) -> CoverageChange:
    """Count the prompts that an arm's runs gained and lost since the start.

    A prompt is solved if at least one of n responses is correct. At low pass rates this count depends on n, so the
    result also includes the expected number of prompts solved in k attempts, which does not.

    Gains and losses by chance: suppose a prompt's pass rate did not change, and the two evaluations together have c
    correct responses. Each of these is equally likely to be in either evaluation, so all c are in a given one with
    probability C(2n - c, n) / C(2n, n). Evaluations that share random numbers differ less, so this is an overestimate.
    """
    n = comparison.num_samples
    num_prompts = len(comparison.prompts)
    start_SP, end_SP = num_correct_at(comparison, arm, 0), num_correct_at(comparison, arm, spent)
    total_SP = start_SP + end_SP
    before_SP, after_SP = pass_at_k(start_SP, n, k), pass_at_k(end_SP, n, k)

    def total(value_SP: NDArray[Any]) -> Spread:
        return Spread.of([float(run_sum) for run_sum in value_SP.sum(1)])

    difference = paired_difference(before_SP, after_SP, seeds_paired=True)

    def change_at(level: float) -> Estimate:
        change = difference.at_level(level)
        return Estimate(*(end * num_prompts for end in (change.value, change.low, change.high)))

    return CoverageChange(
        arm=arm.name,
        gained=total((start_SP == 0) & (end_SP > 0)),
        lost=total((start_SP > 0) & (end_SP == 0)),
        by_chance=total(np.where(total_SP > 0, 1 - pass_at_k(total_SP, 2 * n, n), 0.0)),
        expected=total(after_SP),
        expected_change=change_at(0.95),
        corrected=CorrectedInterval.of(change_at, num_intervals),
    )


@dataclass(frozen=True)
class EqualCost:
    """An arm compared with the first arm, with all their runs at equal cost; unknown scores are None."""

    arm: str
    unit: Unit
    amount: float  # the largest amount reached by every run of both arms
    scores: Mapping[int, Estimate | None]  # k -> pass@k of the arm, with a 95% interval over prompts and seeds
    differences: Mapping[int, PairedDifference | None]  # k -> pass@k of the arm minus pass@k of the first arm


def equal_amount(arms: Sequence[Arm], unit: Unit) -> float:
    """Return the largest amount of a unit that every run reached, ignoring runs that ended early."""
    runs = [run for arm in arms for run in arm.runs]
    limiting = [run for run in runs if run.end_reason is None] or runs
    return min(run.scores[-1].cost.of(unit) for run in limiting)


def at_equal_cost(comparison: Comparison, arm: Arm, unit: Unit, ks: Sequence[int]) -> EqualCost:
    """Compare an arm with the first arm at the largest cost, in the given unit, reached by every run of both."""
    first = comparison.arms[0]
    amount = equal_amount([first, arm], unit)
    scores: dict[int, Estimate | None] = dict.fromkeys(ks)
    differences: dict[int, PairedDifference | None] = dict.fromkeys(ks)
    for k in ks:
        a_SP, b_SP = (scores_at_cost(comparison, side, unit, amount, k) for side in (first, arm))
        if b_SP is not None:
            scores[k] = mean_over_runs(b_SP)
            if a_SP is not None:
                differences[k] = paired_difference(a_SP, b_SP, seeds_paired=have_same_seeds(first, arm))
    return EqualCost(arm.name, unit, amount, scores, differences)


def scores_at_cost(comparison: Comparison, arm: Arm, unit: Unit, amount: float, k: int = 1) -> FloatArray | None:
    """Interpolate an arm's pass@k on each prompt at a cost, linearly between evaluations.

    The result has shape [S, P], by seed. A run that ended early keeps its last score. The result is None if the cost
    falls between the start and a run's first evaluation, or between evaluations more than a factor of about 2 apart;
    docs/explanation/comparing.md gives the reasons.
    """
    rows = []
    for run in sorted(arm.runs, key=lambda run: run.seed):
        costs = [score.cost.of(unit) for score in run.scores]
        after = next((i for i, cost in enumerate(costs) if cost >= amount), len(costs) - 1)
        before = max(after - 1, 0)
        width = costs[after] - costs[before]
        fraction = min((amount - costs[before]) / width, 1.0) if width > 0 else 1.0
        if 0 < fraction < 1 and costs[after] > _FARTHEST * costs[before]:
            return None
        ends = [pass_at_k(run.scores[i].num_correct_P, comparison.num_samples, k) for i in (before, after)]
        rows.append((1 - fraction) * ends[0] + fraction * ends[1])
    return np.stack(rows)


@dataclass(frozen=True)
class BestArm:
    """The best matched arm at an evaluation point where at least two arms are matched."""

    eval_point: float  # the budget
    arm: str  # name of the arm with the highest score
    second: str  # name of the arm with the second highest score
    lead: Estimate  # best score minus second score, with a 95% interval
    lead_shown: bool  # whether the lead's interval lies entirely above 0

    @property
    def is_tied(self) -> bool:
        """Whether the two best arms have the same score, so their order is arbitrary."""
        return abs(self.lead.value) < ROUNDING


def frontier(comparison: Comparison, k: int = 1) -> tuple[BestArm, ...]:
    """Find the best matched arm by pass@k at each evaluation point.

    The best arm's lead over the second is tested after both are picked. Among arms that do not differ, the gap between
    the best two is smaller than between any other two, so picking does not raise the rate of false leads at a single
    evaluation point above 5%. Over many evaluation points, a lead may still be false.

    Source: IsoCompute (arXiv 2603.12151), the best N by budget. There the budget is in rollouts and a sigmoid is fitted
    to the best N. Here the budget is in the comparison's unit, and nothing is fitted.
    """
    best = []
    for eval_point in comparison.eval_points:
        matched = [arm for arm in comparison.arms if is_matched(arm, comparison.unit, eval_point)]
        scored = [(arm, scores_at(comparison, arm, eval_point, k)) for arm in matched]
        if len(scored) < 2:
            continue
        # If scores are equal, the earlier arm ranks higher.
        (first, first_SP), (second, second_SP), *_ = sorted(scored, key=lambda item: -item[1].mean().round(12))
        lead = paired_difference(second_SP, first_SP, seeds_paired=have_same_seeds(second, first))
        best.append(BestArm(eval_point, first.name, second.name, lead.difference, lead.conclusion == "B leads"))
    return tuple(best)


@dataclass(frozen=True)
class ArmScores:
    """An arm at an evaluation point."""

    eval_point: float
    costs: Mapping[str, Spread]  # steps, seconds, samples, sampled_tokens and unique_tokens -> cost over the runs
    matched: bool  # whether every run is within the tolerance of the evaluation point
    pass_at: Mapping[int, Estimate]  # pass@1, and pass@k at the largest k

    @classmethod
    def of(cls, comparison: Comparison, arm: Arm, eval_point: float, ks: Sequence[int]) -> ArmScores:
        """Return the costs and the scores of an arm's runs at an evaluation point."""
        costs = costs_at(arm, comparison.unit, eval_point)
        pass_at = {k: mean_over_runs(scores_at(comparison, arm, eval_point, k)) for k in ks}
        return cls(eval_point, costs, is_matched(arm, comparison.unit, eval_point), pass_at)


@dataclass(frozen=True)
class BudgetScores:
    """pass@k at the budget on a set of held-out prompts."""

    num_prompts: int
    pass_at: Mapping[str, Mapping[int, Estimate]]  # [arm or `start`][k]
    differences: Mapping[str, Mapping[int, PairedDifference]]  # [later arm][k]: this arm minus the first arm


@dataclass(frozen=True, eq=False)
class ComparisonResults:
    """All numbers of a comparison."""

    comparison: Comparison
    key: Mapping[str, str]  # letter -> title of the arm; empty if the arms have names
    ks: tuple[int, ...]  # every reported k, ascending, including 1
    scores: BudgetScores  # all held-out prompts, every k
    sources: Mapping[str, BudgetScores]  # source -> scores at the smallest and largest k; empty with one source
    at_eval_points: Mapping[str, tuple[ArmScores, ...]]  # arm -> one entry per evaluation point
    # Each later arm minus the first at equal cost, in the budget's unit and then in every other unit.
    at_equal_cost: tuple[EqualCost, ...]
    best: Mapping[int, tuple[BestArm, ...]]  # smallest and largest k -> best arm at each evaluation point
    use: Mapping[str, Mapping[str, Spread | None]]  # arm or `start` -> its `use_of_samples`
    coverage: tuple[CoverageChange, ...]  # prompts gained and lost since the start, one entry per arm
    # Later arm -> seeds needed to show a difference of 0.02 from the first arm in pass@1 at the budget, uncorrected;
    # None with one seed per arm or only one prompt.
    seeds_needed: Mapping[str, SeedsNeeded | None]

    @property
    def names(self) -> list[str]:
        """Names of the arms."""
        return [arm.name for arm in self.comparison.arms]

    @property
    def pair(self) -> Mapping[int, PairedDifference] | None:
        """The second arm minus the first at the budget, by k; None with more than two arms."""
        differences = self.scores.differences
        return next(iter(differences.values())) if len(differences) == 1 else None

    @property
    def matched(self) -> bool:
        """Whether every run is within the tolerance of the budget."""
        return all(points[-1].matched for points in self.at_eval_points.values())

    @property
    def end_ks(self) -> tuple[int, ...]:
        """The smallest and largest k; a single k if they are equal."""
        return tuple(dict.fromkeys((self.ks[0], self.ks[-1])))

    @property
    def seeds_text(self) -> str:
        """The arms' number of seeds as text: `5 seeds` or `3 to 5 seeds`."""
        numbers = sorted({len(arm.runs) for arm in self.comparison.arms})
        return f"{numbers[0]} to {numbers[-1]} seeds" if len(numbers) > 1 else counted(numbers[0], "seed")

    @property
    def fewest_seeds(self) -> int:
        """Number of seeds of the arm with the fewest."""
        return min(len(arm.runs) for arm in self.comparison.arms)

    @property
    def budget(self) -> float:
        """The last evaluation point, at which the arms are compared."""
        return self.comparison.eval_points[-1]


def with_names(text: str, a: str, b: str) -> str:
    """Replace A and B in a conclusion with the names of the arms."""
    return re.sub(r"\b[AB]\b", lambda letter: a if letter[0] == "A" else b, text)


def results_of(comparison: Comparison) -> ComparisonResults:
    """Compute all numbers of a comparison.

    Raises:
        ValueError: If it has fewer than two arms, two arms with the same name, or a run that was not evaluated at an
            evaluation point.
    """
    arms = comparison.arms
    names = [arm.name for arm in arms]
    if len(names) < 2:
        raise ValueError(f"a comparison needs at least two arms, got {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"arms need different names, not {', '.join(names)}")
    budget = comparison.eval_points[-1]
    ks = tuple(sorted({1, *comparison.ks}))
    end_ks = tuple(dict.fromkeys((1, ks[-1])))
    at_end = {START: {k: start_scores(comparison, k) for k in ks}}
    at_end |= {arm.name: {k: scores_at(comparison, arm, budget, k) for k in ks} for arm in arms}
    scores = _budget_scores(arms, at_end, ks, np.arange(len(comparison.prompts)))
    sources = comparison.source_names()
    # Steps are omitted unless the budget is in steps, because a step costs more at a larger N.
    units = (comparison.unit, *(unit for unit in UNITS if unit not in (comparison.unit, "steps")))
    equal = [at_equal_cost(comparison, arm, unit, end_ks) for arm in arms[1:] for unit in units]
    return ComparisonResults(
        comparison=comparison,
        key={arm.name: arm.title for arm in arms if arm.title},
        ks=ks,
        scores=scores,
        sources={
            name: _budget_scores(arms, at_end, end_ks, comparison.prompts_of(name))
            for name in sources
            if len(sources) > 1
        },
        at_eval_points={
            arm.name: tuple(ArmScores.of(comparison, arm, p, end_ks) for p in comparison.eval_points) for arm in arms
        },
        at_equal_cost=tuple(row for row in equal if row.amount > 0),
        best={k: frontier(comparison, k) for k in end_ks},
        use={START: use_of_samples(comparison), **{arm.name: use_of_samples(comparison, arm) for arm in arms}},
        coverage=tuple(coverage_change(comparison, arm, budget, ks[-1], len(arms)) for arm in arms),
        seeds_needed={name: seeds_needed(by_k[1].parts) for name, by_k in scores.differences.items()},
    )


def _budget_scores(
    arms: Sequence[Arm], scores: Mapping[str, Mapping[int, FloatArray]], ks: Sequence[int], prompts: IntArray
) -> BudgetScores:
    """Average scores (shape [S, P], by name and k) over the given prompts; compare each later arm with the first."""
    chosen = {name: {k: by_k[k][:, prompts] for k in ks} for name, by_k in scores.items()}
    first, *later_arms = arms
    return BudgetScores(
        len(prompts),
        {name: {k: mean_over_runs(score_SP) for k, score_SP in by_k.items()} for name, by_k in chosen.items()},
        {
            arm.name: {
                k: paired_difference(chosen[first.name][k], b_SP, seeds_paired=have_same_seeds(first, arm))
                for k, b_SP in chosen[arm.name].items()
            }
            for arm in later_arms
        },
    )
