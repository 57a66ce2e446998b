"""Coverage where all arms have the same pass@1: did an arm keep more of it, or has it only gained less?

Training sharpens: pass@1 rises and pass@k of a large k falls. At equal cost a slow arm has the better pass@k because it
is slow. Here every arm is measured where its own pass@1 first reached the level that all of them reached.

In: a comparison whose runs were evaluated during training. Out: pass@k of each arm there, and its cost. Arms
whose pass@1 is not shown to have risen are left out. Nothing is read beyond the evaluations, or between the start and
the first of them.

The intervals. The value is read from mean curves, so it is not a mean over prompts or seeds. Leaving out a prompt or a
seed and reading again, at the level that all arms then reach, gives the jackknife's pseudo-values (Tukey 1958), from
which the intervals are made as usual (`paired`). They are wide: in 590 simulated comparisons with 5 seeds (324 with 3)
of two arms on one curve, the second at half the speed (200 prompts, 64 samples, 5 evaluation points, speeds of runs
varying by 0 to 30%), a difference was found in 1.2% (1.2%).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.corrected_interval import CorrectedInterval, corrected_level
from brorl.comparison.matching import costs_at
from brorl.comparison.paired import Conclusion, conclusion_of, difference_interval, interval_from
from brorl.comparison.scores import Measure, have_same_seeds, scores_at
from brorl.evaluation.pass_at_k import Estimate, FloatArray

_MeanCurve = tuple[FloatArray, FloatArray]  # pass@1 and pass@k at the start and at each evaluation point, shape [T]


@dataclass(frozen=True)
class ArmAtScore:
    """An arm where its pass@1 first reached the level.

    Attributes:
        arm: Its name.
        spent: Mean cost of its runs, in the comparison's unit; None if the arm was above the level at its
            first evaluation, because nothing is known there.
        coverage: pass@k there, with a 95% interval over prompts and seeds; None if `spent` is.
        difference: That less the coverage of the first arm, with its interval; 0 for the first arm itself. None if the
            coverage of either is not known.
        conclusion: The conclusion from it, the first arm being A; None without a difference.
        corrected: The difference with an interval corrected for the number of later arms with a difference; None for
            the first arm, and without a difference.
    """

    arm: str
    spent: float | None
    coverage: Estimate | None
    difference: Estimate | None
    conclusion: Conclusion | None
    corrected: CorrectedInterval | None


@dataclass(frozen=True)
class EqualScore:
    """All arms at one pass@1.

    Attributes:
        level: The pass@1: the highest that the mean of the runs of every one of these arms reached.
        k: k of the coverage, pass@k.
        arms: The arms there, in their order.
        not_risen: Names of the arms left out, whose pass@1 is not shown to have been above the start.
    """

    level: float
    k: int
    arms: tuple[ArmAtScore, ...]
    not_risen: tuple[str, ...]

    @property
    def num_differences(self) -> int:
        """Number of later arms with a difference from the first."""
        return sum(one.corrected is not None for one in self.arms)


def at_equal_score(comparison: Comparison, k: int) -> EqualScore | None:
    """Compare the coverage of all arms where each had the same pass@1.

    Args:
        comparison: The comparison.
        k: k of the coverage, pass@k; 1 to n.

    Returns:
        The arms there; None if pass@1 of the first arm, or of all others, is not shown to have risen above the start.

    Raises:
        ValueError: If a run was not evaluated at an evaluation point and did not end early, or k is not 1 to n.
    """
    points = (0.0, *comparison.eval_points)
    all_curves = [
        _Curve(*(np.stack([scores_at(comparison, arm, point, Measure(i)) for point in points]) for i in (1, k)))
        for arm in comparison.arms
    ]
    risen = [i for i, curve in enumerate(all_curves) if curve.has_risen()]
    if len(risen) < 2 or risen[0] > 0:
        return None
    arms, curves = [comparison.arms[i] for i in risen], [all_curves[i] for i in risen]
    level = _level([curve.mean() for curve in curves])
    value_A, pseudo_KA = _jackknife(arms, curves)
    known_A = [curve.is_evaluated_before(level) for curve in curves]
    found = []
    for i, (arm, curve) in enumerate(zip(arms, curves, strict=True)):
        if not known_A[i]:
            found.append(ArmAtScore(arm.name, None, None, None, None, None))
            continue
        spent_T = np.array([costs_at(arm, comparison.unit, point).of(comparison.unit).mean for point in points])
        of_prompts, *of_seeds = [pseudo[:, i] for pseudo in pseudo_KA]
        coverage = interval_from(float(value_A[i]), of_prompts, of_seeds, (0, 1))
        spent = _at(curve.mean()[0], spent_T, level)
        found.append(ArmAtScore(arm.name, spent, coverage, *_less_first(i, value_A, pseudo_KA, known_A)))
    not_risen = tuple(arm.name for i, arm in enumerate(comparison.arms) if i not in risen)
    return EqualScore(level, k, tuple(found), not_risen)


def _less_first(
    index: int, value_A: FloatArray, pseudo_KA: list[FloatArray], known_A: list[bool]
) -> tuple[Estimate, Conclusion, CorrectedInterval | None] | tuple[None, None, None]:
    """Return an arm's difference from the first arm, its conclusion, and its corrected interval."""
    if not known_A[0]:
        return None, None, None
    of_prompts, *of_seeds = [pseudo[:, index] - pseudo[:, 0] for pseudo in pseudo_KA]
    value, bounds = float(value_A[index] - value_A[0]), (-1, 1)
    difference = interval_from(value, of_prompts, of_seeds, bounds)
    corrected = None
    if index > 0:
        number = sum(known_A[1:])
        wide = interval_from(value, of_prompts, of_seeds, bounds, level=corrected_level(number))
        corrected = CorrectedInterval.of(wide, number)
    return difference, conclusion_of(difference), corrected


@dataclass(frozen=True, eq=False)
class _Curve:
    """An arm's pass@1 and pass@k at the start and at each evaluation point, shapes [T, S, P]."""

    score_TSP: FloatArray
    coverage_TSP: FloatArray

    def has_risen(self) -> bool:
        """Return whether pass@1 is shown to have been above the start where it was highest."""
        best = int(self.score_TSP.mean((1, 2)).argmax())
        rise = difference_interval(self.score_TSP[0], self.score_TSP[best], seeds_paired=True)
        return conclusion_of(rise) == "B leads"

    def is_evaluated_before(self, level: float) -> bool:
        """Return whether the arm was evaluated after its start and before its pass@1 passed a level."""
        return bool(self.mean()[0][1] <= level)

    def mean(self) -> _MeanCurve:
        return self.score_TSP.mean((1, 2)), self.coverage_TSP.mean((1, 2))

    def without(self, index: int, axis: int) -> _MeanCurve:
        """Return the mean curves without one run (axis 1) or one prompt (axis 2), unless it is the only one."""
        score_TK, coverage_TK = (values.mean(3 - axis) for values in (self.score_TSP, self.coverage_TSP))
        size = score_TK.shape[1]
        if size == 1:
            return score_TK[:, 0], coverage_TK[:, 0]
        score_T, coverage_T = ((v.sum(1) - v[:, index]) / (size - 1) for v in (score_TK, coverage_TK))
        return score_T, coverage_T


def _jackknife(arms: Sequence[Arm], curves: list[_Curve]) -> tuple[FloatArray, list[FloatArray]]:
    """Return the coverage read from the arms' curves, shape [A], and its pseudo-values.

    The first pseudo-values are those of the prompts, shape [P, A]. Those of the seeds follow, shape [S, A]: one array,
    or one for each arm if runs are not paired.
    """
    value_A = _read([curve.mean() for curve in curves])
    num_prompts = curves[0].score_TSP.shape[2]
    pseudo = [_pseudo(value_A, [[curve.without(p, 2) for curve in curves] for p in range(num_prompts)])]
    paired = all(have_same_seeds(arms[0], arm) for arm in arms)
    for changed in [range(len(curves))] if paired else [range(a, a + 1) for a in range(len(curves))]:
        num_seeds = curves[changed[0]].score_TSP.shape[1]
        replicates = [
            [curve.without(s, 1) if a in changed else curve.mean() for a, curve in enumerate(curves)]
            for s in range(num_seeds)
        ]
        pseudo.append(_pseudo(value_A, replicates))
    return value_A, pseudo


def _pseudo(value_A: FloatArray, replicates: list[list[_MeanCurve]]) -> FloatArray:
    """Return the jackknife pseudo-values, shape [K, A], from curves with one of K left out."""
    size = len(replicates)
    return size * value_A - (size - 1) * np.stack([_read(mean_A) for mean_A in replicates])


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
