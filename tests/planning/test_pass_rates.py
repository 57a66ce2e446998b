"""Pass rates: fits against likelihoods and integrals, counts against enumeration, the published fractions."""

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import brentq

from brorl.planning.pass_rates import (
    PassRates,
    fit_pass_rates,
    fit_without_spikes,
    fractions_of_any_shape,
    refit_fractions,
)

PUBLISHED = PassRates(0.381, 2.027, never=0.30)


def draw(rng: np.random.Generator, rates: PassRates, num_prompts: int, num_rollouts: int) -> np.ndarray:
    """Counts of correct rollouts under a distribution of pass rates."""
    kind = rng.choice(3, num_prompts, p=[rates.never, rates.always, rates.between])
    rate = np.choose(kind, [0.0, 1.0, rng.beta(rates.a, rates.b, num_prompts)])
    return rng.binomial(num_rollouts, rate)


def log_likelihood(rates: PassRates, correct: np.ndarray, num_rollouts: int) -> float:
    """By scipy's own beta-binomial."""
    probability = rates.between * stats.betabinom(num_rollouts, rates.a, rates.b).pmf(correct)
    probability += rates.never * (correct == 0) + rates.always * (correct == num_rollouts)
    return float(np.log(probability).sum())


def integral(rates: PassRates, value) -> float:
    """Mean of a function of the pass rate, with the Beta's powers as quadrature weights, so that poles do no harm."""
    constant = float(np.exp(-stats.beta(rates.a, rates.b).logpdf(0.5))) * 0.5 ** (rates.a - 1) * 0.5 ** (rates.b - 1)
    total, _ = quad(value, 0, 1, weight="alg", wvar=(rates.a - 1, rates.b - 1), limit=200)
    return rates.never * value(0.0) + rates.always * value(1.0) + rates.between * total / constant


@pytest.mark.parametrize(
    "truth",
    [PUBLISHED, PassRates(0.6, 0.5, 0.1, 0.3), PassRates(2.0, 5.0), PassRates(1.3, 4.0, 0.0, 0.15)],
    ids=["published", "both spikes", "no spike", "spike at 1"],
)
def test_the_fit_recovers_what_drew_the_counts(rng: np.random.Generator, truth: PassRates) -> None:
    correct = draw(rng, truth, 20_000, 64)
    fit = fit_pass_rates(correct, 64)
    assert log_likelihood(fit, correct, 64) >= log_likelihood(truth, correct, 64) - 1e-6
    assert fit.a == pytest.approx(truth.a, rel=0.25)
    assert fit.b == pytest.approx(truth.b, rel=0.25)
    assert fit.never == pytest.approx(truth.never, abs=0.05)
    assert fit.always == pytest.approx(truth.always, abs=0.05)
    for n in (16, 512):
        assert fit.kept(n, n // 2) == pytest.approx(truth.kept(n, n // 2), abs=0.03)


def test_no_neighbour_of_the_fit_is_more_likely(rng: np.random.Generator) -> None:
    correct = draw(rng, PassRates(0.5, 1.5, 0.2, 0.05), 100, 32)
    fit = fit_pass_rates(correct, 32)
    best = log_likelihood(fit, correct, 32)
    for _ in range(80):
        scale = 10 ** rng.uniform(-3, -0.5)
        never, always = np.clip([fit.never, fit.always] + scale * rng.normal(size=2), 0, 0.49)
        other = PassRates(*(np.array([fit.a, fit.b]) * np.exp(scale * rng.normal(size=2))), never, always)
        assert log_likelihood(other, correct, 32) <= best + 1e-5
    plain = fit_without_spikes(correct, 32)
    assert plain.never == plain.always == 0
    for _ in range(40):
        other = PassRates(*(np.array([plain.a, plain.b]) * np.exp(0.05 * rng.normal(size=2))))
        assert log_likelihood(other, correct, 32) <= log_likelihood(plain, correct, 32) + 1e-5


def test_shares_are_integrals_over_pass_rates(rng: np.random.Generator) -> None:
    for _ in range(5):
        never, always = rng.dirichlet([1, 1, 4])[:2]
        rates = PassRates(rng.uniform(0.2, 3), rng.uniform(0.2, 3), never, always)
        for n in (2, 16, 300):
            mixed = integral(rates, lambda p, n=n: 1 - p**n - (1 - p) ** n)
            assert rates.kept(n, n - 1) == pytest.approx(mixed, abs=1e-6)
            most = int(rng.integers(1, n))
            kept = integral(rates, lambda p, n=n, m=most: float(np.diff(stats.binom(n, p).cdf([0, m]))[0]))
            assert rates.kept(n, most) == pytest.approx(kept, abs=1e-6)
            assert rates.solved(n) == pytest.approx(integral(rates, lambda p, n=n: 1 - (1 - p) ** n), abs=1e-6)


def test_the_published_shares_need_a_spike() -> None:
    assert PUBLISHED.kept(16, 15) == pytest.approx(0.41, abs=0.005)
    assert PUBLISHED.kept(512, 511) == pytest.approx(0.62, abs=0.005)
    found = []
    for logit in np.linspace(-7, 7, 57):
        mean = 1 / (1 + np.exp(-logit))

        def fraction(log_size: float, n: int = 16, mean: float = mean) -> float:
            return PassRates(mean * np.exp(log_size), (1 - mean) * np.exp(log_size)).kept(n, n - 1)

        if fraction(-6) < 0.41 < fraction(6):
            found.append(fraction(brentq(lambda s, fraction=fraction: fraction(s) - 0.41, -6, 6), 512))
    assert len(found) > 20
    assert min(found) == pytest.approx(0.659, abs=0.002)


@pytest.mark.slow
def test_a_prompts_chance_after_its_pilot_is_bayes(rng: np.random.Generator) -> None:
    rates = PassRates(rng.uniform(0.8, 2), rng.uniform(0.8, 2), 0.25, 0.1)
    correct = np.array([0, 1, 5, 8])
    chance_P = rates.kept_after(correct, 8, 40, 30)
    for place, k in enumerate(correct.tolist()):
        seen = stats.binom(8, [0.0, 1.0]).pmf(k)

        def likelihood(p: float, k: int = k) -> float:
            return float(stats.binom(8, p).pmf(k))

        def both(p: float, likelihood=likelihood) -> float:
            return likelihood(p) * float(np.diff(stats.binom(40, p).cdf([0, 30]))[0])

        whole = integral(rates, likelihood)
        assert whole >= rates.never * seen[0]
        assert chance_P[place] == pytest.approx(integral(rates, both) / whole, abs=1e-6)


def test_the_distribution_of_any_shape_follows_rates_that_no_beta_does(rng: np.random.Generator) -> None:
    """Two pass rates far apart: at N between and beyond n the fractions are those of the two."""
    rates = np.array([0.04, 0.6])
    correct = rng.binomial(64, rates[rng.integers(0, 2, 20_000)])
    wanted = np.array([16, 64, 128, 1024])
    mixed, solved = fractions_of_any_shape(correct, 64, wanted, wanted - 1)
    kept, _ = fractions_of_any_shape(correct, 64, wanted, wanted // 4)
    np.testing.assert_allclose(solved, [1 - ((1 - rates) ** n).mean() for n in wanted.tolist()], atol=0.02)
    np.testing.assert_allclose(mixed, [1 - ((1 - rates) ** n + rates**n).mean() for n in wanted.tolist()], atol=0.02)
    np.testing.assert_allclose(mixed[1], ((correct > 0) & (correct < 64)).mean(), atol=0.005)
    np.testing.assert_allclose(
        kept, [np.diff(stats.binom(n, rates).cdf([[0], [n // 4]]), axis=0).mean() for n in wanted.tolist()], atol=0.02
    )
    assert fit_pass_rates(correct, 64).kept(128, 127) < 0.98 < mixed[2]


def test_weights_are_repeated_prompts(rng: np.random.Generator) -> None:
    """A refit with integer weights is the refit of repeated prompts, and near the exact fit (likelihoods are flat)."""
    correct = draw(rng, PassRates(0.5, 1.5, 0.2, 0.05), 60, 32)
    weight = rng.multinomial(60, np.full(60, 1 / 60), 3).astype(float)
    wanted, most = np.array([64, 512]), np.array([63, 300])
    mixed, solved = refit_fractions(correct, 32, weight, wanted, most)
    for row in range(3):
        repeated = np.repeat(correct, weight[row].astype(int))
        again = refit_fractions(repeated, 32, np.ones((1, 60)), wanted, most)
        np.testing.assert_allclose(mixed[row], again[0][0], rtol=1e-12)  # products of 3 rows and of 1 round differently
        np.testing.assert_allclose(solved[row], again[1][0], rtol=1e-12)
        fit = fit_pass_rates(repeated, 32)
        np.testing.assert_allclose(
            mixed[row], [fit.kept(int(n), int(m)) for n, m in zip(wanted, most, strict=True)], atol=0.25
        )
        np.testing.assert_allclose(solved[row], [fit.solved(int(n)) for n in wanted], atol=0.25)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt had both"):
        fit_pass_rates(np.array([0, 8, 0]), 8)
    with pytest.raises(ValueError, match="between 0 and 8"):
        fit_pass_rates(np.array([9]), 8)
    with pytest.raises(ValueError, match="a > 0"):
        PassRates(0.0, 1.0)
    with pytest.raises(ValueError, match="at most 1"):
        PassRates(1.0, 1.0, 0.7, 0.4)
