"""Shares by difficulty: integrals of the Beta, loops over prompts, closed forms of MaxRL."""

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from brorl.theory.outcome_weights import BIN_EDGES, gradient_fraction, gradient_weight, prompt_fraction, rate_cells
from brorl.theory.pass_rates import PassRates

ENDS = (0.0, *BIN_EDGES, 1.0)


def some_rates(rng: np.random.Generator) -> PassRates:
    never, always = rng.uniform(0, 0.4, 2)
    return PassRates(float(rng.uniform(0.2, 3)), float(rng.uniform(0.2, 8)), float(never), float(always))


def test_cells_hold_the_distribution(rng: np.random.Generator) -> None:
    for _ in range(5):
        rates = some_rates(rng)
        rate_G, share_G = rate_cells(rates)
        assert share_G.sum() == pytest.approx(1, abs=1e-12)
        assert (np.diff(rate_G) >= 0).all()
        assert share_G @ rate_G == pytest.approx(rates.between * rates.a / (rates.a + rates.b) + rates.always, rel=1e-3)
        for n in (2, 16, 512):
            mixed = share_G @ (1 - rate_G**n - (1 - rate_G) ** n)
            assert mixed == pytest.approx(rates.mixed(n), rel=5e-3)
        inside = rates.between * np.diff(stats.beta.cdf(ENDS, rates.a, rates.b))
        inside[0] += rates.never
        inside[-1] += rates.always
        np.testing.assert_allclose(prompt_fraction(rate_G, share_G), inside, atol=1e-12)


def test_gradient_shares_are_integrals(rng: np.random.Generator) -> None:
    """MaxRL of order T: the weight is (1-p) (1 - (1-p)^T), and prompts at 0 and 1 have none."""
    rates, order = some_rates(rng), int(rng.integers(1, 600))
    rate_G, share_G = rate_cells(rates)
    coefficient_G = np.where(rate_G > 0, (1 - (1 - rate_G) ** order) / np.maximum(rate_G, 1e-300), order)
    beta = stats.beta(rates.a, rates.b)

    def weighted(log_odds: float) -> float:
        p = 1 / (1 + np.exp(-log_odds))
        return float((1 - p) * -np.expm1(order * np.log1p(-p)) * beta.pdf(p) * p * (1 - p))

    ends = np.clip(np.log(np.maximum(ENDS, 1e-12)) - np.log(np.maximum(1 - np.array(ENDS), 1e-12)), -27, 27)
    amount = np.array([quad(weighted, low, high, limit=300)[0] for low, high in pairwise(ends)])
    found = gradient_fraction(coefficient_G, rate_G, share_G)
    np.testing.assert_allclose(found, amount / amount.sum(), rtol=5e-3, atol=1e-6)


def test_shares_of_single_prompts(rng: np.random.Generator) -> None:
    rate_P = np.concatenate([rng.uniform(0, 1, 30), BIN_EDGES, [0.0, 1.0]])
    share_P, coefficient_EP = rng.dirichlet(np.ones(rate_P.size)), rng.uniform(0, 3, (2, rate_P.size))
    for row, coefficient_P in enumerate(coefficient_EP):
        weight = [c * p * (1 - p) * s for c, p, s in zip(coefficient_P, rate_P, share_P, strict=True)]
        expected = [
            sum(w for w, p in zip(weight, rate_P, strict=True) if low <= p < high or p == high == 1) / sum(weight)
            for low, high in pairwise(ENDS)
        ]
        np.testing.assert_allclose(gradient_fraction(coefficient_EP, rate_P, share_P)[row], expected, rtol=1e-10)
    np.testing.assert_allclose(gradient_weight([2.0, 3.0], [0.5, 1.0]), [0.5, 0.0])


def test_prompts_without_a_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        gradient_fraction([1.0, 1.0], [0.0, 1.0], [0.5, 0.5])
