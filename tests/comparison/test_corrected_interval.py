"""Intervals at other levels against scipy, and the conclusions of tables of many intervals against plain loops."""

from math import sqrt

import numpy as np
import pytest
from comparisons import score_SP, synthetic
from scipy import stats

from brorl.comparison.results import results_of
from brorl.comparison.scores import Comparison
from brorl.comparison.tables import equal_table, solved_table, spread_text
from brorl.evaluation.paired import (
    CorrectedInterval,
    corrected_level,
    paired_difference,
)
from brorl.format import Estimate


def half_width(d_SP: np.ndarray, level: float) -> float:
    means = d_SP.mean(0), d_SP.mean(1)
    quantiles = (stats.t.ppf(1 - (1 - level) / 2, m.size - 1) for m in means)
    shown = means[0][np.abs(means[0]) > 1e-12]
    unseen = np.mean(shown**2) * stats.beta.ppf(1 - (1 - level) / 2, 1, d_SP.shape[1]) ** 2
    return sqrt(unseen + sum(t**2 * m.var(ddof=1) / m.size for t, m in zip(quantiles, means, strict=True)))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95, 1 - 0.05 / 54])
def test_intervals_at_any_level_have_scipys_quantiles(rng: np.random.Generator, level: float) -> None:
    a_SP, b_SP = rng.normal(0.5, 0.01, (2, 5, 40))
    d_SP = b_SP - a_SP
    value, half = d_SP.mean(), half_width(d_SP, level)
    expected = pytest.approx((value, value - half, value + half), abs=1e-12)
    found = paired_difference(a_SP, b_SP, seeds_paired=True).at_level(level)
    assert (found.value, found.low, found.high) == expected


def test_level_leaves_all_intervals_together_at_95() -> None:
    for number in (1, 2, 7, 54):
        assert number * (1 - corrected_level(number)) == pytest.approx(0.05, rel=1e-12)
    assert corrected_level(1) == 0.95
    with pytest.raises(ValueError, match="at least 1, got 0"):
        corrected_level(0)
    assert CorrectedInterval.of(lambda _: Estimate(0.1, 0.01, 0.2), 3).conclusion == "B leads"


@pytest.mark.slow
def test_a_table_of_equal_arms_rarely_shows_a_difference() -> None:
    """200 tables of 10 differences between equal arms: some interval at 95% excludes 0 far more often."""
    generator = np.random.default_rng(5)
    own = corrected = 0
    for _ in range(200):
        arms = generator.normal(0, 0.2, (11, 8, 1)) + generator.normal(0, 0.02, (11, 8, 30))
        differences = [paired_difference(arms[0], arm, seeds_paired=True) for arm in arms[1:]]
        own += any(d.conclusion != "no difference shown" for d in differences)
        wide = (CorrectedInterval.of(d.at_level, 10) for d in differences)
        corrected += any(c.conclusion != "no difference shown" for c in wide)
    assert own >= 40
    assert corrected <= 20


def mark_of(own: Estimate, half_of_all: float) -> str:
    if abs(own.value) > half_of_all:
        return " **"
    return " *" if own.low > 0 or own.high < 0 else ""


class TestTables:
    @pytest.fixture
    def comparison(self, rng: np.random.Generator) -> Comparison:
        """One arm is far ahead, one a little, one not at all."""
        lift = {0: 0.0, 1: 0.0, 2: 0.35, 3: 2.0}
        return synthetic(rng, numbers=(16, 32, 64, 128), num_seeds=5, num_prompts=60, ks=(1, 16), lift=lift)

    def test_differences_from_the_first(self, comparison: Comparison) -> None:
        found = results_of(comparison)
        known = [(one, k) for one in found.at_equal_cost for k in (1, 16) if one.differences[k] is not None]
        number = len(known)
        assert number > 6
        first, *others = comparison.arms
        shown = {}
        for one, k in known:
            if one.unit != "seconds":
                continue
            arm = next(arm for arm in others if arm.name == one.arm)
            d_SP = score_SP(comparison, arm, 40.0, k) - score_SP(comparison, first, 40.0, k)
            half = half_width(d_SP, 1 - 0.05 / number)
            own = one.differences[k]
            corrected = CorrectedInterval.of(own.at_level, number)
            assert corrected.interval.low == pytest.approx(max(d_SP.mean() - half, -1), abs=1e-9)
            assert corrected.interval.high == pytest.approx(min(d_SP.mean() + half, 1), abs=1e-9)
            shown[arm.name, k] = mark_of(own.difference, half)
        assert shown["N=128", 1] == " **"
        table = equal_table(found)
        rows = {row[0].split(",")[0]: row for row in table.rows if row[0].endswith(" s")}
        for (arm, k), mark in shown.items():
            assert rows[arm][2 if k == 1 else 4].endswith(f"]{mark}")
        assert f"corrected for the {number} intervals of this table" in table.notes[1]

    @pytest.mark.slow
    def test_prompts_gained_and_lost(self, comparison: Comparison) -> None:
        found = results_of(comparison)
        table = solved_table(found)
        for one, arm, row in zip(found.coverage, comparison.arms, table.rows, strict=True):
            d_SP = 60 * (score_SP(comparison, arm, 40.0, 16) - score_SP(comparison, arm, 0.0, 16))
            half = half_width(d_SP, 1 - 0.05 / 4)
            low, high = max(d_SP.mean() - half, -60), min(d_SP.mean() + half, 60)
            assert (one.corrected.interval.low, one.corrected.interval.high) == pytest.approx((low, high), abs=1e-9)
            assert row[-1].endswith(f"]{mark_of(one.expected_change, half)}")
            assert row[1:3] == (spread_text(one.gained), spread_text(one.lost))
        assert "for the 4 intervals of this table" in table.notes[-1]
