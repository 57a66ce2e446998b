"""Workers, each one fork server with the processes that a judge uses, and the run of many judges on them.

A judge is a function of a worker: it has programs run, gets their replies, and returns its decision. Expected values
stay with the judge and never enter a program.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import Generic, TypeVar

from brorl.verification.sandbox.inside import frames
from brorl.verification.sandbox.process import KILL_SECONDS, IdleLossError, Process
from brorl.verification.sandbox.replies import JudgeTimeout, Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.server import Server, ServerSettings
from brorl.verification.sandbox.values import REQUEST_DEPTH, encode

T = TypeVar("T")

ANSWER = "answer"  # the process of a request that names none
_RUN = ""  # the name of a whole program's process
_LONGEST_WAIT_S = 0.25  # until a thread notices that the run is over, or Ctrl-C
OVER_TIME = "the time of all programs was over (raise verification.batch_timeout_s)"
_TRIES = 2  # of a judge that infrastructure failures end
_MAX_LOST = 16  # infrastructure failures in a row, before all judges that wait are given up
_MAX_STARTS = 3  # workers in a row that cannot start, while none runs
_BETWEEN_STARTS_S = 0.5


class OutsideError(Exception):
    """An outside function raises this: its message becomes the text of the program's exception."""


class OverPartError(Exception):
    """The processes of a judge have used their part of the time of a batch, or all of it is over."""


class Worker:
    """One fork server and its processes in use.

    Args:
        settings: What the server is started with.

    Attributes:
        server: The server.
        used_part: Whether the processes of the judge have used their part of the time of a batch.

    Raises:
        LostError: If the server cannot be started; from all methods, if an infrastructure failure ended a process.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.server = Server(settings)
        self._processes: dict[str, Process] = {}  # by name; a trusted one stays between two judges
        self._outside: dict[str, Mapping[str, Callable[..., object]]] = {}  # functions by the process that calls them
        self.begin()

    def begin(self, part_s: float = inf, is_over: Callable[[], bool] = lambda: False) -> None:
        """Set what the processes of the next judge may use: some seconds, until the run is over."""
        self.used_part, self._left_s, self._is_over = False, part_s, is_over

    def refresh(self) -> None:
        """Make ready for another judge after an idle time."""
        self.server.receive()
        self._end_busy()
        self.server.forget_endings()

    def run(self, source: str, stdin: str, limits: Limits) -> Reply:
        """Run a whole program on some input, in a new process. The value of the reply is its output."""
        self._end(_RUN)
        process = self._processes[_RUN] = Process(self.server, limits, stdin)
        process.ask(frames.RUN, source.encode("utf-8", "surrogatepass"), limits)
        return self._wait(_RUN)

    def load(
        self,
        source: str,
        limits: Limits,
        name: str = ANSWER,
        outside: Mapping[str, Callable[..., object]] | None = None,
    ) -> Reply:
        """Start a process that executes the source as a module and stays, for calls.

        Args:
            source: The source code.
            limits: Limits of loading; the memory limit also holds for later calls.
            name: Name of the process within this judge.
            outside: Functions of this process that the module finds defined. They get values of builtin types, and
                return one or raise an `OutsideError`; any other exception ends the judge.
        """
        self._end(name)
        self._outside[name] = outside or {}
        process = self._processes[name] = Process(self.server, limits, outside=self._outside[name].keys())
        process.ask(frames.LOAD, _encode((source, tuple(self._outside[name]))), limits)
        return self._wait(name)

    def load_function(self, function: str, limits: Limits) -> Reply:
        """Import `package.module:function` or `path/to/file.py:function` in a trusted process, unless it has done so.

        Args:
            function: The function; call it by this path.
            limits: Limits of loading; the memory limit is that of the process.
        """
        if ANSWER not in self._processes or not self._processes[ANSWER].is_idle:
            self._end(ANSWER)
            self._processes[ANSWER] = Process(self.server, limits)
        self._processes[ANSWER].ask(frames.LOAD, json.dumps((function, None)).encode(), limits)
        return self._wait(ANSWER)

    def call(self, function: str, arguments: tuple[object, ...] | None, limits: Limits, name: str = ANSWER) -> Reply:
        """Call a function of a loaded program.

        Args:
            function: Name in the module; `Solution.method` calls the method of a new `Solution()`. In a trusted
                process, the path of the function.
            arguments: Positional arguments of builtin types, as `values` encodes them. In a trusted process, JSON
                values; None returns the least and greatest number of arguments that the function takes.
            limits: Limits of the call.
            name: Name of the process.

        Raises:
            ValueError: If no program was loaded in this process.
        """
        if name not in self._processes:
            raise ValueError(f"no program was loaded as {name!r}; load one first")
        trusted = self.server.trusted
        body = json.dumps((function, arguments)).encode() if trusted else b""
        body = body or _encode((function, arguments, limits.output_bytes))
        self._processes[name].ask(frames.CALL, body, limits)
        return self._wait(name)

    def _wait(self, name: str) -> Reply:
        """Wait for the reply of a process, and answer its calls of outside functions."""
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
        """Wait until something arrives, until there is something to do in any case, or for a short time.

        Python handles a signal that comes just before the wait only after it: short waits keep Ctrl-C working.
        """
        poller = select.poll()
        for descriptor in (self.server.control.fileno(), *(process.readable if process else ())):
            poller.register(descriptor, select.POLLIN)
        for descriptor in process.writable if process else ():
            poller.register(descriptor, select.POLLOUT)
        poller.poll(ceil(1000 * max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT_S))))

    def finish(self) -> None:
        """Forget the judge, kill its processes and wait for their end; an idle trusted one stays."""
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
                self._end(name)

    def _end(self, name: str) -> None:
        self._outside.pop(name, None)
        if name in self._processes:
            self._processes.pop(name).close()

    def close(self) -> None:
        """End the server, which kills all its processes and what they have started, and wait for its end."""
        for name in [*self._processes]:
            self._end(name)
        self.server.close()


def _encode(content: object) -> bytes:
    return encode(content, REQUEST_DEPTH).encode()


Judge = Callable[[Worker], T]
"""Decides whether a program is correct, with the help of a worker."""


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
            thread.join(_LONGEST_WAIT_S)
