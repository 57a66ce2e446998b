"""A pool of threads in this process, each with its own engine.

In: engines, and tasks. Out: their trees, in the order in which they are done. Threads share the interpreter: this pool
helps where sampling spends its time in torch, on several devices for example, and in tests of concurrent code.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from torch import Tensor

from brorl.rollout.engine import Engine, SampledTask, SampleTask


class LocalPool:
    """Samples tasks in threads.

    Args:
        engines: One for each thread, with separate models. Their observers are called from the threads.

    Raises:
        ValueError: If there is no engine.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine, got none")
        self.num_workers = len(engines)
        self._changed = threading.Condition()
        self._tickets = 0
        self._queue: deque[tuple[int, SampleTask]] = deque()
        self._wanted: set[int] = set()
        self._done: list[SampledTask] = []
        self._weights: list[tuple[str, Tensor]] | None = None  # those of the engines until some are published
        self._version = engines[0].version
        self._error: BaseException | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(engine,), name=f"rollout worker {i}", daemon=True)
            for i, engine in enumerate(engines)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: SampleTask) -> int:
        """Queue a task; see `SamplingPool.submit`."""
        with self._changed:
            self._tickets += 1
            self._queue.append((self._tickets, task))
            self._wanted.add(self._tickets)
            self._changed.notify_all()
            return self._tickets

    def done(self, timeout_s: float | None = None) -> list[SampledTask]:
        """Wait for tasks; see `SamplingPool.done`. An exception of an engine is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            done, self._done = self._done, []
            return done

    def discard(self, tickets: Iterable[int]) -> None:
        """Discard tasks; see `SamplingPool.discard`."""
        tickets = {*tickets}
        with self._changed:
            self._wanted -= tickets
            self._queue = deque(item for item in self._queue if item[0] in self._wanted)
            self._done = [sampled for sampled in self._done if sampled.ticket not in tickets]

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights; every engine loads the copy before its next task. See `SamplingPool.publish`."""
        copied = [(name, tensor.detach().clone()) for name, tensor in weights]
        with self._changed:
            self._weights, self._version = copied, version

    def close(self) -> None:
        """End all threads, after the tasks that they are sampling."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, engine: Engine) -> None:
        loaded = None  # not self._weights: they may have been published before this thread runs
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                ticket, task = self._queue.popleft()
                weights, version = self._weights, self._version
            try:
                if weights is not None and weights is not loaded:
                    engine.load_weights(weights, version)
                    loaded = weights
                started = perf_counter()
                trees = engine.sample(task.prompts, task.num_rollouts, task.sampling, task.seed, task.first)
                sampled = SampledTask(ticket, trees, version, perf_counter() - started)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if ticket in self._wanted:
                    self._wanted.remove(ticket)
                    self._done.append(sampled)
                    self._changed.notify_all()
