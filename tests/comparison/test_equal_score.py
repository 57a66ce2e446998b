"""Coverage at equal pass@1 is what plain loops read off, and its interval what leaving out by hand gives."""

import importlib
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of
from scipy import stats

from brorl.comparison.scores import Comparison, RunEvaluation
from brorl.cost import Cost
from brorl.evaluation.pass_at_k import pass_at_k

K, N = 8, 16
POINTS = (10.0, 20.0, 40.0)


def made_up(
    rng: np.random.Generator, num_seeds: tuple[int, ...], num_prompts: int = 12, lift: float = 1.0
) -> Comparison:
    """Make arms whose pass rates rise from one start at different speeds, every evaluation point overshot a little."""
    logit_P = rng.normal(-1.5, 1.5, num_prompts)
    arms = []
    for index, number in enumerate(num_seeds):
        runs = []
        for seed in range(number):
            own_P = rng.normal(0, 0.3, num_prompts)
            scores = []
            for t, eval_point in enumerate((0.0, *POINTS)):
                rate_P = 1 / (1 + np.exp(-logit_P - (own_P + (lift + 0.4 * index) * t if t else 0)))
                seconds = eval_point * (1 + 0.01 * seed)
                scores.append(score_of(Cost(t, seconds), rng.binomial(N, rate_P)))
            runs.append(run_of(seed, scores))
        arms.append(arm_of(f"arm {index}", runs, 16 + index))
    return comparison_of(arms, POINTS, N, ks=(1, K))


def read_off(comparison: Comparison) -> tuple[float, list[float], list[float]]:
    """Level, and of each arm coverage and seconds where its mean pass@1 first is there, by loops."""
    curves = []
    for arm in comparison.arms:
        points = []
        for t in range(len(POINTS) + 1):
            rates = [c / N for run in arm.runs for c in run.scores[t].num_correct_P]
            found = [pass_at_k(np.array([c]), N, K)[0] for run in arm.runs for c in run.scores[t].num_correct_P]
            seconds = [run.scores[t].cost.seconds for run in arm.runs]
            points.append((sum(rates) / len(rates), sum(found) / len(found), sum(seconds) / len(seconds)))
        curves.append(points)
    level = min(max(p[0] for p in points) for points in curves)
    at = []
    for points in curves:
        t = next(t for t, point in enumerate(points) if point[0] >= level)
        a, b = points[t - 1], points[t]
        at.append([float(np.interp(level, [a[0], b[0]], [a[i], b[i]])) for i in (1, 2)])
    return level, [coverage for coverage, _ in at], [seconds for _, seconds in at]


def without_prompt(comparison: Comparison, p: int) -> Comparison:
    def cut(score: RunEvaluation) -> RunEvaluation:
        return replace(score, num_correct_P=np.delete(score.num_correct_P, p))

    return with_runs(comparison, lambda run: replace(run, scores=tuple(map(cut, run.scores))))


def with_runs(comparison: Comparison, change: Any) -> Comparison:
    """Change every run of all arms; None takes it out."""
    arms = []
    for arm in comparison.arms:
        runs = [change(run) for run in arm.runs]
        arms.append(replace(arm, runs=tuple(run for run in runs if run is not None)))
    return replace(comparison, arms=tuple(arms))


def half_width(values: list[list[float]], whole: float) -> float:
    """Half an interval from values with one of each group left out: t times the jackknife's error, in squares.

    The first group leaves out prompts: their pseudo-values give the size of what no prompt showed.
    """
    size = len(values[0])
    squares = [v**2 for left_out in values[0] if abs(v := size * whole - (size - 1) * left_out) > 1e-12]
    total = sum(squares) / len(squares) * (1 - 0.025 ** (1 / size)) ** 2
    for left_out in values:
        size = len(left_out)
        mean = sum(left_out) / size
        variance = (size - 1) / size * sum((v - mean) ** 2 for v in left_out)
        total += stats.t.ppf(0.975, size - 1) ** 2 * variance
    return sqrt(total)


@pytest.fixture
def at_equal_score(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "plateau"))
    return importlib.import_module("equal_score").at_equal_score


@pytest.mark.parametrize("num_seeds", [4, 1])
def test_values_and_intervals_are_those_of_leaving_out_by_hand(
    rng: np.random.Generator, num_seeds: int, at_equal_score: Any
) -> None:
    comparison = made_up(rng, (num_seeds, num_seeds))
    found = at_equal_score(comparison, *comparison.arms, K)
    level, coverage, seconds = read_off(comparison)
    assert found.level == pytest.approx(level, abs=1e-12)
    assert found.spent == pytest.approx(seconds, abs=1e-9)
    groups = [[without_prompt(comparison, p) for p in range(12)]]
    if num_seeds > 1:
        groups.append([
            with_runs(comparison, lambda run, seed=seed: None if run.seed == seed else run) for seed in range(num_seeds)
        ])  # fmt: skip
    gaps = [[read_off(one)[1] for one in group] for group in groups]
    gap = coverage[1] - coverage[0]
    half = half_width([[b - a for a, b in group] for group in gaps], gap)
    difference = found.difference
    assert difference.value == pytest.approx(gap, abs=1e-12)
    assert (difference.low, difference.high) == pytest.approx((max(gap - half, -1), min(gap + half, 1)), abs=1e-9)


def test_arms_on_one_curve_do_not_differ_however_fast_they_are(rng: np.random.Generator, at_equal_score: Any) -> None:
    """The second arm comes at 40 s to where the first was at 10 s."""
    comparison = made_up(rng, (3, 3), num_prompts=60, lift=2.5)
    first = comparison.arms[0]
    slow = [
        replace(run, scores=tuple(
            replace(run.scores[t and 1], cost=replace(run.scores[t].cost, seconds=eval_point))
            if eval_point in (0.0, 40.0) else replace(run.scores[0], cost=run.scores[t].cost)
            for t, eval_point in enumerate((0.0, *POINTS))
        ))
        for run in first.runs
    ]  # fmt: skip
    found = at_equal_score(comparison, first, replace(comparison.arms[1], runs=tuple(slow)), K)
    difference, unseen = found.difference, 1 - 0.025 ** (1 / 60)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0, -unseen, unseen), abs=1e-12)
    assert found.spent == pytest.approx((10.1, 40.0))  # the mean of 10, 10.1 and 10.2 seconds


def test_an_arm_that_did_not_rise_is_not_compared(rng: np.random.Generator, at_equal_score: Any) -> None:
    comparison = made_up(rng, (3, 3))
    first, other = comparison.arms
    still = tuple(
        replace(run, scores=tuple(replace(run.scores[0], cost=score.cost) for score in run.scores))
        for run in other.runs
    )
    flat = replace(other, runs=still)
    assert at_equal_score(comparison, first, other, K) is not None
    assert at_equal_score(comparison, first, flat, K) is None
    assert at_equal_score(comparison, flat, other, K) is None
    fallen = made_up(rng, (3, 3), lift=-1.0)
    assert at_equal_score(fallen, *fallen.arms, K) is None
