"""pass@k and worst@k against looking at every k-subset; intervals against exact ones and repetitions."""

from fractions import Fraction
from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, binomtest

from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k, worst_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 9])
def test_equals_the_share_of_subsets_with_a_correct_one_or_only_such(num_samples: int) -> None:
    counts = range(num_samples + 1)
    for k in range(1, num_samples + 1):
        any_correct, all_of_them = [], []
        for correct in counts:
            sample = [1] * correct + [0] * (num_samples - correct)
            any_correct.append(np.mean([max(subset) for subset in combinations(sample, k)]))
            all_of_them.append(np.mean([min(subset) for subset in combinations(sample, k)]))
        np.testing.assert_allclose(pass_at_k(list(counts), num_samples, k), any_correct, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(worst_at_k(list(counts), num_samples, k), all_of_them, rtol=1e-13, atol=1e-15)


def test_large_numbers_stay_exact() -> None:
    """n = 4096: 1 - C(n - c, k) / C(n, k) in exact integers."""
    for correct, k in ((1, 1), (1, 4096), (3, 1024), (2000, 512), (0, 512), (4096, 1)):
        expected = float(1 - Fraction(comb(4096 - correct, k), comb(4096, k)))
        assert pass_at_k([correct], 4096, k)[0] == pytest.approx(expected, rel=1e-11, abs=1e-15)
        expected = float(Fraction(comb(correct, k), comb(4096, k)))
        assert worst_at_k([correct], 4096, k)[0] == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    ("correct", "n", "k", "message"),
    [
        ([1], 4, 0, "between 1 and the number of samples 4, got 0"),
        ([1], 4, 5, "between 1 and the number of samples 4, got 5"),
        ([5], 4, 1, "must be between 0 and 4"),
        ([-1], 4, 1, "must be between 0 and 4"),
    ],
)
def test_refuses_impossible_numbers(correct: list[int], n: int, k: int, message: str) -> None:
    for estimate in (pass_at_k, worst_at_k):
        with pytest.raises(ValueError, match=message):
            estimate(correct, n, k)


@pytest.mark.parametrize(
    ("solved", "num_prompts"), [(0, 1), (1, 1), (0, 30), (1, 30), (30, 30), (1, 2000), (700, 2000), (40, 41)]
)
def test_of_prompts_that_are_solved_or_not_it_is_the_exact_interval(solved: int, num_prompts: int) -> None:
    found = mean_with_interval(np.repeat([0.0, 1.0], [num_prompts - solved, solved]))
    exact = binomtest(solved, num_prompts).proportion_ci(0.95, "exact")
    assert found.value == pytest.approx(solved / num_prompts)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), rel=1e-8, abs=1e-15)
    if not solved:
        assert found.low == 0.0
    if solved == num_prompts:
        assert found.high == 1.0
    if (solved, num_prompts) == (0, 30):
        assert found.high == pytest.approx(0.1157, abs=1e-4)  # the table of Clopper and Pearson


@pytest.mark.parametrize("num_prompts", [1, 3, 20, 300])
def test_the_interval_of_prompts_that_agree_misses_in_at_most_5_percent(
    num_prompts: int, rng: np.random.Generator
) -> None:
    """Enumerated for the worst case: a fraction of prompts, of which none was drawn, has the value 0 or 1."""
    seen = rng.uniform(0, 1)
    found = mean_with_interval(np.full(num_prompts, seen))
    assert found.value == pytest.approx(seen)
    unseen = np.linspace(0, 1, 2001)
    all_agree = (1 - unseen) ** num_prompts
    for worst in (0.0, 1.0):
        mean = (1 - unseen) * seen + unseen * worst
        missed = (mean < found.low - 1e-9) | (mean > found.high + 1e-9)
        assert all_agree[missed].max(initial=0.0) <= 0.025 + 1e-9
        assert all_agree[~missed].min() <= 0.025 + num_prompts / 2000  # and no wider than it has to be


def chance_of_at_most(mean: float, values: list[float]) -> float:
    """P(weighted mean <= mean) for uniform weights on the simplex, in rational numbers.

    The volume that a half-space cuts from a simplex, as a divided difference of a truncated power of its distinct
    corners. Source: Lasserre, arXiv 1412.3980; Curry and Schoenberg, J. Analyze Math. 17 (1966).
    """
    exact, at = [Fraction(value) for value in values], Fraction(mean)
    above = sum(
        (x - at) ** (len(exact) - 1) / prod(x - y for j, y in enumerate(exact) if j != i)
        for i, x in enumerate(exact)
        if x > at
    )
    return float(1 - above)


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 30, 60])
def test_its_ends_are_quantiles_of_the_weighted_mean(num_prompts: int, rng: np.random.Generator) -> None:
    value_P = rng.beta(0.2, rng.uniform(0.5, 3), num_prompts) + 1e-6 * rng.random(num_prompts)
    value_P /= max(1.0, 1.001 * value_P.max())
    found = mean_with_interval(value_P)
    assert chance_of_at_most(found.low, [*value_P.tolist(), 0.0]) == pytest.approx(0.025, abs=1e-8)
    assert chance_of_at_most(found.high, [*value_P.tolist(), 1.0]) == pytest.approx(0.975, abs=1e-8)


@pytest.mark.parametrize(
    ("zeros_halves_ones", "fixed"),
    [
        ((0, 1, 1), None), ((3, 1, 2), None), ((950, 40, 10), None), ((1, 998, 1), None), ((20, 3, 1000), None),
        ((1, 998, 1), 0.3389569062551381),  # so narrow that a fixed tolerance of 1e-6 ends the search too early
    ],
)  # fmt: skip
def test_values_that_many_prompts_share(
    zeros_halves_ones: tuple[int, int, int], fixed: float | None, rng: np.random.Generator
) -> None:
    """The weight of the value between is a beta number, and so is the fraction of the ones in what it leaves."""
    zeros, between, ones = zeros_halves_ones
    x = fixed or rng.uniform(0.1, 0.9)
    found = mean_with_interval(np.repeat([0.0, x, 1.0], zeros_halves_ones))
    for end, tail, more in ((found.low, 0.025, (1, 0)), (found.high, 0.975, (0, 1))):
        rest = beta(ones + more[1], zeros + more[0]) if zeros + more[0] and ones + more[1] else None
        weight = beta(between, zeros + ones + 1)

        def density(w: float, end: float = end, weight: beta = weight, rest: beta = rest) -> float:
            room = (end - w * x) / (1 - w)
            known = rest.cdf(room) if rest else float(room >= 1)
            return float(weight.pdf(w) * known)

        middle, spread = weight.mean(), weight.std()
        cuts = np.clip([middle - 8 * spread, middle, middle + 8 * spread, end / x, (1 - end) / (1 - x)], 0, 1)
        chance = quad(density, 0, 1, points=sorted(set(cuts)), limit=500, epsabs=1e-11)[0]
        assert chance == pytest.approx(tail, abs=1e-7)


@given(st.integers(1, 20), st.data())
def test_another_success_never_lowers_an_end(num_samples: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, num_samples), min_size=1, max_size=40))
    k = data.draw(st.integers(1, num_samples))
    before = mean_with_interval(pass_at_k(counts, num_samples, k))
    assert 0 <= before.low <= before.value <= before.high <= 1
    prompt = data.draw(st.integers(0, len(counts) - 1))
    counts[prompt] = min(counts[prompt] + 1, num_samples)
    after = mean_with_interval(pass_at_k(counts, num_samples, k))
    assert after.low >= before.low - 1e-9
    assert after.high >= before.high - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "num_prompts", "k"),
    [
        (0.05, 2.0, 30, 1),
        *(
            pytest.param(*v, marks=pytest.mark.slow)
            for v in ((0.03, 3.0, 30, 1), (0.03, 3.0, 30, 4), (5.0, 0.1, 30, 1))
        ),
    ],
)
def test_it_contains_the_truth_as_often_as_it_says(
    a: float, b: float, num_prompts: int, k: int, rng: np.random.Generator
) -> None:
    """300 evaluations of fresh prompts with 16 responses each.

    A bootstrap misses about 45 times in each setting. The level is .98 or more here, so 23 misses have a chance of 1 in
    ten million.
    """
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(k)])
    missed = 0
    for _ in range(300):
        correct_P = rng.binomial(16, rng.beta(a, b, num_prompts))
        found = mean_with_interval(pass_at_k(correct_P, 16, k))
        missed += not found.low <= truth <= found.high
    assert missed <= 22


@pytest.mark.parametrize("values", [[], [0.5, 1.5], [-0.1], [np.nan]])
def test_refuses_what_is_no_pass_rate(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value, each from 0 to 1"):
        mean_with_interval(np.array(values))
