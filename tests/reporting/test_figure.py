"""Labels and ticks of figures."""

import re

import numpy as np
import pytest

from brorl.reporting.figure import apart, tick_seconds, tick_text


def test_labels_are_moved_apart_no_further_than_needed(rng: np.random.Generator) -> None:
    for _ in range(50):
        place = np.sort(rng.uniform(0, 1, int(rng.integers(1, 9))))
        moved = apart(place, 0.1)
        assert (np.diff(moved) >= 0.1 - 1e-9).all()
        assert moved[0] >= 0
        assert moved[-1] <= 1 + 1e-9
        if (np.diff(place) >= 0.1).all():
            np.testing.assert_allclose(moved, place)
        cost = ((moved - place) ** 2).sum()
        for _ in range(100):  # no other places that are far enough apart are closer to those wanted
            other = np.cumsum(0.1 + np.abs(rng.normal(0, 0.05, place.size)))
            other += (place - other).mean()
            nearby = moved + rng.normal(0, 0.01, place.size)
            for them in (other, nearby):
                if (np.diff(them) >= 0.1).all() and them[0] >= 0 and them[-1] <= 1:
                    assert cost <= ((them - place) ** 2).sum() + 1e-9
    np.testing.assert_allclose(apart(np.full(21, 0.5), 0.1), np.linspace(0, 1, 21), atol=1e-12)  # too many


def test_ticks_of_time_read_well() -> None:
    """From seconds to weeks: at most 5 intervals, at least 1.5, of a whole number of the unit that labels them."""
    for end in np.geomspace(1, 3e6, 200):
        distance = tick_seconds(end / 5)
        assert 1.5 <= end / distance <= 5 + 1e-9
        assert re.fullmatch(r"(0\.\d|\d+) (s|min|h)", tick_text(distance, "seconds"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "seconds", "0"), (40, "seconds", "40 s"), (2.5, "seconds", "2.5 s"), (900, "seconds", "15 min"),
     (2.5e6, "samples", "2.5M"), (100_000, "samples", "100k"), (1000, "steps", "1,000"), (2e6, "unique_tokens", "2M")],
)  # fmt: skip
def test_tick_text(value: float, unit: str, text: str) -> None:
    assert tick_text(value, unit) == text  # type: ignore[arg-type]
