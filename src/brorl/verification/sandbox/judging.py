"""The loop that runs judges: one per worker at once, each with its processes on one fork server.

A judge runs once more if an infrastructure failure ended one of its processes. The loop has no threads.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Generic

from brorl.verification.sandbox.process import KILL_SECONDS, IdleLossError, Process
from brorl.verification.sandbox.requests import (
    Judge,
    JudgeTimeout,
    LoadFunction,
    LoadProgram,
    LostError,
    OutsideCall,
    Reply,
    Request,
    RunProgram,
    T,
    Undecided,
)
from brorl.verification.sandbox.server import Server, ServerSettings

OVER_TIME = "the time of all programs was over (raise verification.batch_timeout_s)"
_LONGEST_WAIT_S = 1.0
_TRIES = 2  # of a judge that infrastructure failures end
_MAX_LOST = 16  # infrastructure failures in a row, before all judges that wait are given up
_MAX_STARTS = 3  # servers in a row that cannot start, while none runs
_BETWEEN_STARTS_S = 0.5
_RUN = ""  # the name of a whole program's process
_FUNCTIONS = "answer"  # of a trusted worker's process


class JudgeSession(Generic[T]):
    """One run of a judge on one server, until it decides or its processes have used `part_s` seconds.

    Attributes:
        process: The process whose reply the judge waits for.
        decisions: The judge's decision, as the only element, once there is one.
        ready_at: Since when (monotonic clock) something for it is known to have arrived; infinity if nothing has.
    """

    def __init__(self, number: int, make_judge: Callable[[], Judge[T]], server: Server, part_s: float) -> None:
        self.number = number
        self.server = server
        self.process: Process | None = None
        self.decisions: list[T] = []
        self.ready_at = inf
        self._judge = make_judge()
        self._started = False
        self._closed_at: float | None = None
        self._left_s = part_s

    @property
    def deadline(self) -> float:
        """Time (monotonic clock) at which `advance` has something to do in any case."""
        if self._closed_at is not None:
            return self._closed_at + KILL_SECONDS if self._ending else 0.0
        return 0.0 if self.process is None else min(self.process.deadline, self.process.time_of(self._left_s))

    @property
    def _ending(self) -> set[int]:
        """The processes that were killed and have not ended."""
        return self.server.alive - {process.number for process in self.server.processes.values()}

    @property
    def is_over(self) -> bool:
        """Whether the judge has decided or used its part, and all its processes have ended."""
        return self._closed_at is not None and not self._ending

    @property
    def used_part(self) -> bool:
        """Whether its processes have used their time."""
        return self._left_s <= (self.process.used_s() if self.process else 0.0)

    def advance(self) -> None:
        """Continue as far as possible without waiting; an infrastructure failure is a LostError."""
        if not self._started:
            self._started = True
            self._pass(None)
        late_s, self.ready_at = max(0.0, time.monotonic() - self.ready_at), inf
        while self.process is not None and (reply := self.process.advance(late_s)) is not None:
            late_s = 0.0
            self._left_s -= reply.seconds if isinstance(reply, Reply) else 0.0
            self._pass(reply)
        waiting = self.process
        if waiting is not None and time.monotonic() >= waiting.time_of(self._left_s) and self.used_part:
            self._left_s = 0.0
            self.close()
        if self._closed_at is not None and self._ending and time.monotonic() >= self.deadline:
            raise LostError("a worker did not respond")

    def _pass(self, reply: Reply | OutsideCall | None) -> None:
        """Pass a reply to the judge, and its next request to a process."""
        self.process = None
        try:
            request = next(self._judge) if reply is None else self._judge.send(reply)
        except StopIteration as stop:
            self.decisions.append(stop.value)
            self.close()
        else:
            self.process = self._serve(request)

    def _serve(self, request: Request) -> Process:
        """Send a request, and return the process that will reply."""
        processes = self.server.processes
        name = _RUN if isinstance(request, RunProgram) else getattr(request, "name", _FUNCTIONS)
        if isinstance(request, RunProgram | LoadProgram | LoadFunction):
            if isinstance(request, LoadFunction) and name in processes and processes[name].is_idle:
                processes[name].request(request)
            else:
                self._end(name)
                processes[name] = Process(self.server, request)
        elif name in processes:
            processes[name].request(request)
        else:
            raise ValueError(f"no program was loaded as {name!r}; request LoadProgram first")
        return processes[name]

    def _end(self, name: str) -> None:
        if name in self.server.processes:
            self.server.processes.pop(name).close()

    def close(self) -> None:
        """End the judge and kill its processes; a trusted worker stays."""
        self.process = None
        self._closed_at = time.monotonic()
        self._judge.close()
        for name, process in [*self.server.processes.items()]:
            if not (self.server.trusted and process.is_idle):
                self._end(name)


class JudgeLoop(Generic[T]):
    """Runs judges, `num_workers` at once, on servers that it takes from `idle` and returns.

    In the time `timeout_s` of all judges, each gets an equal part of half of it first, in its turn. Those that need
    more run again after all others.
    """

    def __init__(
        self,
        judges: Sequence[Callable[[], Judge[T]]],
        settings: ServerSettings,
        idle: list[Server],
        num_workers: int,
        timeout_s: float = inf,
    ) -> None:
        self._judges = judges
        self._settings = settings
        self._idle = idle
        self._num_workers = num_workers
        self._waiting = deque(range(len(judges)))
        self._used_part: set[int] = set()
        self._part_s = timeout_s * num_workers / (2 * max(len(judges), 1))
        self._end_at = time.monotonic() + timeout_s
        self._tries = [0] * len(judges)
        self._lost_in_a_row = self._failed_starts = 0
        self._sessions: list[JudgeSession[T]] = []
        self._results: dict[int, T | Undecided] = {}

    def run(self) -> list[T | Undecided]:
        """Run all judges and wait for them; return the decision of each, in order.

        It is `JudgeTimeout` if the judge used its part and the time was over before it could decide; `Undecided` if the
        time was over before that, or after infrastructure failures.

        Raises:
            PreloadError: If a server cannot be set up.
            Exception: Any exception of a judge.
        """
        try:
            while (self._waiting or self._sessions) and time.monotonic() < self._end_at:
                while self._waiting and len(self._sessions) < self._num_workers and self._begin():
                    pass
                session = self._wait()
                if session is not None:
                    self._advance(session)
            for session in self._sessions:
                if session.decisions:
                    self._results[session.number] = session.decisions[0]
                elif session.used_part:
                    self._used_part.add(session.number)
        finally:
            for session in self._sessions:  # the time is over, or an interrupt, or an exception of a judge
                session.close()
                session.server.close()
        for number in range(len(self._judges)):
            without = JudgeTimeout if number in self._used_part else Undecided
            self._results.setdefault(number, without(OVER_TIME))
        return [self._results[number] for number in range(len(self._judges))]

    def _begin(self) -> bool:
        """Begin the next judge; return whether another one can begin too."""
        try:
            server = self._take_server()
        except LostError as error:
            if self._sessions:  # it waits for one of their servers
                return False
            self._failed_starts += 1
            if self._failed_starts < _MAX_STARTS:
                time.sleep(_BETWEEN_STARTS_S)
            else:
                self._give_up(str(error))
            return True
        self._failed_starts = 0
        number = self._waiting.popleft()
        part_s = inf if number in self._used_part else self._part_s
        self._sessions.append(JudgeSession(number, self._judges[number], server, part_s))
        return True

    def _take_server(self) -> Server:
        while self._idle:
            server = self._idle.pop()
            try:
                server.receive()
            except LostError:
                server.close()
                continue
            for name, process in [*server.processes.items()]:
                if not process.is_idle:
                    server.processes.pop(name).close()
            server.forget_endings()
            return server
        return Server(self._settings)

    def _lose(self, number: int, reason: str) -> None:
        """Run a judge once more, unless that was the second time; give up all if none has succeeded for long."""
        self._tries[number] += 1
        self._lost_in_a_row += 1
        if self._tries[number] < _TRIES:
            self._waiting.append(number)
        else:
            self._results[number] = Undecided(reason)
        if self._lost_in_a_row >= _MAX_LOST:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        while self._waiting:
            self._results[self._waiting.popleft()] = Undecided(reason)

    def _wait(self) -> JudgeSession[T] | None:
        """Wait until a session can continue, and return the one that could do so first."""
        session_of: dict[int, JudgeSession[T]] = {}
        poller = select.poll()
        for session in self._sessions:
            process = session.process
            for descriptor in (session.server.control.fileno(), *(process.readable if process else ())):
                poller.register(descriptor, select.POLLIN)
                session_of[descriptor] = session
            for descriptor in process.writable if process else ():
                poller.register(descriptor, select.POLLOUT)
                session_of[descriptor] = session
        # Python handles a signal that comes just before the wait only after it: short waits keep Ctrl-C working.
        deadline = min((min(session.deadline, session.ready_at) for session in self._sessions), default=0.0)
        deadline = min(deadline, self._end_at)
        wait_s = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT_S))
        arrived = [session_of[descriptor] for descriptor, _ in poller.poll(ceil(wait_s * 1000))]
        now = time.monotonic()
        for session in arrived:
            session.ready_at = min(session.ready_at, now)
        first = min(self._sessions, key=lambda session: min(session.deadline, session.ready_at), default=None)
        return first if first is not None and min(first.deadline, first.ready_at) <= now else None

    def _advance(self, session: JudgeSession[T]) -> None:
        try:
            session.server.receive()
            session.advance()
        except LostError as error:
            session.close()
            session.server.close()
            self._sessions.remove(session)
            if isinstance(error, IdleLossError):
                self._waiting.appendleft(session.number)
            else:
                self._lose(session.number, str(error))
        else:
            if session.is_over:
                self._sessions.remove(session)
                self._idle.append(session.server)
                self._lost_in_a_row = 0
                if session.decisions:
                    self._results[session.number] = session.decisions[0]
                else:
                    self._used_part.add(session.number)
                    self._waiting.append(session.number)
