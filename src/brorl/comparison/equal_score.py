"""Coverage where all arms score the same pass@1: did an arm keep more of it, or did it only come less far?

Training sharpens: pass@1 rises and pass@k of a large k falls. At equal cost a slow arm has the better pass@k because it
is slow. Here every arm is looked at where its own pass@1 first reached what all of them reached.

In: a comparison whose runs were evaluated on the way. Out: pass@k of each arm there, and what it had spent by then. It
leaves out arms that are not shown to have risen, whose place on the way is noise. It reads nothing off beyond the
evaluations, and nothing between the start and the first of them: how an arm got there is not known.

The intervals. A value is read off mean curves, so that it is no mean of values of prompts or of seeds. Leaving out one
prompt, or one seed, and reading off again, at the level that all arms then reach, gives the jackknife's pseudo-values
in their place (Tukey 1958), of which the intervals are made as all others are (`paired`). They are wide: in 590
simulated comparisons with 5 seeds (324 with 3) of two arms that walk one curve, the second at half the speed (200
prompts, 64 samples, 5 marks, speeds of runs varying by 0 to 30%), a difference was found in 1.2% (1.2%).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.matching import score_at
from brorl.comparison.paired import Verdict, difference_interval, have_same_seeds, interval_from, scores_at, verdict_of
from brorl.evaluation.pass_at_k import Estimate, FloatArray

_MeanCurve = tuple[FloatArray, FloatArray]  # pass@1 and pass@k at the start and at every mark, shape [T] each


@dataclass(frozen=True)
class AtLevel:
    """An arm where its pass@1 first reached the level.

    Attributes:
        arm: Its name.
        spent: What its runs had spent by then on average, in the comparison's unit; None if the arm was above the level
            at its first evaluation already, so that nothing is known of it there.
        coverage: pass@k there, with a 95% interval over prompts and seeds; None where `spent` is.
        difference: That of the first arm subtracted, with its interval; 0 for the first arm itself. None if the
            coverage of either is not known.
        verdict: What the difference shows, the first arm being A; None without one.
    """

    arm: str
    spent: float | None
    coverage: Estimate | None
    difference: Estimate | None
    verdict: Verdict | None


@dataclass(frozen=True)
class EqualScore:
    """All arms at one pass@1.

    Attributes:
        level: The pass@1: the highest that the mean of the runs of every one of these arms reached.
        k: Of the coverage, pass@k.
        arms: The arms there, in their order.
        not_risen: Names of the arms left out: nothing shows that their pass@1 was ever above the start.
    """

    level: float
    k: int
    arms: tuple[AtLevel, ...]
    not_risen: tuple[str, ...]


def at_equal_score(comparison: Comparison, k: int) -> EqualScore | None:
    """Compare the coverage of all arms where each had the same pass@1.

    Args:
        comparison: What is compared.
        k: Of the coverage, pass@k; 1 to n.

    Returns:
        The arms there; None if pass@1 of the first arm, or of all others, is not shown to have risen above the start.

    Raises:
        ValueError: If a run was not evaluated at a mark and did not end by itself, or k is not 1 to n.
    """
    marks = (0.0, *comparison.marks)
    all_curves = [
        _Curve(*(np.stack([scores_at(comparison, arm, mark, "best@k", i) for mark in marks]) for i in (1, k)))
        for arm in comparison.arms
    ]
    risen = [i for i, curve in enumerate(all_curves) if curve.has_risen()]
    if len(risen) < 2 or risen[0] > 0:
        return None
    arms, curves = [comparison.arms[i] for i in risen], [all_curves[i] for i in risen]
    mean_A = [curve.mean() for curve in curves]
    level, readings = _level(mean_A), _Readings.of(arms, curves)
    known = [_is_evaluated_before(score_T, level) for score_T, _ in mean_A]
    found = []
    for i, (arm, (score_T, _)) in enumerate(zip(arms, mean_A, strict=True)):
        difference = readings.difference(i) if known[0] and known[i] else None
        found.append(
            AtLevel(
                arm=arm.name,
                spent=_at(score_T, np.array([_spent(comparison, arm, m) for m in marks]), level) if known[i] else None,
                coverage=readings.coverage(i) if known[i] else None,
                difference=difference,
                verdict=None if difference is None else verdict_of(difference),
            )
        )
    not_risen = tuple(arm.name for i, arm in enumerate(comparison.arms) if i not in risen)
    return EqualScore(level, k, tuple(found), not_risen)


@dataclass(frozen=True, eq=False)
class _Curve:
    """An arm's pass@1 and pass@k at the start and at every mark, shapes [T, S, P]."""

    score_TSP: FloatArray
    coverage_TSP: FloatArray

    @property
    def num_prompts(self) -> int:
        return int(self.score_TSP.shape[2])

    @property
    def num_seeds(self) -> int:
        return int(self.score_TSP.shape[1])

    def has_risen(self) -> bool:
        """Return whether pass@1 is shown to have been above the start where it was highest."""
        best = int(self.score_TSP.mean((1, 2)).argmax())
        rise = difference_interval(self.score_TSP[0], self.score_TSP[best], seeds_paired=True)
        return verdict_of(rise) == "B leads"

    def mean(self) -> _MeanCurve:
        return self.score_TSP.mean((1, 2)), self.coverage_TSP.mean((1, 2))

    def without_prompt(self, p: int) -> _MeanCurve:
        return _left_out(self.score_TSP.mean(1), p), _left_out(self.coverage_TSP.mean(1), p)

    def without_seed(self, s: int) -> _MeanCurve:
        return _left_out(self.score_TSP.mean(2), s), _left_out(self.coverage_TSP.mean(2), s)


@dataclass(frozen=True, eq=False)
class _Readings:
    """What is read off the arms' curves, shape [A], and the jackknife's pseudo-values of it.

    Attributes:
        value_A: The coverage of each arm.
        of_prompts_PA: Pseudo-values of each prompt.
        of_seeds_SA: Of each seed: one array of shape [S, A], or one for each arm where runs are not paired.
    """

    value_A: FloatArray
    of_prompts_PA: FloatArray
    of_seeds_SA: tuple[FloatArray, ...]

    @classmethod
    def of(cls, arms: Sequence[Arm], curves: list[_Curve]) -> _Readings:
        value_A = _read_off([curve.mean() for curve in curves])
        prompts = [[curve.without_prompt(p) for curve in curves] for p in range(curves[0].num_prompts)]
        seeds = tuple(_pseudo(value_A, replicates) for replicates in _without_seeds(arms, curves))
        return cls(value_A, _pseudo(value_A, prompts), seeds)

    def coverage(self, a: int) -> Estimate:
        """Return an arm's coverage with its interval."""
        of_seeds = [pseudo_SA[:, a] for pseudo_SA in self.of_seeds_SA]
        return interval_from(float(self.value_A[a]), self.of_prompts_PA[:, a], of_seeds, 0, 1)

    def difference(self, a: int) -> Estimate:
        """Return an arm's coverage less the first arm's, with its interval."""
        of_prompts, *of_seeds = [pseudo[:, a] - pseudo[:, 0] for pseudo in (self.of_prompts_PA, *self.of_seeds_SA)]
        return interval_from(float(self.value_A[a] - self.value_A[0]), of_prompts, of_seeds, -1, 1)


def _left_out(value_TK: FloatArray, k: int) -> FloatArray:
    """Average over all but one; over all if there is but one."""
    size = value_TK.shape[1]
    return value_TK[:, 0] if size == 1 else (value_TK.sum(1) - value_TK[:, k]) / (size - 1)


def _without_seeds(arms: Sequence[Arm], curves: list[_Curve]) -> Iterator[list[list[_MeanCurve]]]:
    """Yield the arms' mean curves without each seed: of all arms at once if they have the same, else of one by one."""
    if all(have_same_seeds(arms[0], arm) for arm in arms):
        yield [[curve.without_seed(s) for curve in curves] for s in range(curves[0].num_seeds)]
        return
    for changed in curves:
        yield [
            [curve.without_seed(s) if curve is changed else curve.mean() for curve in curves]
            for s in range(changed.num_seeds)
        ]


def _pseudo(value_A: FloatArray, replicates: list[list[_MeanCurve]]) -> FloatArray:
    """Return the jackknife's pseudo-values, shape [K, A], of what is read off, from curves with one of K left out."""
    size = len(replicates)
    return size * value_A - (size - 1) * np.stack([_read_off(mean_A) for mean_A in replicates])


def _read_off(mean_A: list[_MeanCurve]) -> FloatArray:
    """Read the coverage of every arm off where its pass@1 first reached what all of them reached."""
    level = _level(mean_A)
    return np.array([_at(score_T, coverage_T, level) for score_T, coverage_T in mean_A])


def _level(mean_A: list[_MeanCurve]) -> float:
    return float(min(score_T.max() for score_T, _ in mean_A))


def _is_evaluated_before(score_T: FloatArray, level: float) -> bool:
    """Return whether an arm was evaluated after its start and before its score passed a level."""
    return bool(score_T[1] <= level)


def _at(score_T: FloatArray, value_T: FloatArray, level: float) -> float:
    """Read off a value where the score first reaches a level, on straight lines between evaluations."""
    after = int(np.argmax(score_T >= level))
    if after == 0:
        return float(value_T[0])
    share = (level - score_T[after - 1]) / (score_T[after] - score_T[after - 1])
    return float(value_T[after - 1] + share * (value_T[after] - value_T[after - 1]))


def _spent(comparison: Comparison, arm: Arm, mark: float) -> float:
    """Return what an arm's runs had spent on average when they were evaluated for a mark."""
    unit = comparison.unit
    return float(np.mean([score_at(run, unit, mark).cost.of(unit) for run in arm.trajectories]))
