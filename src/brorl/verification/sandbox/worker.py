"""A worker: one fork server with the processes that a judge uses, trusted or confined.

A judge is a function of a worker: it has programs run, gets their replies, and returns its decision. Programs run in
the worker's processes; expected values stay with the judge and never enter a program.

    def judge(source: str, cases: Sequence[Case], worker: Worker) -> int:
        for number, case in enumerate(cases):
            reply = worker.run(source, case.stdin, Limits())
            if reply.failure or reply.value != case.stdout:
                return number
        return len(cases)
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Mapping
from math import ceil, inf

from brorl.verification.sandbox.inside import frames
from brorl.verification.sandbox.process import KILL_SECONDS, OutsideCall, Process
from brorl.verification.sandbox.replies import Limits, LostError, Reply
from brorl.verification.sandbox.server import Server, ServerSettings
from brorl.verification.sandbox.values import REQUEST_DEPTH, encode

ANSWER = "answer"  # the process of a request that names none
_RUN = ""  # the name of a whole program's process
_LONGEST_WAIT_S = 0.25  # until a thread notices that the run is over


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
                process.give(_encode(self._answered(name, reply)))
                continue
            self.used_part = time.monotonic() >= process.time_of(self._left_s) and self._left_s <= process.used_s()
            if self.used_part or self._is_over():
                raise OverPartError
            self._poll(min(process.deadline, process.time_of(self._left_s)), process)

    def _answered(self, name: str, call: OutsideCall) -> tuple[object, str | None]:
        """Return the value of an outside function, or the text of its exception."""
        try:
            return self._outside[name][call.function](*call.arguments), None
        except OutsideError as error:
            return None, str(error)

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
