"""Tests against scipy, the interval against its formula in plain loops and against experiments without a difference."""

import warnings
from math import inf, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from brorl.evaluation.paired import mean_over_runs, paired_difference
from brorl.evaluation.pass_at_k import mean_with_interval
from brorl.format import Estimate

FloatArray = NDArray[np.float64]


def random_scores(rng: np.random.Generator, seeds: int, prompts: int, shift: float = 0.0) -> FloatArray:
    chance_SP = np.clip(rng.beta(2, 2, prompts) + 0.1 * rng.standard_normal((seeds, 1)) + shift, 0.05, 0.95)
    return rng.binomial(16, chance_SP) / 16


def plain_half_width(of_prompts: list[float], *of_seeds: list[float]) -> float:
    """sqrt of the sum over parts of t^2 var / K, and of (d u)^2 for the prompts, in plain loops."""
    squares = [v**2 for v in of_prompts if abs(v) > 1e-12]
    total = (sum(squares) / len(squares) if squares else 1.0) * (1 - 0.025 ** (1 / len(of_prompts))) ** 2
    for values in (of_prompts, *of_seeds):
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
    half = plain_half_width(prompts, *seeds)
    value = sum(map(sum, d_SP)) / 75
    expected = [value, max(value - half, -1), min(value + half, 1)]
    found = paired_difference(a_SP, b_SP, seeds_paired=seeds_paired)
    interval = found.difference
    np.testing.assert_allclose([interval.value, interval.low, interval.high], expected, rtol=1e-10, atol=1e-12)
    assert found.covers == "prompts and seeds"
    assert found.at_level(0.95) == interval


def test_interval_of_one_arms_score(rng: np.random.Generator) -> None:
    """The squared distances to the exact ends over prompts and to the t-interval over runs add up."""
    for score_SP in (random_scores(rng, 4, 30), rng.binomial(1, 0.01, (3, 64)).astype(float), np.ones((3, 64))):
        found, over_prompts = mean_over_runs(score_SP), mean_with_interval(score_SP.mean(0))
        runs = score_SP.mean(1).tolist()
        value = sum(runs) / len(runs)
        variance = sum((v - value) ** 2 for v in runs) / (len(runs) - 1)
        squared = float(stats.t.ppf(0.975, len(runs) - 1)) ** 2 * variance / len(runs)
        assert found.value == pytest.approx(value, rel=1e-13)
        low = value - sqrt((value - over_prompts.low) ** 2 + squared)
        high = value + sqrt((over_prompts.high - value) ** 2 + squared)
        assert (found.low, found.high) == pytest.approx((max(0, low), min(1, high)), rel=1e-9, abs=1e-12)
        assert mean_over_runs(score_SP[:1]) == mean_with_interval(score_SP[0])


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_scores_that_agree_leave_what_no_prompt_showed(num_seeds: int) -> None:
    """Clopper and Pearson's bound for 64 prompts: 1 - .025^(1/64) = .056."""
    ones, zeros = np.ones((num_seeds, 64)), np.zeros((num_seeds, 64))
    unseen = stats.beta.ppf(0.975, 1, 64)
    assert unseen == pytest.approx(0.056, abs=5e-4)
    for score_SP, expected in ((ones, (1, 1 - unseen, 1)), (zeros, (0, 0, unseen))):
        found = mean_over_runs(score_SP)
        assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-8)
    for a_SP, b_SP, expected in (
        (ones, ones, (0, -unseen, unseen)),
        (zeros, zeros, (0, -unseen, unseen)),
        (zeros, ones, (1, 1 - unseen, 1)),
        (ones, zeros, (-1, -1, unseen - 1)),
        (zeros, 0.5 * ones, (0.5, 0.5 - unseen / 2, 0.5 + unseen / 2)),
    ):
        for seeds_paired in (True, False):
            difference = paired_difference(a_SP, b_SP, seeds_paired=seeds_paired).difference
            assert (difference.value, difference.low, difference.high) == pytest.approx(expected, rel=1e-8)


def test_few_prompts_that_differ_widen_an_interval_and_many_do_not() -> None:
    """With K of P prompts at +-d: t^2 K d^2 / P (P - 1) and (d u)^2, a fraction of about 3.4 / K more."""
    for num_differing, most in ((1, 2.2), (4, 1.4), (400, 1.006)):
        d_P = np.resize([0.3, -0.3], num_differing)
        d_P = np.concatenate([d_P, np.zeros(400 - num_differing)])
        found = paired_difference(np.full((1, 400), 0.5), 0.5 + d_P[None], seeds_paired=True).difference
        student = stats.t.interval(0.95, 399, d_P.mean(), stats.sem(d_P))
        ratio = (found.high - found.low) / (student[1] - student[0])
        assert 1 < ratio <= most
        assert ratio == pytest.approx(sqrt(1 + 3.66 / 1.966**2 * 3.66 / num_differing), rel=0.01)


@pytest.mark.parametrize("mean", [0.003, *(pytest.param(mean, marks=pytest.mark.slow) for mean in (0.05, 0.5, 0.997))])
def test_intervals_near_0_and_1_contain_the_truth(mean: float) -> None:
    """120 comparisons of 64 prompts, of which few are solved, or few are not; Student's misses 80% at .003."""
    generator = np.random.default_rng(3)
    rare = min(mean, 1 - mean)  # a fraction rare / 0.8 of the prompts has the rate 0.8 in A, and 0.4 in B
    missed = np.zeros(2)
    for _ in range(120):
        rate_P = np.where(generator.random(64) < rare / 0.8, 0.8, 0.0)
        scores = [generator.binomial(16, rate_P * factor)[None] / 16 for factor in (1.0, 0.5)]
        a_SP, b_SP = scores if mean <= 0.5 else [1 - score_SP for score_SP in scores]
        of_a, change = mean_over_runs(a_SP), paired_difference(a_SP, b_SP, seeds_paired=True).difference
        true_change = -rare / 2 if mean <= 0.5 else rare / 2
        missed += [not of_a.low <= mean <= of_a.high, not change.low <= true_change <= change.high]
    assert missed.max() <= 12  # more have a chance below 1% at a level of 95%


def test_one_seed_covers_prompts_and_one_prompt_seeds(rng: np.random.Generator) -> None:
    a_SP, b_SP = random_scores(rng, 5, 30), random_scores(rng, 5, 30)
    found = paired_difference(a_SP[:1], b_SP[:1], seeds_paired=True)
    half = plain_half_width((b_SP[0] - a_SP[0]).tolist())
    value = (b_SP[0] - a_SP[0]).mean()
    assert (found.difference.low, found.difference.high) == pytest.approx((value - half, value + half), rel=1e-9)
    assert (found.covers, found.seed_test, found.seed_interval) == ("prompts", None, None)
    # one arm of one seed tells nothing of that arm's seeds
    assert paired_difference(a_SP[:1], b_SP, seeds_paired=False).covers == "prompts"
    found = paired_difference(a_SP[:, :1], b_SP[:, :1], seeds_paired=True)
    assert (found.covers, found.prompt_test) == ("seeds", None)
    assert found.difference == found.seed_interval
    for num_seeds in (1, 5):  # one number, and seeds that agree on one prompt: no variance is known
        found = paired_difference(np.zeros((num_seeds, 1)), np.full((num_seeds, 1), 0.5), seeds_paired=True)
        assert (found.conclusion, found.difference) == ("no difference shown", Estimate(0.5, -1, 1))
    assert found.covers == "seeds"
    assert paired_difference(a_SP[:1, :1], b_SP[:1, :1], seeds_paired=True).covers == "nothing"
    assert mean_over_runs(a_SP[:1, :1]) == mean_with_interval(a_SP[0, :1])


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
            assert (higher.conclusion, higher.difference.value) == ("B leads", 0.5)
            assert higher.prompt_test is not None
            assert (higher.prompt_test.t, higher.prompt_test.p_greater) == (inf, 0)
            lower = paired_difference(lower_SP + 0.5, lower_SP, seeds_paired=seeds_paired)
            assert lower.seed_test is not None
            assert (lower.conclusion, lower.seed_test.t, lower.seed_test.p_greater) == ("A leads", -inf, 1)
        # rounding is no lead
        assert paired_difference(a_SP, shuffled_SP, seeds_paired=True).conclusion == "no difference shown"


@pytest.mark.slow
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
