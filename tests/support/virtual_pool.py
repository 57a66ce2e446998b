"""A pool with a virtual clock: one engine in this process plays several workers, and time is a function of the work.

In: tasks, and the seconds that each takes. Out: the trees that the engine samples, in the order in which the workers
would finish them. Nothing depends on the machine, so a run over this pool is reproducible bit for bit. Tests and
simulations use it; it saves no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from brorl.rollout.engine import Engine, SampleTask, TaskResult
from brorl.tree import RolloutTree

Duration = Callable[[SampleTask, Sequence[RolloutTree]], float]


class VirtualPool:
    """Samples each task when a virtual worker starts it, and returns it when the virtual clock has reached its end.

    Args:
        engine: Samples every task, with the weights that were published last when the task starts.
        num_workers: Tasks that run at the same time.
        duration: Virtual seconds of a task, above 0.
    """

    def __init__(self, engine: Engine, num_workers: int, duration: Duration) -> None:
        self.num_workers = num_workers
        self.now = 0.0
        self.busy_seconds = 0.0
        self._engine, self._duration = engine, duration
        self._event = 0.0  # the time at which the caller acts: the end of the task that it got last
        self._tickets = 0
        self._queue: deque[tuple[int, SampleTask]] = deque()
        self._running: list[tuple[float, int, TaskResult]] = []

    def advance(self, seconds: float) -> None:
        """Let time pass while the caller works; `done` returns what has ended meanwhile, in order."""
        self.now += seconds

    def submit(self, task: SampleTask) -> int:
        """Queue a task; see `SamplingPool.submit`."""
        self._tickets += 1
        self._queue.append((self._tickets, task))
        self._start()
        return self._tickets

    def done(self, timeout_s: float | None = None) -> list[TaskResult]:
        """Return the next task that ends, or nothing if none ends within the timeout.

        Tasks that are submitted in answer to it start when it ended, even if the clock is further.

        Args:
            timeout_s: Longest wait in virtual seconds; None for no limit.

        Raises:
            RuntimeError: If the wait would never end, because no task is in progress.
        """
        if self._running and (timeout_s is None or self._running[0][0] <= self.now + timeout_s):
            end, _, sampled = heapq.heappop(self._running)
            self._event, self.now = end, max(self.now, end)
            self._start()
            return [sampled]
        if timeout_s is None:
            raise RuntimeError("no task is in progress; submit one before waiting without a limit")
        self.now += timeout_s
        self._event = self.now
        return []

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget tasks, and end at once those that are being sampled."""
        gone = set(tickets)
        self._queue = deque((ticket, task) for ticket, task in self._queue if ticket not in gone)
        self._running = [running for running in self._running if running[1] not in gone]
        heapq.heapify(self._running)
        self._start()

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights all tasks that start from now on; see `SamplingPool.publish`."""
        self._event = self.now
        self._engine.load_weights(weights, version)

    def close(self) -> None:
        """End all workers."""
        self._queue.clear()
        self._running.clear()

    def _start(self) -> None:
        """Start queued tasks on free workers."""
        while self._queue and len(self._running) < self.num_workers:
            ticket, task = self._queue.popleft()
            trees = self._engine.sample(task)
            seconds = self._duration(task, trees)
            self.busy_seconds += seconds
            sampled = TaskResult(ticket, trees, self._engine.version, seconds)
            heapq.heappush(self._running, (self._event + seconds, ticket, sampled))
