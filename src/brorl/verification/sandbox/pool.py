"""A pool of worker processes that bounds the time and the memory of the functions it calls.

In: calls, each of a function by its import path with JSON arguments. Out: for each call its value or its failure, in
the same order. A call that exceeds its time is killed with all processes that it started, its worker is replaced, and
other calls are not affected. A call whose worker is lost through a fault of the machine is made once more. The pool
contains accidents, not adversaries: a worker is an ordinary process of the same user, with that user's files and
network.

Workers start when there is work. The time to load a function does not count as time of a call, nor does the time in
which a worker waits for a processor, up to ten times the limit. The pool has no threads and serves one `run` at once.
"""

from __future__ import annotations

import select
import time
from collections import Counter, deque
from collections.abc import Sequence
from math import ceil, isfinite

from brorl.errors import first_line
from brorl.verification.sandbox.call import LoadError, Result, VerifierCall
from brorl.verification.sandbox.process_pool import ProcessPool
from brorl.verification.sandbox.worker_process import FailedStart, WorkerProcess
from brorl.verification.verifier import UNVERIFIED

_LONGEST_WAIT_S = 1.0
_MAX_STARTS = 3  # new workers that may end while they load a function, and processes that may not start
_MAX_LOST = 16  # calls in a row that the machine ended, before the others are given up
_BETWEEN_STARTS_S = 0.5  # before another attempt to start a process when none is left


class WorkerPool(ProcessPool[WorkerProcess]):
    """Calls functions in worker processes with a bound on time and memory.

    Args:
        num_workers: Maximum number of processes, 1 or more; None for one per core of this process.
        timeout_s: Maximum wall time of a call in seconds, above 0. Time in which the worker is ready to run and waits
            for a processor does not count, up to ten times the limit, where the system reports it.
        memory_bytes: Maximum private memory of a worker, libraries included, at least 64 MiB. Linux enforces it.
        start_timeout_s: Maximum wall time to start a worker and import a function in seconds, above 0.

    Raises:
        ValueError: If an argument is out of its range.
    """

    files_per_worker = files_when_idle = 3  # two pipes and the lifeline

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_s: float = 4.0,
        memory_bytes: int = 1 << 30,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(num_workers)
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be above 0 and finite, got {seconds}")
        if memory_bytes < 1 << 26:
            raise ValueError(f"memory_bytes must be at least 64 MiB ({1 << 26}), got {memory_bytes}")
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._loaded: set[str] = set()

    def run(self, calls: Sequence[VerifierCall]) -> list[Result]:
        """Make calls, one at once per worker, and wait for all of them.

        Args:
            calls: Any number of calls.

        Returns:
            One result per call, in the same order.

        Raises:
            LoadError: If a function cannot be loaded.
            TypeError: If an argument is not a JSON value.
            UserError: If this process cannot open enough files for all workers.
        """
        if calls:
            self._prepare()
        ledger = _Ledger(calls, self._loaded)
        busy: list[WorkerProcess] = []
        try:
            while ledger.waiting or busy:
                self._assign(ledger, busy)
                for worker in _exchange(busy):
                    outcome = worker.outcome(self.timeout_s)
                    if outcome is None:
                        continue
                    busy.remove(worker)
                    if worker.usable:
                        self._idle.append(worker)
                    else:
                        worker.close()
                    if isinstance(outcome, Result):
                        ledger.settle(worker.number, outcome)
                    else:
                        ledger.count_failed_start(worker.number, outcome)
        finally:
            for worker in busy:  # an interrupt must not leave a worker that still owes an answer
                worker.close()
        return [ledger.results[i] for i in range(len(calls))]

    def _assign(self, ledger: _Ledger, busy: list[WorkerProcess]) -> None:
        """Give waiting calls to workers, in place; without a worker, retry and then give up the waiting calls."""
        failed = 0
        while ledger.waiting and len(busy) < self.num_workers:
            try:
                worker = self._take_worker()
            except OSError as error:
                if busy:
                    return  # they continue; the next attempt follows their news
                failed += 1
                if failed == _MAX_STARTS or not self._loaded:
                    ledger.give_up_all(error)
                else:
                    time.sleep(_BETWEEN_STARTS_S)
                continue
            number = ledger.waiting.popleft()
            busy.append(worker)
            worker.assign(number, ledger.calls[number], time.monotonic() + self._start_timeout_s)

    def _take_worker(self) -> WorkerProcess:
        return self._idle.pop() if self._idle else WorkerProcess(self.memory_bytes)


class _Ledger:
    """The calls of one `run`.

    Args:
        calls: The calls.
        loaded: Functions that a worker of the pool has loaded before; updated.

    Attributes:
        calls: The calls.
        waiting: Indices of calls to make.
        results: Results by index.
    """

    def __init__(self, calls: Sequence[VerifierCall], loaded: set[str]) -> None:
        self.calls = calls
        self.waiting = deque(range(len(calls)))
        self.results: dict[int, Result] = {}
        self._loaded = loaded
        self._lost: set[int] = set()
        self._lost_in_a_row = 0
        self._failed_starts: Counter[str] = Counter()

    def settle(self, number: int, result: Result) -> None:
        """Store the result of a call; a call that was lost for the first time waits again, behind the others.

        After many lost calls in a row, the waiting ones are lost without an attempt: a machine that ends every worker
        would otherwise take the time of two new workers for each of them.
        """
        self._loaded.add(self.calls[number].function)
        self._lost_in_a_row = self._lost_in_a_row + 1 if result.is_lost else 0
        if result.is_lost and number not in self._lost:
            self._lost.add(number)
            self.waiting.append(number)
        else:
            self.results[number] = result
        if self._lost_in_a_row >= _MAX_LOST:
            self._give_up(list(self.waiting), str(result.failure))

    def count_failed_start(self, number: int, failed: FailedStart) -> None:
        """Put back the call of a worker that failed before the call began.

        After too many failures the function cannot be loaded. If a worker has loaded it before, the machine has a
        fault, and the waiting calls of the function are lost.

        Raises:
            LoadError: If no worker has ever loaded the function.
        """
        self.waiting.appendleft(number)
        if failed.was_idle:
            return
        function = self.calls[number].function
        new = function not in self._loaded
        if new and failed.raised:
            raise LoadError(f"cannot load {function!r}: {failed.why}")
        self._failed_starts[function] += 1
        if self._failed_starts[function] < _MAX_STARTS:
            return
        if new:
            raise LoadError(
                f"cannot load {function!r}: {_MAX_STARTS} new workers ended while loading it ({failed.why})"
            )
        same = [i for i in self.waiting if self.calls[i].function == function]
        self._give_up(same, f"{UNVERIFIED}: a worker cannot start: {failed.why}")

    def give_up_all(self, error: OSError) -> None:
        """Give up all waiting calls because no process can be started.

        Raises:
            LoadError: If no worker has ever loaded a function.
        """
        if not self._loaded:
            raise LoadError(f"cannot start a process for verification: {error}; free memory or processes") from None
        self._give_up(list(self.waiting), f"{UNVERIFIED}: a worker cannot start: {first_line(error)}")

    def _give_up(self, numbers: Sequence[int], failure: str) -> None:
        for number in numbers:
            self.results[number] = Result(None, failure, 0.0)
            self.waiting.remove(number)


def _exchange(busy: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Wait until a worker writes, accepts more input or exceeds its time; return the workers with news."""
    if not busy:
        return []
    poller = select.poll()
    for worker in busy:
        poller.register(worker.output, select.POLLIN)
        if worker.unsent:
            poller.register(worker.input, select.POLLOUT)
    # Python handles a signal that comes just before the wait only after it: short waits keep Ctrl-C working.
    wait_s = min(min(worker.deadline for worker in busy) - time.monotonic(), _LONGEST_WAIT_S)
    events = {descriptor for descriptor, _ in poller.poll(max(0, ceil(wait_s * 1000)))}
    now = time.monotonic()
    for worker in busy:
        if worker.input in events:
            worker.send()
        if worker.output in events:
            worker.receive()
    return [w for w in busy if w.output in events or now >= w.deadline]
