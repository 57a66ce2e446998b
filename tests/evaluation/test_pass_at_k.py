"""pass@k and worst@k against looking at every k-subset, in floats and in exact integers."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from brorl.evaluation.pass_at_k import pass_at_k, worst_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 9])
def test_equals_the_share_of_subsets_with_a_correct_one_or_only_such(num_samples: int) -> None:
    counts = range(num_samples + 1)
    for k in range(1, num_samples + 1):
        one, all_of_them = [], []
        for correct in counts:
            sample = [1] * correct + [0] * (num_samples - correct)
            one.append(np.mean([max(subset) for subset in combinations(sample, k)]))
            all_of_them.append(np.mean([min(subset) for subset in combinations(sample, k)]))
        np.testing.assert_allclose(pass_at_k(list(counts), num_samples, k), one, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(worst_at_k(list(counts), num_samples, k), all_of_them, rtol=1e-13, atol=1e-15)


def test_large_numbers_stay_exact() -> None:
    """n = 4096: 1 - C(n - c, k) / C(n, k) in exact integers."""
    for correct, k in ((1, 1), (1, 4096), (3, 1024), (2000, 512), (0, 512), (4096, 1)):
        expected = float(1 - Fraction(comb(4096 - correct, k), comb(4096, k)))
        assert pass_at_k([correct], 4096, k)[0] == pytest.approx(expected, rel=1e-11, abs=1e-15)
        expected = float(Fraction(comb(correct, k), comb(4096, k)))
        assert worst_at_k([correct], 4096, k)[0] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_is_unbiased_for_independent_samples() -> None:
    """Averaged over the binomial distribution of c exactly, the estimates are 1 - (1 - p)^k and p^k."""
    n, p = 12, 0.17
    chance = np.array([comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    for k in (1, 3, 12):
        assert chance @ pass_at_k(np.arange(n + 1), n, k) == pytest.approx(1 - (1 - p) ** k, rel=1e-12)
        assert chance @ worst_at_k(np.arange(n + 1), n, k) == pytest.approx(p**k, rel=1e-12)


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
