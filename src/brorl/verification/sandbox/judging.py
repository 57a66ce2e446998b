"""The run of many judges: one per worker at once, each in a thread of its own.

The threads end with the run. A judge runs once more if an infrastructure failure ended one of its processes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, TypeVar

from brorl.verification.sandbox.process import IdleLossError
from brorl.verification.sandbox.replies import JudgeTimeout, LostError, Undecided
from brorl.verification.sandbox.server import ServerSettings
from brorl.verification.sandbox.worker import OverPartError, Worker

T = TypeVar("T")
Judge = Callable[[Worker], T]
"""Decides whether a program is correct, with the help of a worker."""

OVER_TIME = "the time of all programs was over (raise verification.batch_timeout_s)"
_TRIES = 2  # of a judge that infrastructure failures end
_MAX_LOST = 16  # infrastructure failures in a row, before all judges that wait are given up
_MAX_STARTS = 3  # workers in a row that cannot start, while none runs
_BETWEEN_STARTS_S = 0.5
_WAIT_S = 0.25


class JudgeRun(Generic[T]):
    """Runs judges, `num_workers` at once, on workers that it takes from `idle` and returns.

    In the time `timeout_s` of all judges, each gets an equal part of half of it first, in its turn. Those that need
    more run again after all others.
    """

    def __init__(
        self,
        judges: Sequence[Judge[T]],
        settings: ServerSettings,
        idle: list[Worker],
        num_workers: int,
        timeout_s: float = inf,
    ) -> None:
        self._judges = judges
        self._settings = settings
        self._idle = idle
        self._num_workers = num_workers
        self._part_s = timeout_s * num_workers / (2 * max(len(judges), 1))
        self._end_at = time.monotonic() + timeout_s
        self._lock = threading.Lock()  # of all that follows
        self._waiting = deque(range(len(judges)))
        self._used_part: set[int] = set()
        self._tries = [0] * len(judges)
        self._lost_in_a_row = self._failed_starts = self._num_running = 0
        self._results: dict[int, T | Undecided] = {}
        self._errors: list[BaseException] = []

    def run(self) -> list[T | Undecided]:
        """Run all judges and wait for them; return the decision of each, in order.

        It is `JudgeTimeout` if the judge used its part and the time was over before it could decide; `Undecided` if the
        time was over before that, or after infrastructure failures.

        Raises:
            PreloadError: If a server cannot be set up.
            Exception: Any exception of a judge.
        """
        num_threads = min(self._num_workers, len(self._judges))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        try:
            for thread in threads:
                thread.start()
            _join(threads)
        except BaseException:  # an interrupt
            self._end_at = 0.0
            _join(threads)
            raise
        if self._errors:
            raise self._errors[0]
        for number in range(len(self._judges)):
            without = JudgeTimeout if number in self._used_part else Undecided
            self._results.setdefault(number, without(OVER_TIME))
        return [self._results[number] for number in range(len(self._judges))]

    def _is_over(self) -> bool:
        return time.monotonic() >= self._end_at

    def _work(self) -> None:
        """Run judges one after the other, as long as any waits; an exception of a judge ends the run."""
        try:
            while (begun := self._begin()) is not None:
                self._judge(*begun)
        except BaseException as error:
            self._errors.append(error)
            self._end_at = 0.0

    def _judge(self, number: int, worker: Worker) -> None:
        try:
            self._decide(number, self._judges[number](worker))
        except OverPartError:
            self._cut_off(number, worker.used_part)
        except LostError as error:
            worker.close()
            self._lose(number, error)
            return
        except BaseException:
            worker.close()
            raise
        try:
            worker.finish()
            self._idle.append(worker)
        except LostError:
            worker.close()

    def _begin(self) -> tuple[int, Worker] | None:
        """Return the next judge and its worker; None if none waits."""
        while not self._is_over():
            with self._lock:
                if not self._waiting:
                    return None
                number = self._waiting.popleft()
                self._num_running += 1
                part_s = inf if number in self._used_part else self._part_s
            try:
                worker = self._take_worker()
            except LostError as error:
                self._put_back(number, str(error))
                time.sleep(_BETWEEN_STARTS_S)
            else:
                self._failed_starts = 0
                worker.begin(part_s, self._is_over)
                return number, worker
        return None

    def _take_worker(self) -> Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return Worker(self._settings)
            try:
                worker.refresh()
            except LostError:
                worker.close()
            else:
                return worker

    def _put_back(self, number: int, reason: str) -> None:
        """Put a judge back without a worker; it waits for those that run. Give all up if none runs for some tries."""
        with self._lock:
            self._waiting.appendleft(number)
            self._num_running -= 1
            self._failed_starts += not self._num_running
            if self._failed_starts >= _MAX_STARTS:
                self._give_up(reason)

    def _decide(self, number: int, decision: T) -> None:
        with self._lock:
            self._num_running -= 1
            self._lost_in_a_row = 0
            self._results[number] = decision

    def _cut_off(self, number: int, used_part: bool) -> None:
        """Run a judge that has used its part again after all others; at the end of all time it is left."""
        with self._lock:
            self._num_running -= 1
            if used_part:
                self._lost_in_a_row = 0
                self._used_part.add(number)
                self._waiting.append(number)

    def _lose(self, number: int, error: LostError) -> None:
        """Run a judge once more, unless that was the second time; give up all if none has succeeded for long."""
        with self._lock:
            self._num_running -= 1
            if isinstance(error, IdleLossError):
                self._waiting.appendleft(number)
                return
            self._tries[number] += 1
            self._lost_in_a_row += 1
            if self._tries[number] < _TRIES:
                self._waiting.append(number)
            else:
                self._results[number] = Undecided(str(error))
            if self._lost_in_a_row >= _MAX_LOST:
                self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        while self._waiting:
            self._results[self._waiting.popleft()] = Undecided(reason)


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads; short waits keep Ctrl-C working."""
    for thread in threads:
        while thread.is_alive():
            thread.join(_WAIT_S)
