"""This process's side of a fork server: it starts and kills sandboxed processes, and receives reports of their ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import brorl
from brorl.verification.sandbox.lifeline import Lifeline

_ROOT = str(Path(brorl.__file__).parents[1])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from brorl.verification.sandbox.inside.fork_server import main; main()"
)
# -s -P and an empty environment are what -I does, except that the order of sets is the same in every process.
_FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class LostError(Exception):
    """The machine, not the program, ended something; the message names it."""


class PreloadError(Exception):
    """The fork server cannot import a module, or cannot prepare the confinement."""


@dataclass(frozen=True)
class ServerSettings:
    """What a fork server is started with.

    Attributes:
        level: Level of confinement, one of `inside.confinement`.
        preload: Modules that it imports before it starts processes.
        packages: The path for imports, for installed packages; empty for the standard library alone.
    """

    level: str
    preload: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        status: As `os.wait` returns it.
        cpu_seconds: CPU time.
        denied_seconds: Its last `denied_s`.
        memory_bytes: Greatest resident memory.
        too_many_threads: Whether the server killed it for its threads.
    """

    status: int
    cpu_seconds: float
    denied_seconds: float | None
    memory_bytes: int
    too_many_threads: bool


class Server:
    """One fork server.

    Args:
        settings: What it is started with.

    Attributes:
        control: Socket on which its reports arrive.
        core: The one core of its processes; None where the system cannot bind them.
        alive: Numbers of the processes that have not ended.
        endings: How the others ended, until `take_ending`.

    Raises:
        LostError: If the process cannot be started.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.alive: set[int] = set()
        self._endings: dict[int, Ending | LostError] = {}
        self._count = 0
        self.core = _free_core()
        try:
            self._lifeline = Lifeline()
        except OSError as error:
            raise LostError(f"a process could not be started: {error}") from None
        try:
            self.control, theirs = socket.socketpair(socket.AF_UNIX, _KIND)
        except OSError as error:
            self._lifeline.close_child_end()
            self._lifeline.cut()
            raise LostError(f"a process could not be started: {error}") from None
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _BOOT, _ROOT, json.dumps(asdict(settings))],
                stdin=self._lifeline.child_end,
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._lifeline.cut()
            self.control.close()
            raise LostError(f"a process could not be started: {error}") from None
        finally:
            theirs.close()
            self._lifeline.close_child_end()
        _OPEN.add(self)

    def start(self, memory_bytes: int, cpu_seconds: int, descriptors: Sequence[int]) -> int:
        """Start a process and return its number.

        Args:
            memory_bytes: Memory that it can use.
            cpu_seconds: CPU time after which the kernel kills it.
            descriptors: Its descriptors for requests and replies, and for standard input and output or neither.

        Raises:
            LostError: If the server has ended.
        """
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
            self.receive()  # it may have named a reason
            raise LostError("a worker was lost") from None
        self.alive.add(self._count)
        return self._count

    def kill(self, number: int) -> None:
        """Kill a process; a report of its end follows."""
        if number in self.alive:
            with contextlib.suppress(OSError):
                self.control.send(json.dumps({"kill": number}).encode())

    def receive(self) -> None:
        """Read the reports that have arrived.

        Raises:
            LostError: If the server has ended.
            PreloadError: If it could not be set up.
        """
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
                names = (field.name for field in fields(Ending))
                self._endings[number] = Ending(**{name: report[name] for name in names})

    def forget_endings(self) -> None:
        """Drop the reports about processes that nobody waits for."""
        self._endings.clear()

    def take_ending(self, number: int) -> Ending | None:
        """Return how a process ended; None while it runs.

        Raises:
            LostError: If it never started.
        """
        ending = self._endings.pop(number, None)
        if isinstance(ending, LostError):
            raise ending
        return ending

    @property
    def usable(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the server, which ends all its processes, and wait for its end."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._lifeline.cut()
        self.control.close()
        self._process.wait()
        _OPEN.discard(self)


_OPEN: weakref.WeakSet[Server] = weakref.WeakSet()
"""The servers of this process that were not closed."""


def _free_core() -> int | None:
    """Return the core of this process that the fewest servers have; processes of one machine begin at different ones.

    A program has one core, so that its threads take no time from programs of other workers.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    taken = Counter(server.core for server in _OPEN)
    first = os.getpid() % len(cores)
    return min(cores[first:] + cores[:first], key=lambda core: taken[core])
