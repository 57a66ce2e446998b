"""Lengths of responses: lognormal, cut at the length limit.

In: the mean length, the limit and the spread. Out: moments and draws. The parameter of the lognormal is solved for
the mean after the cut, so that the mean is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import erf, exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SPREAD = 0.7
"""Assumed standard deviation of the log of a length."""


@dataclass(frozen=True)
class ResponseLengths:
    """The distribution of min(X, limit) with X lognormal.

    Attributes:
        mean: Mean length in tokens, after the cut; above 0 and below the limit.
        limit: Length limit in tokens.
        spread: Standard deviation of log X; 0 for equal lengths.
    """

    mean: float
    limit: float
    spread: float = SPREAD

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.limit or (self.spread > 0 and self.mean > 0.999 * self.limit):
            raise ValueError(f"the mean length must lie above 0 and below the limit {self.limit:g}, not {self.mean:g}")
        if self.spread < 0:
            raise ValueError(f"the spread of lengths must be at least 0, not {self.spread:g}")

    @cached_property
    def location(self) -> float:
        """Mean of log X."""
        if self.spread == 0:
            return log(self.mean)
        low, high = log(self.mean) - 40.0, log(self.limit) + 40.0 * self.spread
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(1, middle) < self.mean else (low, middle)
        return (low + high) / 2

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        return self.mean**2 if self.spread == 0 else self._moment(2, self.location)

    @property
    def mean_progress(self) -> float:
        """Tokens that a response has at a random time of its decoding: E[L^2] / (2 E[L])."""
        return self.mean_square / (2 * self.mean)

    @property
    def truncation_rate(self) -> float:
        """Fraction of responses that reach the limit."""
        return 0.0 if self.spread == 0 else 1 - _normal((log(self.limit) - self.location) / self.spread)

    def draw(self, number: int, generator: np.random.Generator) -> FloatArray:
        """Draw lengths, not rounded, shape [number]."""
        drawn = np.exp(self.location + self.spread * generator.standard_normal(number))
        lengths: FloatArray = np.minimum(drawn, self.limit)
        return lengths

    def _moment(self, order: int, location: float) -> float:
        """Return E[min(X, limit)^order]: the lognormal's partial moment, and the limit's share."""
        cut = (log(self.limit) - location) / self.spread
        partial = exp(order * location + (order * self.spread) ** 2 / 2) * _normal(cut - order * self.spread)
        return partial + self.limit**order * (1 - _normal(cut))


def _normal(x: float) -> float:
    """Return the standard normal distribution function."""
    return (1 + erf(x / sqrt(2))) / 2
