"""Lengths against numerical integration, and the fraction of distinct tokens against enumeration."""

import numpy as np
import pytest
from scipy import integrate, stats

from brorl.planning.cluster.step_work import ResponseLengths, distinct_fraction


@pytest.mark.parametrize(
    ("mean", "limit", "spread"), [(100, 1000, 0.7), (7680, 15360, 0.7), (900, 1000, 1.2), (3, 4096, 0.3)]
)
def test_moments_are_those_of_the_cut_lognormal(mean: float, limit: float, spread: float) -> None:
    lengths = ResponseLengths(mean, limit, spread)
    law = stats.lognorm(spread, scale=np.exp(lengths.location))
    first, second = (
        integrate.quad(lambda x, k=k: k * x ** (k - 1) * law.sf(x), 0, limit, limit=500, points=[min(mean, limit / 2)])[
            0
        ]
        for k in (1, 2)
    )
    assert first == pytest.approx(mean, rel=1e-5)
    assert lengths.mean_square == pytest.approx(second, rel=1e-5)
    assert lengths.truncation_rate == pytest.approx(law.sf(limit), rel=1e-5)
    assert lengths.mean_progress == pytest.approx(second / (2 * first), rel=1e-5)


def test_draws_have_these_moments() -> None:
    lengths = ResponseLengths(300.0, 1000.0)
    drawn = lengths.draw(200_000, np.random.default_rng())
    assert drawn.max() == 1000.0
    assert drawn.mean() == pytest.approx(300, rel=0.02)
    assert (drawn**2).mean() == pytest.approx(lengths.mean_square, rel=0.04)
    assert (drawn == 1000.0).mean() == pytest.approx(lengths.truncation_rate, abs=0.01)


def test_equal_lengths() -> None:
    lengths = ResponseLengths(64.0, 64.0, 0.0)
    assert lengths.mean_square == 64.0**2
    assert lengths.draw(3, np.random.default_rng()) == pytest.approx([64.0] * 3)


@pytest.mark.parametrize(("mean", "limit"), [(0, 10), (11, 10), (10, 10)])
def test_impossible_lengths(mean: float, limit: float) -> None:
    with pytest.raises(ValueError, match="mean length"):
        ResponseLengths(mean, limit)


@pytest.mark.parametrize(
    ("rollouts", "length", "entropy"), [(512, 4000, 0.3), (512, 10, 0.3), (16, 60, 0.14), (1, 50, 0.2)]
)
def test_distinct_tokens_of_equal_entropy(rollouts: int, length: int, entropy: float) -> None:
    """Against a sum over small steps of min(N, e^(h t)) prefixes."""
    t = (np.arange(length * 1000) + 0.5) / 1000
    expected = np.minimum(rollouts, np.exp(np.minimum(entropy * t, 50))).sum() / 1000 / (rollouts * length)
    assert distinct_fraction(rollouts, length, entropy) == pytest.approx(expected, rel=1e-3)
