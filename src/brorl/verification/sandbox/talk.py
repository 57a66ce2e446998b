"""A judge with the programs that it tests: requests of the judge go to the programs, their replies to the judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Generic

from brorl.verification.sandbox.conversation import (
    CallFunction,
    Ended,
    GiveValue,
    Judge,
    LoadProgram,
    Reply,
    Request,
    Returned,
    RunProgram,
    T,
)
from brorl.verification.sandbox.process import KILL_SECONDS, Process
from brorl.verification.sandbox.server import LostError, Server

_RUN = ""  # the name of a whole program's process


class Talk(Generic[T]):
    """One run of a judge on one server.

    Args:
        number: Index of the judge.
        make_judge: Makes the judge.
        server: Starts its programs.
        part_s: Time of its programs in seconds, as `Process.used_s` counts it, after which it ends without a decision.

    Attributes:
        number: Index of the judge.
        server: The server.
        decisions: The judge's decision, as the only element, once there is one.
        ready_at: Since when (monotonic clock) something for it is known to have arrived; infinity if nothing has.
    """

    def __init__(self, number: int, make_judge: Callable[[], Judge[T]], server: Server, part_s: float) -> None:
        self.number = number
        self.server = server
        self.decisions: list[T] = []
        self.ready_at = inf
        self._judge = make_judge()
        self._processes: dict[str, Process] = {}
        self._waiting: Process | None = None
        self._started = False
        self._closed: float | None = None
        self._left_s = part_s

    @property
    def process(self) -> Process | None:
        """The process whose reply the judge waits for."""
        return self._waiting

    @property
    def deadline(self) -> float:
        """Time (monotonic clock) at which `advance` has something to do in any case."""
        if self._closed is not None:
            return self._closed + KILL_SECONDS
        return 0.0 if self._waiting is None else min(self._waiting.deadline, self._waiting.time_of(self._left_s))

    @property
    def over(self) -> bool:
        """Whether the judge has decided or used its part, and all programs have ended."""
        return self._closed is not None and not self.server.alive

    def advance(self) -> None:
        """Continue as far as possible without waiting.

        Raises:
            LostError: If the machine ended a program.
            Exception: Any exception of the judge.
        """
        if not self._started:
            self._started = True
            self._pass(None)
        late_s, self.ready_at = max(0.0, time.monotonic() - self.ready_at), inf
        while self._waiting is not None and (reply := self._waiting.advance(late_s)) is not None:
            late_s = 0.0
            self._left_s -= reply.seconds if isinstance(reply, Ended | Returned) else 0.0
            self._pass(reply)
        waiting = self._waiting
        if waiting is not None and time.monotonic() >= waiting.time_of(self._left_s) and self.used_part:
            self._left_s = 0.0
            self.close()
        if self._closed is not None and self.server.alive and time.monotonic() >= self.deadline:
            raise LostError("a worker did not respond")

    @property
    def used_part(self) -> bool:
        """Whether its programs have used their time."""
        return self._left_s <= (self._waiting.used_s() if self._waiting else 0.0)

    def _pass(self, reply: Reply | None) -> None:
        """Pass a reply to the judge, and its next request to a program."""
        self._waiting = None
        try:
            request = next(self._judge) if reply is None else self._judge.send(reply)
        except StopIteration as stop:
            self.decisions.append(stop.value)
            self.close()
        else:
            self._waiting = self._serve(request)

    def _serve(self, request: Request) -> Process:
        """Send a request, and return the process that will reply."""
        match request:
            case RunProgram() | LoadProgram():
                name = request.name if isinstance(request, LoadProgram) else _RUN
                self._end(name)
                self._processes[name] = Process(self.server, request)
            case CallFunction() | GiveValue():
                name = request.name
                if name not in self._processes:
                    raise ValueError(f"no program was loaded as {name!r}; request LoadProgram first")
                self._processes[name].request(request)
        return self._processes[name]

    def _end(self, name: str) -> None:
        if name in self._processes:
            self._processes.pop(name).close()

    def close(self) -> None:
        """End the judge and kill its programs."""
        self._waiting = None
        self._closed = time.monotonic()
        self._judge.close()
        for name in [*self._processes]:
            self._end(name)
