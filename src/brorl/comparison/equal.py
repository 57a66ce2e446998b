"""The same runs compared at equal cost in any unit, and at equal pass@1.

Scores lie on straight lines between evaluations. None is read between the start and a run's first evaluation, between
two evaluations that lie a factor of more than about 2 apart, or beyond the last one. docs/explanation/comparing.md has
the reasons, and the error rates in simulations.

At equal cost a slow arm has the better pass@k because it is slow: training sharpens, pass@1 rises and pass@k of a large
k falls. So every arm is also measured where its own pass@1 first reached the level that all of them reached. Arms whose
pass@1 is not shown to have risen are left out. This value is read from mean curves, so it is not a mean over prompts or
seeds. Leaving out a prompt or a seed and reading again gives the jackknife's pseudo-values (Tukey 1958), from which the
intervals are made as usual (`paired`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from brorl.comparison.arms import PASS_1, Arm, Comparison, Measure, have_same_seeds, scores_at
from brorl.comparison.matching import costs_at
from brorl.cost import Unit
from brorl.evaluation.paired import (
    Conclusion,
    CorrectedInterval,
    PairedDifference,
    VarianceParts,
    conclusion_of,
    difference_interval,
    mean_over_runs,
    paired_difference,
)
from brorl.format import Estimate
from brorl.tree import FloatArray

_FARTHEST = 2.1  # cost of one evaluation over that of the one before: points that double, overshot by 5%
_MeanCurve = tuple[FloatArray, FloatArray]  # pass@1 and pass@k at the start and at each evaluation point, shape [T]


@dataclass(frozen=True)
class EqualCost:
    """Scores of all arms where each of their runs had spent the same."""

    unit: Unit
    amount: float  # the amount: the largest that every run reached
    # score of each arm, with a 95% interval over prompts and seeds; None if it is not known
    scores: tuple[Estimate | None, ...]
    # the second arm minus the first; None for more than two arms, or if a score is not known
    difference: PairedDifference | None
    # names of the arms whose score is not known: a run has no evaluations close enough to this cost
    not_evaluated: tuple[str, ...]


def at_equal_cost(comparison: Comparison, unit: Unit, measure: Measure = PASS_1) -> EqualCost:
    """Compare the arms at the largest cost in a unit that every run reached.

    A run that ended early keeps its last score and does not limit the cost.

    Raises:
        ValueError: If the measure's k is above n.
    """
    runs = [run for arm in comparison.arms for run in arm.runs]
    limiting = [run for run in runs if run.ended_early is None] or runs
    amount = min(run.scores[-1].cost.of(unit) for run in limiting)
    score_A = [scores_at_cost(comparison, arm, unit, amount, measure) for arm in comparison.arms]
    known = [score_SP for score_SP in score_A if score_SP is not None]
    difference = None
    if len(known) == len(comparison.arms) == 2:
        difference = paired_difference(*known, seeds_paired=have_same_seeds(*comparison.arms))
    return EqualCost(
        unit=unit,
        amount=amount,
        scores=tuple(None if score_SP is None else mean_over_runs(score_SP) for score_SP in score_A),
        difference=difference,
        not_evaluated=tuple(
            arm.name for arm, score_SP in zip(comparison.arms, score_A, strict=True) if score_SP is None
        ),
    )


def scores_at_cost(
    comparison: Comparison, arm: Arm, unit: Unit, amount: float, measure: Measure = PASS_1
) -> FloatArray | None:
    """Return an arm's score on each prompt at a cost, on straight lines between evaluations.

    A run that did not spend as much keeps its last score.

    Returns:
        Scores, shape [S, P], runs by seed; None if a run has no evaluations close enough to the cost.

    Raises:
        ValueError: If the measure's k is above n.
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
        ends = [measure.of(run.scores[i].num_correct_P, comparison.num_samples) for i in (before, after)]
        rows.append((1 - fraction) * ends[0] + fraction * ends[1])
    return np.stack(rows)


@dataclass(frozen=True)
class ArmAtScore:
    """An arm where its pass@1 first reached the level."""

    arm: str
    # mean cost of its runs, in the comparison's unit; None if the arm was above the level at its first
    # evaluation, because nothing is known there
    spent: float | None
    coverage: Estimate | None  # pass@k there, with a 95% interval over prompts and seeds; None if `spent` is
    # that minus the coverage of the first arm, with its interval; 0 for the first arm itself. None if the
    # coverage of either is not known.
    difference: Estimate | None
    conclusion: Conclusion | None  # the conclusion from it, the first arm being A; None without a difference
    # the difference with an interval corrected for the number of later arms with a difference; None for the
    # first arm, and without a difference
    corrected: CorrectedInterval | None


@dataclass(frozen=True)
class EqualScore:
    """All arms at one pass@1."""

    level: float  # the pass@1: the highest that the mean of the runs of every one of these arms reached
    k: int  # k of the coverage, pass@k
    arms: tuple[ArmAtScore, ...]  # the arms there, in their order
    not_risen: tuple[str, ...]  # names of the arms left out, whose pass@1 is not shown to have been above the start

    @property
    def num_differences(self) -> int:
        """Number of later arms with a difference from the first."""
        return sum(arm.corrected is not None for arm in self.arms)


def at_equal_score(comparison: Comparison, k: int) -> EqualScore | None:
    """Compare the coverage, pass@k, of all arms where each had the same pass@1.

    Returns:
        The arms there; None if pass@1 of the first arm, or of all others, is not shown to have risen above the start.
    """
    points = (0.0, *comparison.eval_points)
    # pass@1 and pass@k of each arm, each of shape [T, S, P]
    curve_A = [
        [np.stack([scores_at(comparison, arm, point, Measure(i)) for point in points]) for i in (1, k)]
        for arm in comparison.arms
    ]
    risen = [i for i, (score_TSP, _) in enumerate(curve_A) if _has_risen(score_TSP)]
    if len(risen) < 2 or risen[0] > 0:
        return None
    arms, curves = [comparison.arms[i] for i in risen], [curve_A[i] for i in risen]
    means = [_mean_curve(curve) for curve in curves]
    level = _level(means)
    value_A, pseudo = _jackknife(curves, paired=all(have_same_seeds(arms[0], arm) for arm in arms))
    known_A = [bool(score_T[1] <= level) for score_T, _ in means]  # evaluated after the start and before the level
    rows = []
    for a, arm in enumerate(arms):
        if not known_A[a]:
            rows.append(ArmAtScore(arm.name, None, None, None, None, None))
            continue
        spent_T = np.array([costs_at(arm, comparison.unit, point)[comparison.unit].mean for point in points])
        spent = _at(means[a][0], spent_T, level)
        of_prompts, *of_seeds = [values[:, a] for values in pseudo]
        coverage = VarianceParts.of(of_prompts, of_seeds).interval(float(value_A[a]), (0, 1))
        difference = corrected = None
        if known_A[0]:
            of_prompts, *of_seeds = [values[:, a] - values[:, 0] for values in pseudo]
            parts = VarianceParts.of(of_prompts, of_seeds)
            interval_at = partial(parts.interval, float(value_A[a] - value_A[0]), (-1, 1))
            difference = interval_at()
            corrected = CorrectedInterval.of(interval_at, sum(known_A[1:])) if a else None
        conclusion = None if difference is None else conclusion_of(difference)
        rows.append(ArmAtScore(arm.name, spent, coverage, difference, conclusion, corrected))
    not_risen = tuple(arm.name for i, arm in enumerate(comparison.arms) if i not in risen)
    return EqualScore(level, k, tuple(rows), not_risen)


def _has_risen(score_TSP: FloatArray) -> bool:
    """Return whether pass@1 is shown to have been above the start where it was highest."""
    best = int(score_TSP.mean((1, 2)).argmax())
    return conclusion_of(difference_interval(score_TSP[0], score_TSP[best], seeds_paired=True)) == "B leads"


def _mean_curve(curve: list[FloatArray], index: int | None = None, axis: int = 0) -> _MeanCurve:
    """Return the mean pass@1 and pass@k, without one run (axis 1) or one prompt (axis 2) unless it is the only one."""
    if index is None:
        score_T, coverage_T = (values.mean((1, 2)) for values in curve)
        return score_T, coverage_T
    score_TK, coverage_TK = (values.mean(3 - axis) for values in curve)
    size = score_TK.shape[1]
    if size == 1:
        return score_TK[:, 0], coverage_TK[:, 0]
    score_T, coverage_T = ((v.sum(1) - v[:, index]) / (size - 1) for v in (score_TK, coverage_TK))
    return score_T, coverage_T


def _jackknife(curves: list[list[FloatArray]], *, paired: bool) -> tuple[FloatArray, list[FloatArray]]:
    """Return the coverage read from the arms' curves, shape [A], and its pseudo-values.

    The first pseudo-values are those of the prompts, shape [P, A]. Those of the seeds follow, shape [S, A]: one array,
    or one for each arm if runs are not paired.
    """
    every = range(len(curves))
    seeds_of = [every] if paired else [range(a, a + 1) for a in every]
    value_A, pseudo = _read([_mean_curve(curve) for curve in curves]), []
    for axis, changed in [(2, every), *((1, arms) for arms in seeds_of)]:
        size = curves[changed[0]][0].shape[axis]
        replicates = [
            _read([_mean_curve(curve, i if a in changed else None, axis) for a, curve in enumerate(curves)])
            for i in range(size)
        ]
        pseudo.append(size * value_A - (size - 1) * np.stack(replicates))
    return value_A, pseudo


def _read(mean_A: list[_MeanCurve]) -> FloatArray:
    """Return the coverage of every arm where its pass@1 first reached the level that all of them reached."""
    level = _level(mean_A)
    return np.array([_at(score_T, coverage_T, level) for score_T, coverage_T in mean_A])


def _level(mean_A: list[_MeanCurve]) -> float:
    return float(min(score_T.max() for score_T, _ in mean_A))


def _at(score_T: FloatArray, value_T: FloatArray, level: float) -> float:
    """Return a value where the score first reaches a level, on straight lines between evaluations."""
    after = int(np.argmax(score_T >= level))
    if after == 0:
        return float(value_T[0])
    fraction = (level - score_T[after - 1]) / (score_T[after] - score_T[after - 1])
    return float(value_T[after - 1] + fraction * (value_T[after] - value_T[after - 1]))
