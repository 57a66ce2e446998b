"""Runs at equal cost: what they spent, whether they are compute-matched, the best arm at each budget.

Runs are matched if their costs in the unit of the budget are equal up to the length of a step. An overshoot beyond the
tolerance is never called matched. A ratio is None if no run has its denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.arrays import FloatArray
from brorl.comparison.arms import (
    Arm,
    Comparison,
    Score,
    have_same_seeds,
    num_correct_at,
    score_at,
    scores_at,
    starts_by_seed,
)
from brorl.cost import Cost, Unit
from brorl.evaluation.paired import (
    ROUNDING,
    CorrectedInterval,
    PairedDifference,
    conclusion_of,
    difference_interval,
    mean_over_runs,
    paired_difference,
)
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate

TOLERANCE = 0.05  # a run is matched if it spent at most this fraction more than the evaluation point


@dataclass(frozen=True)
class Spread:
    """The mean and the range over the runs of an arm."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if not values:
            raise ValueError("a spread needs the value of at least one run")
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class RunMatch:
    """The cost of one run at an evaluation point."""

    arm: str
    seed: int
    spent: Cost  # its cost when it was evaluated
    ended_early: str | None  # why it ended before the evaluation point; None if it did not
    # whether it spent at most `TOLERANCE` more than the evaluation point. A run that ended early counts as
    # matched, because it could not have spent more.
    matched: bool


def match_at(arms: Sequence[Arm], unit: Unit, eval_point: float) -> tuple[RunMatch, ...]:
    """Return for every run whether it is matched at an evaluation point, in the order of arms and runs."""
    at_point = [(arm, run, score_at(run, unit, eval_point).cost) for arm in arms for run in arm.runs]
    return tuple(
        RunMatch(
            arm.name,
            run.seed,
            spent,
            run.ended_early if spent.of(unit) < eval_point else None,
            spent.of(unit) <= eval_point * (1 + TOLERANCE),
        )
        for arm, run, spent in at_point
    )


def is_matched(arm: Arm, unit: Unit, eval_point: float) -> bool:
    """Return whether all runs of an arm are matched at an evaluation point."""
    return all(run.matched for run in match_at([arm], unit, eval_point))


def costs_at(arm: Arm, unit: Unit, eval_point: float) -> dict[str, Spread]:
    """Return the costs of an arm's runs at an evaluation point: steps, seconds, samples, sampled and unique tokens."""
    costs = [score_at(run, unit, eval_point).cost for run in arm.runs]
    return {name: Spread.of([getattr(cost, name) for cost in costs]) for name in Cost.__dataclass_fields__}


def training_efficiency(arm: Arm) -> dict[str, Spread | None]:
    """Return the throughput and the mixed fraction of an arm's runs, from their starts to their ends.

    Returns:
        Rollouts sampled per second of the run (`samples_per_s`) and of generation alone (`generated_per_s`, the paper's
        generation throughput), tokens sampled and computed per second (`sampled_tokens_per_s`, `unique_tokens_per_s`),
        the fraction of mixed groups among the sampled ones (`mixed_fraction`, the paper's dynamic-sampling pass rate),
        and sampled tokens per computed token (`tokens_per_unique`). None if no run has the denominator.
    """
    ratios: dict[str, list[tuple[float, float]]] = {
        "samples_per_s": [(r.cost.samples, r.cost.seconds) for r in arm.runs],
        "generated_per_s": [(r.cost.samples, r.phase_seconds.get("generation", 0.0)) for r in arm.runs],
        "sampled_tokens_per_s": [(r.cost.sampled_tokens, r.cost.seconds) for r in arm.runs],
        "unique_tokens_per_s": [(r.cost.unique_tokens, r.cost.seconds) for r in arm.runs],
        "mixed_fraction": [(r.groups_mixed, r.groups) for r in arm.runs],
        "tokens_per_unique": [(r.cost.sampled_tokens, r.cost.unique_tokens) for r in arm.runs],
    }
    known = {name: [above / below for above, below in pairs if below > 0] for name, pairs in ratios.items()}
    return {name: Spread.of(values) if values else None for name, values in known.items()}


@dataclass(frozen=True)
class TokenEfficiency:
    """The length of an arm's responses, and what they score for it."""

    tokens: Estimate  # mean tokens of a response
    # correct responses per 1,000 tokens generated, 1,000 times pass@1 over `tokens`; None without tokens
    per_thousand: Estimate | None


def token_efficiency(comparison: Comparison, arm: Arm | None = None, spent: float = 0.0) -> TokenEfficiency:
    """Return an arm's score per token over all prompts; without an arm that of the checkpoint that all runs start from.

    The interval of the ratio is that of its linearization in the two means (the delta method).
    """
    scores: Sequence[Sequence[Score]] = starts_by_seed(comparison.arms)
    if arm is not None:
        scores = [[score_at(run, comparison.unit, spent)] for run in arm.runs]
    correct_SP, tokens_SP = (
        np.stack([np.mean([getattr(s, name) for s in of_seed], 0) for of_seed in scores]) / comparison.num_samples
        for name in ("num_correct_P", "sampled_tokens_P")
    )
    mean_tokens, per_thousand = float(tokens_SP.mean()), None
    if mean_tokens > 0:
        ratio = float(correct_SP.mean()) / mean_tokens
        linear_SP = ratio + (correct_SP - ratio * tokens_SP) / mean_tokens
        per_thousand = mean_over_runs(1000 * linear_SP, highest=inf)
    return TokenEfficiency(mean_over_runs(tokens_SP, highest=inf), per_thousand)


@dataclass(frozen=True)
class CoverageChange:
    """Prompts that the runs of an arm solve and the start did not, and the reverse."""

    arm: str
    gained: Spread  # prompts solved now and not at the start, over runs
    lost: Spread  # prompts solved at the start and not now
    by_chance: Spread  # gains (and as many losses) to expect if no pass rate had changed
    expected: Spread  # prompts that k attempts are expected to solve now (the sum of pass@k)
    expected_change: Estimate  # that minus the same at the start, with a 95% interval, in prompts
    # the same with an interval corrected for the number of arms; in its conclusion the start is A
    corrected: CorrectedInterval
    gained_ids: tuple[str, ...]  # prompts that a majority of the runs gained
    lost_ids: tuple[str, ...]  # prompts that a majority of the runs lost


def coverage_change(comparison: Comparison, arm: Arm, spent: float, k: int, num_intervals: int = 1) -> CoverageChange:
    """Count the prompts that the runs of an arm gained and lost since the start.

    A prompt is solved if at least one of n responses is correct. At low pass rates that depends on n, so every count
    comes with the expected number of prompts solved in k attempts, which does not.

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
        by_chance=_total(np.where(total_SP > 0, 1 - pass_at_k(total_SP, 2 * n, n), 0.0)),
        expected=_total(after_SP),
        expected_change=change_at(0.95),
        corrected=CorrectedInterval.of(change_at, num_intervals),
        gained_ids=_ids(comparison, gained_SP.mean(0) > 0.5),
        lost_ids=_ids(comparison, lost_SP.mean(0) > 0.5),
    )


def _total(value_SP: NDArray[Any]) -> Spread:
    """Return the spread over runs of a sum over prompts."""
    return Spread.of([float(total) for total in value_SP.sum(1)])


def _in_prompts(fraction: Estimate, comparison: Comparison) -> Estimate:
    number = len(comparison.prompts)
    return Estimate(fraction.value * number, fraction.low * number, fraction.high * number)


def _ids(comparison: Comparison, chosen_P: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(prompt.id for prompt, chosen in zip(comparison.prompts, chosen_P, strict=True) if chosen)


_FARTHEST = 2.1  # cost of one evaluation over that of the one before: points that double, overshot by 5%


@dataclass(frozen=True)
class EqualCost:
    """An arm against the first where each of their runs had spent the same; None where a score is not known."""

    arm: str
    unit: Unit
    amount: float  # the amount: the largest that every run of the two reached
    scores: Mapping[int, Estimate | None]  # pass@k of the arm, by k, with a 95% interval over prompts and seeds
    differences: Mapping[int, PairedDifference | None]  # that minus pass@k of the first arm
    # the same with an interval corrected for the number of known differences of its table
    corrected: Mapping[int, CorrectedInterval | None] = field(default_factory=dict)

    def corrected_for(self, number: int) -> dict[int, CorrectedInterval | None]:
        """Return the differences with intervals corrected for so many."""
        return {k: None if d is None else CorrectedInterval.of(d.at_level, number) for k, d in self.differences.items()}


def equal_amount(arms: Sequence[Arm], unit: Unit) -> float:
    """Return the largest amount of a unit that every run reached; a run that ended early does not limit it."""
    runs = [run for arm in arms for run in arm.runs]
    limiting = [run for run in runs if run.ended_early is None] or runs
    return min(run.scores[-1].cost.of(unit) for run in limiting)


def at_equal_cost(comparison: Comparison, arm: Arm, unit: Unit, ks: Sequence[int]) -> EqualCost:
    """Compare an arm with the first of a comparison at the largest cost in a unit that every run of the two reached.

    Scores lie on straight lines between evaluations. None is read between the start and a run's first evaluation,
    between two evaluations that lie a factor of more than about 2 apart, or beyond the last one.
    docs/explanation/comparing.md has the reasons.
    """
    first = comparison.arms[0]
    amount = equal_amount([first, arm], unit)
    scores: dict[int, Estimate | None] = {}
    differences: dict[int, PairedDifference | None] = {}
    for k in ks:
        a_SP, b_SP = (scores_at_cost(comparison, one, unit, amount, k) for one in (first, arm))
        scores[k] = None if b_SP is None else mean_over_runs(b_SP)
        differences[k] = None
        if a_SP is not None and b_SP is not None:
            differences[k] = paired_difference(a_SP, b_SP, seeds_paired=have_same_seeds(first, arm))
    return EqualCost(arm.name, unit, amount, scores, differences)


def scores_at_cost(comparison: Comparison, arm: Arm, unit: Unit, amount: float, k: int = 1) -> FloatArray | None:
    """Return an arm's pass@k on each prompt at a cost, on straight lines between evaluations.

    A run that ended early keeps its last score.

    Returns:
        Scores, shape [S, P], runs by seed; None if a run has no evaluations close enough to the cost.

    Raises:
        ValueError: If k is above n.
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
