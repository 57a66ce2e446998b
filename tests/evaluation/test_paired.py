"""Tests against scipy, the interval against its formula in plain loops and against experiments without a difference."""

import warnings
from math import inf, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from brorl.evaluation.paired import mean_over_runs, paired_difference
from brorl.format import Estimate

FloatArray = NDArray[np.float64]


def random_scores(rng: np.random.Generator, seeds: int, prompts: int, shift: float = 0.0) -> FloatArray:
    chance_SP = np.clip(rng.beta(2, 2, prompts) + 0.1 * rng.standard_normal((seeds, 1)) + shift, 0.05, 0.95)
    return rng.binomial(16, chance_SP) / 16


def plain_half_width(columns: list[list[float]]) -> float:
    """sqrt of the sum over parts of t^2 var / K, in plain loops."""
    total = 0.0
    for values in columns:
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
        total += float(stats.t.ppf(0.975, len(values) - 1)) ** 2 * variance / len(values)
    return sqrt(total)


def test_t_tests_are_scipys(rng: np.random.Generator) -> None:
    a_SP, b_SP = random_scores(rng, 4, 60), random_scores(rng, 4, 60)
    found = paired_difference(a_SP, b_SP, seeds_paired=True)
    for test, axis in ((found.prompt_test, 0), (found.seed_test, 1)):
        assert test is not None
        expected = stats.ttest_rel(b_SP.mean(axis), a_SP.mean(axis))
        one_tailed = stats.ttest_rel(b_SP.mean(axis), a_SP.mean(axis), alternative="greater")
        assert test.t == pytest.approx(expected.statistic, rel=1e-9, abs=1e-9)
        assert test.degrees == expected.df
        assert test.p_two_sided == pytest.approx(expected.pvalue, rel=1e-8, abs=1e-12)
        assert test.p_greater == pytest.approx(one_tailed.pvalue, rel=1e-8, abs=1e-12)
    interval = stats.ttest_rel(b_SP.mean(1), a_SP.mean(1)).confidence_interval(0.95)
    assert found.seed_interval is not None
    np.testing.assert_allclose([found.seed_interval.low, found.seed_interval.high], interval, rtol=1e-9, atol=1e-12)


def test_runs_of_different_seeds_are_tested_as_two_groups(rng: np.random.Generator) -> None:
    a_SP, b_SP = random_scores(rng, 3, 40), random_scores(rng, 6, 40)
    found = paired_difference(a_SP, b_SP, seeds_paired=False)
    expected = stats.ttest_ind(b_SP.mean(1), a_SP.mean(1), equal_var=False)
    assert found.seed_test is not None
    assert found.seed_test.t == pytest.approx(expected.statistic, rel=1e-9, abs=1e-9)
    assert found.seed_test.degrees == pytest.approx(expected.df, rel=1e-9)
    assert found.seed_test.p_two_sided == pytest.approx(expected.pvalue, rel=1e-8, abs=1e-12)
    assert found.num_seeds == (3, 6)


@pytest.mark.parametrize("seeds_paired", [True, False])
def test_interval_is_its_formula(rng: np.random.Generator, seeds_paired: bool) -> None:
    a_SP, b_SP = random_scores(rng, 3, 25), random_scores(rng, 3, 25)
    d_SP = (b_SP - a_SP).tolist()
    prompts = [sum(row[p] for row in d_SP) / 3 for p in range(25)]
    if seeds_paired:
        seeds = [[sum(row) / 25 for row in d_SP]]
    else:
        seeds = [[sum(row) / 25 for row in arm.tolist()] for arm in (a_SP, b_SP)]
    half = plain_half_width([prompts, *seeds])
    value = sum(map(sum, d_SP)) / 75
    expected = [value, max(value - half, -1), min(value + half, 1)]
    found = paired_difference(a_SP, b_SP, seeds_paired=seeds_paired)
    interval = found.difference
    np.testing.assert_allclose([interval.value, interval.low, interval.high], expected, rtol=1e-10, atol=1e-12)
    assert found.covers == "prompts and seeds"
    assert found.at_level(0.95) == interval


def test_interval_of_one_arms_score(rng: np.random.Generator) -> None:
    score_SP = random_scores(rng, 4, 30)
    columns = score_SP.mean(0).tolist(), score_SP.mean(1).tolist()
    half = plain_half_width(list(columns))
    found = mean_over_runs(score_SP)
    assert found.value == pytest.approx(score_SP.mean(), rel=1e-13)
    assert found.low == pytest.approx(max(0, found.value - half), rel=1e-10, abs=1e-12)
    assert found.high == pytest.approx(min(1, found.value + half), rel=1e-10)
    over_prompts = mean_over_runs(score_SP[:1])
    expected = stats.t.interval(0.95, 29, score_SP[0].mean(), stats.sem(score_SP[0]))
    np.testing.assert_allclose([over_prompts.low, over_prompts.high], np.clip(expected, 0, 1), rtol=1e-9)


def test_one_seed_covers_prompts_and_one_prompt_seeds(rng: np.random.Generator) -> None:
    a_SP, b_SP = random_scores(rng, 5, 30), random_scores(rng, 5, 30)
    found = paired_difference(a_SP[:1], b_SP[:1], seeds_paired=True)
    expected = stats.ttest_rel(b_SP[0], a_SP[0]).confidence_interval(0.95)
    np.testing.assert_allclose([found.difference.low, found.difference.high], expected, rtol=1e-9, atol=1e-12)
    assert (found.covers, found.seed_test, found.seed_interval) == ("prompts", None, None)
    # one arm of one seed tells nothing of that arm's seeds
    assert paired_difference(a_SP[:1], b_SP, seeds_paired=False).covers == "prompts"
    found = paired_difference(a_SP[:, :1], b_SP[:, :1], seeds_paired=True)
    assert (found.covers, found.prompt_test) == ("seeds", None)
    assert found.difference == found.seed_interval
    found = paired_difference(a_SP[:1, :1], b_SP[:1, :1], seeds_paired=True)
    assert (found.covers, found.conclusion) == ("nothing", "no difference shown")
    assert (found.difference.low, found.difference.high) == (-1, 1)
    assert mean_over_runs(a_SP[:1, :1]) == Estimate(float(a_SP[0, 0]), 0, 1)


def test_equal_scores_and_constant_differences_are_judged_without_warnings(rng: np.random.Generator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seeds_paired in (True, False):
            a_SP = random_scores(rng, 3, 12)
            # the same scores, prompts in another order in each run: means agree up to rounding
            shuffled_SP = a_SP[:, rng.permutation(12)]
            for b_SP in (a_SP, np.zeros((3, 12)), shuffled_SP):
                same = paired_difference(b_SP, b_SP, seeds_paired=seeds_paired)
                assert same.difference.value == 0
                assert same.conclusion == "no difference shown"
                assert same.prompt_test is not None
                assert (same.prompt_test.t, same.prompt_test.p_greater, same.prompt_test.p_two_sided) == (0, 0.5, 1)
            assert paired_difference(a_SP, shuffled_SP, seeds_paired=True).seed_test is not None
            lower_SP = np.full((3, 12), 0.25)
            higher = paired_difference(lower_SP, lower_SP + 0.5, seeds_paired=seeds_paired)
            assert (higher.conclusion, higher.difference) == ("B leads", Estimate(0.5, 0.5, 0.5))
            assert higher.prompt_test is not None
            assert (higher.prompt_test.t, higher.prompt_test.p_greater) == (inf, 0)
            lower = paired_difference(lower_SP + 0.5, lower_SP, seeds_paired=seeds_paired)
            assert lower.seed_test is not None
            assert (lower.conclusion, lower.seed_test.t, lower.seed_test.p_greater) == ("A leads", -inf, 1)
        # rounding is no lead
        assert paired_difference(a_SP, shuffled_SP, seeds_paired=True).conclusion == "no difference shown"


def test_the_conclusion_holds_its_level_where_seeds_differ() -> None:
    """400 experiments without a difference, of few seeds that differ much: the paper's t-test over prompts fails."""
    generator = np.random.default_rng(11)
    for seeds in (2, 5):
        shown = by_prompts = 0
        for _ in range(200):
            logit_P = generator.normal(-1, 2, 100)
            arms = []
            for _ in range(2):
                moved_SP = logit_P + 0.3 * generator.standard_normal((seeds, 1)) + 0.3 * generator.standard_normal(100)
                arms.append(generator.binomial(16, 1 / (1 + np.exp(-moved_SP))) / 16)
            shown += paired_difference(*arms, seeds_paired=True).conclusion != "no difference shown"
            by_prompts += stats.ttest_rel(arms[1].mean(0), arms[0].mean(0)).pvalue < 0.05
        assert shown / 200 <= 0.09
        assert by_prompts / 200 >= 0.25


def test_refuses_scores_that_cannot_be_paired(rng: np.random.Generator) -> None:
    for a, b, paired in (((2, 5), (2, 6), False), ((2, 5), (3, 5), True), ((5,), (5,), False), ((0, 5), (0, 5), True)):
        with pytest.raises(ValueError, match=r"cannot be paired|must have the shape"):
            paired_difference(rng.random(a), rng.random(b), seeds_paired=paired)
