"""Wall time by phase; an observer receives each phase when it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from brorl.activity import Observe, Phase, unobserved


class Stopwatch:
    """Adds up the seconds spent in named phases: `with clock("generation"): ...`.

    Args:
        observe: Receives each phase when it begins.
    """

    def __init__(self, observe: Observe = unobserved) -> None:
        self._observe = observe
        self.restart()

    def restart(self) -> None:
        """Start from zero."""
        self._started = perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block."""
        self._observe(Phase(phase))
        started = perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and the total since the start."""
        return {**self._seconds, "total": perf_counter() - self._started}
