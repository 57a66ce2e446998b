"""One rollout worker of the simulation: rows that decode together, and rows that wait for a slot.

In: rows with their lengths, and the time. Out: the rows that have finished, and the time of the next one. All running
rows gain a token in each decoding step, so that a row is finished when the worker has made as many steps as the row is
long. Between two events the number of rows is constant, and time is steps times the seconds of a step.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Owner = TypeVar("Owner")

_ROUNDING = 1e-6  # tokens; rows that end within it end together


class DecodingWorker(Generic[Owner]):
    """A worker with continuous batching.

    Args:
        step_seconds_B: Seconds of a decoding step with b rows, shape [slots + 1].
    """

    def __init__(self, step_seconds_B: FloatArray) -> None:
        self._seconds: list[float] = step_seconds_B.tolist()
        self._slots = len(self._seconds) - 1
        self._running: list[tuple[float, int, Owner]] = []  # by the step at which a row ends
        self._waiting: deque[tuple[float, Owner]] = deque()
        self._order = count()
        self._steps = 0.0
        self._time = 0.0
        self.stamp = 0
        """Changes with every change of the rows, which makes an earlier `next_end` void."""

    @property
    def load(self) -> int:
        """Rows that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def accepts(self) -> bool:
        """Whether a slot is free and no row waits for it."""
        return not self._waiting and len(self._running) < self._slots

    def add(self, time: float, lengths: FloatArray, owner: Owner) -> None:
        """Add rows at a time, which start as slots get free."""
        self._advance(time)
        self._waiting.extend((length, owner) for length in lengths.tolist())
        self._fill()

    def stall(self, time: float, seconds: float) -> None:
        """Decode nothing for some seconds, in addition to a stall that has not ended."""
        self._advance(time)
        self._time = max(self._time, time) + seconds
        self.stamp += 1

    def next_end(self) -> float:
        """Return the time at which the next row ends; infinite without rows."""
        if not self._running:
            return inf
        left = max(self._running[0][0] - self._steps, 0.0)
        return self._time + left * self._seconds[len(self._running)]

    def finish(self, time: float) -> list[Owner]:
        """Remove the rows that have ended by a time, fill their slots, and return their owners."""
        self._advance(time)
        limit = self._steps + _ROUNDING + 1e-9 * self._steps
        owners = []
        while self._running and self._running[0][0] <= limit:
            owners.append(heapq.heappop(self._running)[2])
        self._fill()
        return owners

    def _advance(self, time: float) -> None:
        """Decode until a time, which is at most that of the next end."""
        if time > self._time:
            if self._running:
                self._steps += (time - self._time) / self._seconds[len(self._running)]
            self._time = time

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            length, owner = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + length, next(self._order), owner))
        self.stamp += 1
