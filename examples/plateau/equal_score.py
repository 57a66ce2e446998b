"""Coverage at equal pass@1, for the study: compare arms where each first reached the highest pass@1 that all reached.

At equal cost, a slow arm has better pass@k just because it is slow: training sharpens the policy, so pass@1 rises and
pass@k at large k falls. Arms whose pass@1 is not shown to have risen are excluded. The value is read from mean curves,
so it is not a mean over prompts or seeds. Reading it again without one prompt or seed gives the jackknife's
pseudo-values (Tukey 1958), from which the intervals are computed as usual (`brorl.evaluation.paired`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brorl.arrays import FloatArray
from brorl.comparison.results import costs_at
from brorl.comparison.scores import Arm, Comparison, scores_at
from brorl.evaluation.paired import VarianceParts, paired_difference
from brorl.format import Estimate

_MeanCurve = tuple[FloatArray, FloatArray]  # pass@1 and pass@k at the start and at each evaluation point, shape [T]


@dataclass(frozen=True)
class EqualScore:
    """Two arms at the same pass@1."""

    level: float  # the pass@1: the highest reached by both arms' means over runs
    spent: tuple[float, float]  # mean cost of each arm's runs, in the comparison's unit
    difference: Estimate  # second minus first pass@k there, with a 95% interval over prompts and seeds


def at_equal_score(comparison: Comparison, a: Arm, b: Arm, k: int) -> EqualScore | None:
    """Compare the pass@k of two arms with the same seeds where they had the same pass@1.

    None if either arm's pass@1 is not shown to have risen, or was above that level at the first evaluation.
    """
    points = (0.0, *comparison.eval_points)
    # [pass@1, pass@k] for each arm, each of shape [T, S, P]
    curves = [[np.stack([scores_at(comparison, arm, at, i) for at in points]) for i in (1, k)] for arm in (a, b)]
    means = [_mean_curve(curve) for curve in curves]
    level = _level(means)
    if not all(_has_risen(score_TSP) for score_TSP, _ in curves) or any(score_T[1] > level for score_T, _ in means):
        return None
    unit = comparison.unit
    spent = [
        _at(score_T, np.array([costs_at(arm, unit, at)[unit].mean for at in points]), level)
        for arm, (score_T, _) in zip((a, b), means, strict=True)
    ]
    gap, gap_P, gap_S = (values[..., 1] - values[..., 0] for values in _jackknife(curves))
    difference = VarianceParts.of(gap_P, [gap_S]).interval(float(gap))
    return EqualScore(level, (spent[0], spent[1]), difference)


def _has_risen(score_TSP: FloatArray) -> bool:
    """Return whether pass@1, where it was highest, is shown to have been above the start."""
    best = int(score_TSP.mean((1, 2)).argmax())
    return paired_difference(score_TSP[0], score_TSP[best], seeds_paired=True).conclusion == "B leads"


def _mean_curve(curve: list[FloatArray], index: int | None = None, axis: int = 0) -> _MeanCurve:
    """Return the mean pass@1 and pass@k, leaving out one run (axis 1) or prompt (axis 2) unless it is the only one."""
    if index is None:
        score_T, coverage_T = (values.mean((1, 2)) for values in curve)
        return score_T, coverage_T
    score_TK, coverage_TK = (values.mean(3 - axis) for values in curve)
    size = score_TK.shape[1]
    if size == 1:
        return score_TK[:, 0], coverage_TK[:, 0]
    score_T, coverage_T = ((v.sum(1) - v[:, index]) / (size - 1) for v in (score_TK, coverage_TK))
    return score_T, coverage_T


def _jackknife(curves: list[list[FloatArray]]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the coverage from the arms' curves, shape [A], and its pseudo-values, shapes [P, A] and [S, A]."""
    value_A = _read([_mean_curve(curve) for curve in curves])

    def pseudo(axis: int) -> FloatArray:
        size = curves[0][0].shape[axis]
        left_out = [_read([_mean_curve(curve, i, axis) for curve in curves]) for i in range(size)]
        return np.asarray(size * value_A - (size - 1) * np.stack(left_out))

    return value_A, pseudo(2), pseudo(1)


def _read(mean_A: list[_MeanCurve]) -> FloatArray:
    """Return each arm's coverage where its pass@1 first reached the highest level that all arms reached."""
    level = _level(mean_A)
    return np.array([_at(score_T, coverage_T, level) for score_T, coverage_T in mean_A])


def _level(mean_A: list[_MeanCurve]) -> float:
    return float(min(score_T.max() for score_T, _ in mean_A))


def _at(score_T: FloatArray, value_T: FloatArray, level: float) -> float:
    """Return the value where the score first reaches a level, interpolated linearly between evaluations."""
    after = int(np.argmax(score_T >= level))
    if after == 0:
        return float(value_T[0])
    fraction = (level - score_T[after - 1]) / (score_T[after] - score_T[after - 1])
    return float(value_T[after - 1] + fraction * (value_T[after] - value_T[after - 1]))
