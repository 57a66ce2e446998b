"""Activities: what the engine, the collector, the learner and the loop report while they work.

An activity never changes results. An observer must return quickly; it may raise to end the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Step:
    """A step begins."""

    number: int


@dataclass(frozen=True)
class Stage:
    """A stage begins, and the previous one ends."""

    name: str  # `loading`, `evaluating`, `saving`, or the name of a stage in the metrics (`generation`, ...)
    detail: str = ""  # what the stage works on, such as `model`; may be empty


@dataclass(frozen=True)
class Round:
    """The prompts of a round are about to be sampled."""

    step: int
    number: int  # counts the step's rounds from 1; later rounds replace prompts that dynamic sampling dropped
    groups: int  # groups in the step so far, including those carried from earlier steps
    wanted: int  # groups that the step needs
    truncation_rate: float = 0.0  # 0 to 1: share of the rollouts so far in this step that were truncated


@dataclass(frozen=True)
class Decoding:
    """An engine call has made progress. The numbers cover all prompts of the call.

    It is reported after each position (native engine), as tasks finish (pooled) or after the call (vLLM).
    """

    finished: int  # rollouts that have ended
    rollouts: int  # all rollouts
    tokens: int  # distinct tokens computed so far
    depth: int  # position of the newest tokens; the first token of a response is at 1


@dataclass(frozen=True)
class Updating:
    """The learner is about to make an update. `done` of the step's `updates` are complete."""

    done: int
    updates: int


Activity = Step | Stage | Round | Decoding | Updating
Observe = Callable[[Activity], None]
Echo = Callable[[str], None]  # receives a line for the user


def unobserved(_: Activity) -> None:
    """Ignore an activity."""


class Stopwatch:
    """Accumulates the seconds of named stages: `with clock("generation"): ...`; `now` returns the time in seconds."""

    def __init__(self, observe: Observe = unobserved, now: Callable[[], float] = perf_counter) -> None:
        self._observe = observe
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Start from zero."""
        self._started = self._now()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block."""
        self._observe(Stage(stage))
        started = self._now()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._now() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and the total since the start."""
        return {**self._seconds, "total": self._now() - self._started}
