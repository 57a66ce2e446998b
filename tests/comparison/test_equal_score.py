"""Coverage at equal pass@1 is what plain loops read off, and its interval what leaving out by hand gives."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats

from brorl.comparison.arms import Arm, Comparison, HeldOutPrompt, RunScores, Score
from brorl.comparison.equal import at_equal_score
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
                scores.append(Score(Cost(t, seconds, 0, 0, 0), rng.binomial(N, rate_P), np.ones(num_prompts, int), 0.0))
            runs.append(RunScores(seed, tuple(scores), scores[-1].cost, {}, 1, 1, 1, None, "run"))
        arms.append(Arm(f"arm {index}", "", 16 + index, 1, {}, tuple(runs)))
    prompts = tuple(HeldOutPrompt(str(i), "task", "math", "", "") for i in range(num_prompts))
    return Comparison("start", "seconds", POINTS[-1], POINTS, prompts, N, (1, K), tuple(arms), "cpu")


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
    def cut(score: Score) -> Score:
        return replace(score, num_correct_P=np.delete(score.num_correct_P, p))

    return with_runs(comparison, lambda run: replace(run, scores=tuple(map(cut, run.scores))))


def with_runs(comparison: Comparison, change: Any, only: int | None = None) -> Comparison:
    """Change every run of all arms, or of one; None takes it out."""
    arms = []
    for index, arm in enumerate(comparison.arms):
        runs = [change(run) if only in (None, index) else run for run in arm.runs]
        arms.append(replace(arm, runs=tuple(run for run in runs if run is not None)))
    return replace(comparison, arms=tuple(arms))


def half_width(values: list[list[float]], level: float = 0.95) -> float:
    """Half an interval from values with one of each group left out: t times the jackknife's error, in squares."""
    total = 0.0
    for left_out in values:
        size = len(left_out)
        mean = sum(left_out) / size
        variance = (size - 1) / size * sum((v - mean) ** 2 for v in left_out)
        total += stats.t.ppf(1 - (1 - level) / 2, size - 1) ** 2 * variance
    return sqrt(total)


@pytest.mark.parametrize("num_seeds", [(4, 4, 4), (3, 5)])
def test_values_and_intervals_are_those_of_leaving_out_by_hand(
    rng: np.random.Generator, num_seeds: tuple[int, ...]
) -> None:
    comparison = made_up(rng, num_seeds)
    found = at_equal_score(comparison, K)
    assert found is not None
    level, coverage, seconds = read_off(comparison)
    assert found.level == pytest.approx(level, abs=1e-12)
    assert [one.arm for one in found.arms] == [arm.name for arm in comparison.arms]
    assert [one.coverage.value for one in found.arms] == pytest.approx(coverage, abs=1e-12)
    assert [one.spent for one in found.arms] == pytest.approx(seconds, abs=1e-9)

    groups = [[without_prompt(comparison, p) for p in range(12)]]
    paired = len(set(num_seeds)) == 1
    groups += [
        [
            with_runs(comparison, lambda run, seed=seed: None if run.seed == seed else run, arm)
            for seed in range(num_seeds[arm or 0])
        ]
        for arm in ([None] if paired else range(len(num_seeds)))
    ]
    read = [[read_off(one)[1] for one in group] for group in groups]
    for i, one in enumerate(found.arms):
        half = half_width([[values[i] for values in group] for group in read])
        assert (one.coverage.low, one.coverage.high) == pytest.approx(
            (max(coverage[i] - half, 0), min(coverage[i] + half, 1)), abs=1e-9
        )
        gap = coverage[i] - coverage[0]
        half = half_width([[values[i] - values[0] for values in group] for group in read])
        assert one.difference.value == pytest.approx(gap, abs=1e-12)
        assert (one.difference.low, one.difference.high) == pytest.approx((gap - half, gap + half), abs=1e-9)
        shown = "B leads" if gap - half > 0 else "A leads" if gap + half < 0 else "no difference shown"
        assert one.conclusion == shown
        if i == 0:
            assert one.corrected is None
            continue
        level = 1 - 0.05 / (len(num_seeds) - 1)
        wide = half_width([[values[i] - values[0] for values in group] for group in read], level)
        assert (one.corrected.level, one.corrected.num_intervals) == (level, len(num_seeds) - 1)
        low, high = max(gap - wide, -1), min(gap + wide, 1)
        assert (one.corrected.interval.low, one.corrected.interval.high) == pytest.approx((low, high), abs=1e-9)
        shown = "B leads" if gap - wide > 0 else "A leads" if gap + wide < 0 else "no difference shown"
        assert one.corrected.conclusion == shown


def test_arms_on_one_curve_do_not_differ_however_fast_they_are(rng: np.random.Generator) -> None:
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
    found = at_equal_score(replace(comparison, arms=(first, replace(comparison.arms[1], runs=tuple(slow)))), K)
    assert found is not None
    a, b = found.arms
    assert (b.difference.value, b.difference.low, b.difference.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert b.conclusion == "no difference shown"
    assert a.spent == pytest.approx(10.1)  # the mean of 10, 10.1 and 10.2 seconds
    assert b.spent == pytest.approx(40.0)


def test_arms_that_did_not_rise_are_left_out(rng: np.random.Generator) -> None:
    comparison = made_up(rng, (3, 3, 3, 3))
    first, flat, *others = comparison.arms
    still = tuple(
        replace(run, scores=tuple(replace(run.scores[0], cost=score.cost) for score in run.scores)) for run in flat.runs
    )
    flat = replace(flat, runs=still)
    found = at_equal_score(replace(comparison, arms=(first, flat, *others)), K)
    assert found is not None
    assert found.not_risen == (flat.name,)
    assert replace(found, not_risen=()) == at_equal_score(replace(comparison, arms=(first, *others)), K)
    assert at_equal_score(replace(comparison, arms=(flat, *others)), K) is None  # nothing to measure the others against
    assert at_equal_score(replace(comparison, arms=(first, flat)), K) is None
    assert at_equal_score(made_up(rng, (3, 3), lift=-1.0), K) is None


def test_one_run_of_each_arm_gives_an_interval_over_prompts(rng: np.random.Generator) -> None:
    comparison = made_up(rng, (1, 1))
    found = at_equal_score(comparison, K)
    assert found is not None
    _, coverage, _ = read_off(comparison)
    read = [read_off(without_prompt(comparison, p))[1] for p in range(12)]
    half = half_width([[values[1] - values[0] for values in read]])
    difference = found.arms[1].difference
    gap = coverage[1] - coverage[0]
    assert (difference.low, difference.high) == pytest.approx((gap - half, gap + half), abs=1e-9)
