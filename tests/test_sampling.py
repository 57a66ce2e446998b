"""Sampling parameters: the boundary of every range, from both sides."""

import math

import pytest

from brorl.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [
        ("temperature", [-1e-9, math.inf, math.nan], [0.0, 1e-6, 2.5]),
        ("top_p", [0.0, -0.1, 1.0 + 1e-9, math.nan], [1e-6, 0.95, 1.0]),
        ("top_k", [-1], [0, 1, 10**6]),
        ("max_new_tokens", [0, -3], [1, 32_768]),
        ("min_new_tokens", [-1, 256], [0, 255]),
    ],
)
def test_ranges(name: str, refused: list[float], accepted: list[float]) -> None:
    for value in accepted:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name} must .*got {value}($|:)"):
            SamplingParams(**{name: value})
