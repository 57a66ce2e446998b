"""`Worker`, a fork server with the processes that a judge uses, and `JudgeRun`, which runs many judges on workers.

A judge is a function that takes a worker, runs programs, reads their replies, and returns a decision. Expected values
stay with the judge and never enter a program.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import Generic, TypeVar

from brorl.verification.sandbox.inside.program import CALL, LOAD, RUN
from brorl.verification.sandbox.process import KILL_SECONDS, Process
from brorl.verification.sandbox.request import JudgeTimeout, Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.server import Server, ServerSettings
from brorl.verification.sandbox.values import REQUEST_DEPTH, encode

T = TypeVar("T")

ANSWER = "answer"  # the default process name
_RUN = ""  # the process name of a whole program
_MAX_WAIT_S = 0.25  # within this time, a thread notices Ctrl-C or the end of the run
OVER_TIME = "the batch time limit was reached (raise verification.batch_timeout_s)"
_TRIES = 2  # attempts per judge if infrastructure failures interrupt it
_MAX_LOST = 16  # consecutive infrastructure failures after which all waiting judges are abandoned
_MAX_STARTS = 3  # the same for consecutive failed worker starts while no worker runs
_BETWEEN_STARTS_S = 0.5


class OutsideError(Exception):
    """Raised by an outside function. Its message becomes the message of the program's exception."""


class OverPartError(Exception):
    """A judge's processes have used up their share of the batch time limit, or the limit was reached."""


class Worker:
    """One fork server and the processes in use. All methods raise a LostError after an infrastructure failure.

    Attributes:
        used_part: Whether the judge's processes have used up their share of the batch time limit.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.server = Server(settings)
        self._processes: dict[str, Process] = {}  # name -> process; a trusted process outlives its judge
        self._outside: dict[str, Mapping[str, Callable[..., object]]] = {}  # process -> function name -> function
        self.begin()

    def begin(self, part_s: float = inf, is_over: Callable[[], bool] = lambda: False) -> None:
        """Set the seconds that the next judge's processes may use, and a test for whether the run is over."""
        self.used_part, self._left_s, self._is_over = False, part_s, is_over

    def refresh(self) -> None:
        """Prepare an idle worker for its next judge."""
        self.server.receive()
        self._end_busy()
        self.server.forget_endings()

    def run(self, source: str, stdin: str, limits: Limits) -> Reply:
        """Run a whole program on an input, in a new process. The reply's value is the program's output."""
        self.end(_RUN)
        process = self._processes[_RUN] = Process(self.server, limits, stdin)
        process.ask(RUN, source.encode("utf-8", "surrogatepass"), limits)
        return self._wait(_RUN)

    def load(
        self,
        source: str,
        limits: Limits,
        name: str = ANSWER,
        outside: Mapping[str, Callable[..., object]] | None = None,
    ) -> Reply:
        """Start a named process that executes the source as a module and then waits for calls.

        The memory limit also applies to the calls. The module can call the functions in `outside`, which run in this
        process. They take and return values of built-in types, or raise an `OutsideError`. Any other exception ends the
        judge.
        """
        self.end(name)
        self._outside[name] = outside or {}
        process = self._processes[name] = Process(self.server, limits, outside=self._outside[name].keys())
        process.ask(LOAD, _encode((source, tuple(self._outside[name]))), limits)
        return self._wait(name)

    def trust(self, limits: Limits) -> None:
        """Start a process with the `load` and `call` functions of `Functions`, unless the previous one is idle.

        The first call's time includes the start.
        """
        if ANSWER not in self._processes or not self._processes[ANSWER].is_idle:
            self.end(ANSWER)
            self._processes[ANSWER] = Process(self.server, limits)

    def call(self, function: str, arguments: tuple[object, ...], limits: Limits, name: str = ANSWER) -> Reply:
        """Call a loaded program's function with values of built-in types. `S.f` calls method `f` of a new `S()`."""
        self._processes[name].ask(CALL, _encode((function, arguments, limits.output_bytes)), limits)
        return self._wait(name)

    def _wait(self, name: str) -> Reply:
        """Wait for a process's reply, and answer its calls to outside functions."""
        process = self._processes[name]
        while True:
            self.server.receive()
            reply = process.advance()
            if isinstance(reply, Reply):
                self._left_s -= reply.seconds
                return reply
            if reply is not None:
                answered: tuple[object, str | None]
                try:
                    answered = self._outside[name][reply.function](*reply.arguments), None
                except OutsideError as error:
                    answered = None, str(error)
                process.give(_encode(answered))
                continue
            self.used_part = time.monotonic() >= process.time_of(self._left_s) and self._left_s <= process.used_s()
            if self.used_part or self._is_over():
                raise OverPartError
            self._poll(min(process.deadline, process.time_of(self._left_s)), process)

    def _poll(self, deadline: float, process: Process | None = None) -> None:
        """Wait briefly for something to arrive, at most until the deadline.

        A signal that arrives just before the wait is handled only after it, so short waits keep Ctrl-C working.
        """
        poller = select.poll()
        for descriptor in (self.server.control.fileno(), *(process.readable if process else ())):
            poller.register(descriptor, select.POLLIN)
        for descriptor in process.writable if process else ():
            poller.register(descriptor, select.POLLOUT)
        poller.poll(ceil(1000 * max(0.0, min(deadline - time.monotonic(), _MAX_WAIT_S))))

    def finish(self) -> None:
        """Forget the judge, kill its processes and wait until they end. Keep an idle trusted process."""
        self.begin()
        self._end_busy()
        deadline = time.monotonic() + KILL_SECONDS
        while self.server.alive - {process.number for process in self._processes.values()}:
            if time.monotonic() >= deadline:
                raise LostError("a worker did not respond")
            self._poll(deadline)
            self.server.receive()

    def _end_busy(self) -> None:
        for name, process in [*self._processes.items()]:
            if not (self.server.trusted and process.is_idle):
                self.end(name)

    def end(self, name: str = ANSWER) -> None:
        """End the process with this name, if any."""
        self._outside.pop(name, None)
        if name in self._processes:
            self._processes.pop(name).close()

    def close(self) -> None:
        """End the server, which kills its processes and everything they started, and wait until it ends."""
        for name in [*self._processes]:
            self.end(name)
        self.server.close()


def _encode(content: object) -> bytes:
    return encode(content, REQUEST_DEPTH).encode()


Judge = Callable[[Worker], T]
"""Decides whether a program is correct, using a worker."""


class JudgeRun(Generic[T]):
    """Runs judges, `num_workers` at a time, on workers that it takes from `idle` and puts back.

    Half of `timeout_s` is divided equally among the judges. A judge that needs more than its share runs again after all
    others.
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
        self._lock = threading.Lock()  # guards `_idle` and all attributes below
        self._waiting = deque(range(len(judges)))
        self._used_part: set[int] = set()
        self._tries = [0] * len(judges)
        self._lost_in_a_row = self._failed_starts = self._num_running = 0
        self._results: dict[int, T | Undecided] = {}
        self._errors: list[BaseException] = []

    def run(self) -> list[T | Undecided]:
        """Run all judges, wait for them, and return their decisions in order.

        A judge without a decision yields `JudgeTimeout` if it used up its share before the time limit was reached. It
        yields `Undecided` if the limit came first, or after infrastructure failures. A server's PreloadError or any
        exception in a judge ends the run.
        """
        num_threads = min(self._num_workers, len(self._judges))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        try:
            for thread in threads:
                thread.start()
            _join(threads)
        except BaseException:  # Ctrl-C
            self._end_at = 0.0
            _join(threads)
            raise
        if self._errors:
            raise self._errors[0]
        for index in range(len(self._judges)):
            without = JudgeTimeout if index in self._used_part else Undecided
            self._results.setdefault(index, without(OVER_TIME))
        return [self._results[index] for index in range(len(self._judges))]

    def _is_over(self) -> bool:
        return time.monotonic() >= self._end_at

    def _work(self) -> None:
        """Run judges one by one until none is waiting. An exception in a judge ends the run."""
        try:
            while (index := self._next()) is not None:
                if not self._judge(index):
                    time.sleep(_BETWEEN_STARTS_S)
        except BaseException as error:
            with self._lock:
                self._errors.append(error)
                self._end_at = 0.0

    def _next(self) -> int | None:
        with self._lock:
            if self._is_over() or not self._waiting:
                return None
            self._num_running += 1
            return self._waiting.popleft()

    def _judge(self, index: int) -> bool:
        """Run a judge on a worker, and return false if no worker could start."""
        worker = None
        is_done = False
        try:
            worker = self._take_worker()
            worker.begin(inf if index in self._used_part else self._part_s, self._is_over)
            try:
                decision = self._judges[index](worker)
            except OverPartError:
                if worker.used_part:  # run it again after all others; otherwise the run is over
                    with self._lock:
                        self._lost_in_a_row = 0
                        self._used_part.add(index)
                        self._waiting.append(index)
            else:
                with self._lock:
                    self._lost_in_a_row = 0
                    self._results[index] = decision
            is_done = True
            worker.finish()
            with self._lock:
                self._idle.append(worker)
        except BaseException as error:
            if worker is not None:
                worker.close()
            if not isinstance(error, LostError):
                raise
            if not is_done:
                self._lose(index, str(error), worker is not None)
        finally:
            with self._lock:
                self._num_running -= 1
        return worker is not None

    def _take_worker(self) -> Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = Worker(self._settings)
            with self._lock:
                self._failed_starts = 0
            return worker
        try:
            worker.refresh()
        except LostError:
            worker.close()
            return self._take_worker()
        return worker

    def _lose(self, index: int, reason: str, had_worker: bool) -> None:
        """Requeue a judge unless it has already been tried twice.

        A judge that cannot get a worker waits for the running judges. All waiting judges are abandoned after many
        failures in a row, or after several failed starts while no judge is running.
        """
        with self._lock:
            if had_worker:
                self._tries[index] += 1
                self._lost_in_a_row += 1
            else:
                self._failed_starts += self._num_running == 1
            if self._tries[index] < _TRIES:
                (self._waiting.append if had_worker else self._waiting.appendleft)(index)
            else:
                self._results[index] = Undecided(reason)
            if self._lost_in_a_row >= _MAX_LOST or self._failed_starts >= _MAX_STARTS:
                self._results |= dict.fromkeys(self._waiting, Undecided(reason))
                self._waiting.clear()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads. Short waits keep Ctrl-C working."""
    for thread in threads:
        while thread.is_alive():
            thread.join(_MAX_WAIT_S)
