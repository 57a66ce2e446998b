"""The parent's side of a fork server, which starts and kills processes, and reports how they ended.

A server ends when this process does, because the pipe between them, the lifeline, closes. Each server has its own
lifeline, because the kernel signals only one process group per pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import brorl
from brorl.verification.sandbox.inside.confinement import TRUSTED, UNSAFE
from brorl.verification.sandbox.request import LostError

_ROOT = str(Path(brorl.__file__).parents[1])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from brorl.verification.sandbox.inside.fork_server import main; main()"
)
# `-s -P` and an empty environment work like `-I`, but with `-I` the order of sets could differ between processes.
_FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")
_TRUSTED_FLAGS = ("-s", "-P")
# One thread per library, and the same set order in every process of every run: SymPy's results depend on it.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
_CLOSE_S = 10.0  # a server that has not killed its processes and ended within this time is killed
_LIFELINES: set[int] = set()  # write ends held by this process


class PreloadError(Exception):
    """The fork server cannot import a module, or cannot prepare the confinement."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings for starting a fork server."""

    level: str  # LANDLOCK, SECCOMP, UNSAFE or TRUSTED from `inside.confinement`
    preload: tuple[str, ...] = ()  # modules to import before any process starts
    packages: tuple[str, ...] = ()  # `sys.path` for installed packages; empty for the standard library alone


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended: `status` is from `os.wait`, `denied_seconds` is the last value of `denied_s`.

    `stopped_for` is the fault for which the server killed it, as text; None if the server did not kill it.
    """

    status: int
    cpu_seconds: float
    denied_seconds: float | None
    memory_bytes: int
    stopped_for: str | None


class Server:
    """One fork server. Raises a LostError if it cannot be started.

    Attributes:
        control: Socket on which the server's reports arrive.
        trusted: Whether the processes call the user's functions, without confinement.
        confined: Whether the processes are unable to signal any process, even themselves.
        core: The core that its processes share; None for all cores of this process.
        alive: Numbers of the processes that have not ended.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.alive: set[int] = set()
        self._endings: dict[int, ProcessEnd | LostError] = {}
        self._count = 0
        self._running = 0  # number of the last process given a request; all others are paused
        self.trusted = settings.level == TRUSTED
        self.confined = settings.level not in (TRUSTED, UNSAFE)
        with _CHOOSING:
            self.core = None if self.trusted else _free_core()
            _OPEN.add(self)
        try:
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._forget)
                self._start_process(settings, on_failure)
                on_failure.pop_all()
        except OSError as error:
            raise LostError(f"a process could not be started: {error}") from None

    def _start_process(self, settings: ServerSettings, on_failure: contextlib.ExitStack) -> None:
        lifeline, self._lifeline = os.pipe()
        _LIFELINES.add(self._lifeline)
        on_failure.callback(self._cut_lifeline)
        with contextlib.ExitStack() as theirs:
            theirs.callback(os.close, lifeline)
            self.control, socket_of_server = socket.socketpair(socket.AF_UNIX, _KIND)
            on_failure.callback(self.control.close)
            theirs.callback(socket_of_server.close)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *(_TRUSTED_FLAGS if self.trusted else _FLAGS)),
                    *("-c", _BOOT, _ROOT, json.dumps(asdict(settings))),
                ],
                stdin=lifeline,
                stdout=socket_of_server.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT} if self.trusted else {**_ENVIRONMENT, "MALLOC_ARENA_MAX": "1"},
                cwd=None if self.trusted else "/",
                start_new_session=True,  # Ctrl-C does not reach it
            )

    def start(self, memory_bytes: int, cpu_seconds: int, descriptors: Sequence[int]) -> int:
        """Start a process with descriptors for requests, replies and standard streams, and return its number."""
        self._count += 1
        message = {
            "start": self._count,
            "memory_bytes": memory_bytes,
            "cpu_seconds": cpu_seconds,
            "core": self.core,
        }
        try:
            socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)
        except OSError:
            self.receive()  # raises the reason if the server reported one
            raise LostError("a worker was lost") from None
        self.alive.add(self._count)
        self._running = self._count
        return self._count

    def wake(self, number: int) -> None:
        """Let one process run and pause all others, so an answer cannot take processor time from its test code."""
        if number != self._running:
            self._running = number
            self._tell("wake", number)

    def kill(self, number: int) -> None:
        """Kill a process. The server then reports its end."""
        if number in self.alive:
            self._tell("kill", number)

    def _tell(self, what: str, number: int) -> None:
        with contextlib.suppress(OSError):  # `receive` reports that the server has ended
            self.control.send(json.dumps({what: number}).encode())

    def receive(self) -> None:
        """Read the reports that have arrived; LostError if the server has ended, PreloadError if it failed to start."""
        while True:
            try:
                data = self.control.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise LostError("a worker was lost")
            report = json.loads(data)
            if "failed" in report:
                raise PreloadError(report["failed"])
            number = report.get("ended") or report["unstarted"]
            self.alive.discard(number)
            if "unstarted" in report:
                self._endings[number] = LostError(f"a process could not be started: {report['why']}")
            else:
                self._endings[number] = ProcessEnd(**{field.name: report[field.name] for field in fields(ProcessEnd)})

    def forget_endings(self) -> None:
        """Drop reports about processes that nobody is waiting for."""
        self._endings.clear()

    def take_ending(self, number: int) -> ProcessEnd | None:
        """Return how a process ended; None while it is running. Raises a LostError if it never started."""
        ending = self._endings.pop(number, None)
        if isinstance(ending, LostError):
            raise ending
        return ending

    def _cut_lifeline(self) -> None:
        if self._lifeline in _LIFELINES:
            _LIFELINES.discard(self._lifeline)
            os.close(self._lifeline)

    def close(self) -> None:
        """End the server, which kills its processes and everything they started, and wait until it ends."""
        self._cut_lifeline()
        self.control.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._forget()

    def _forget(self) -> None:
        with _CHOOSING:
            _OPEN.discard(self)


_OPEN: weakref.WeakSet[Server] = weakref.WeakSet()
"""The servers that this process has not closed."""
_CHOOSING = threading.Lock()  # held while choosing a core


def _free_core() -> int | None:
    """Return the core with the fewest servers. Pinned to one core, a program cannot slow workers on other cores."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    taken = Counter(server.core for server in _OPEN)
    first = os.getpid() % len(cores)
    return min(cores[first:] + cores[:first], key=lambda core: taken[core])


def _close_lifelines() -> None:
    """Close the lifelines that a forked child inherits: they would keep workers alive after the trainer ends."""
    while _LIFELINES:
        with contextlib.suppress(OSError):
            os.close(_LIFELINES.pop())


os.register_at_fork(after_in_child=_close_lifelines)
