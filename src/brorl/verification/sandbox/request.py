"""A request to a process: its `Limits`, its `RequestClock`, its `Reply`, and the `Fault`s that can end it.

Nothing here contains the right answer: expected values stay with the judge and never enter a program. Time is wall time
minus the time when other processes used the processor, as counted by the kernel, so an overloaded machine causes no
timeouts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from brorl.verification.sandbox.inside import program

REPLY_BYTES = 1 << 12
"""Output limit for a request whose reply contains no value or a short one; any failure message fits."""


class LostError(Exception):
    """An infrastructure failure, named in the message: something other than the program ended or stopped a process."""


class Fault(StrEnum):
    """The ways a program can end other than by an exception. Each value is a failure message or its beginning.

    `exited` and `killed by signal` are beginnings: `exited with code 3`, `killed by signal 11`.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = program.OUT_OF_MEMORY
    TOO_MUCH_OUTPUT = program.TOO_MUCH_OUTPUT
    TOO_MANY_THREADS = program.TOO_MANY_THREADS
    BROKE_PROTOCOL = "broke the sandbox protocol"
    EXITED = program.EXITED
    KILLED = "killed by signal"


def fault_of(failure: str) -> Fault | None:
    """Return the fault that begins a failure message, even if the program wrote it; None for other failures."""
    return next((fault for fault in Fault if failure == fault or failure.startswith(f"{fault} ")), None)


@dataclass(frozen=True)
class Limits:
    """The limits of one request."""

    # Wall time. Waiting for a core on a busy machine does not count, up to ten times the limit.
    seconds: float = 4.0
    # The program's memory, including in later calls.
    memory_bytes: int = 1 << 29
    # Size of the output or of the encoded return value. Anything longer is not read.
    output_bytes: int = 1 << 20
    # Parts of the encoded return value (see `values.Size`); None for no limit. A value with more is not decoded: each
    # part takes this process up to 10 microseconds.
    output_parts: int | None = None


@dataclass(frozen=True)
class Reply:
    """The result of running a program, loading it, or calling its function."""

    # After a run: the output, decoded as UTF-8 with replacement, even if the program failed. After a call: the returned
    # value, of built-in types. None after loading and after a failed call.
    value: Any
    # A `Fault`, such as `timeout` or `exited with code 3`, or the last line of an uncaught exception. After a call also
    # `exited inside the call` or `did not return a plain value`. None after a normal exit.
    failure: str | None
    # Wall time minus the time when other processes used the core. Includes decoding the value in this process.
    seconds: float


@dataclass(frozen=True)
class Undecided:
    """No decision, because of an infrastructure failure: the response is unverified."""

    reason: str  # for example `a worker was lost`


class JudgeTimeout(Undecided):
    """No decision, because the judge's programs used up their share of the batch time limit: a timeout."""


MAX_STRETCH = 10  # on an overloaded machine a call may take ten times its wall-time limit
_CLOCK_OF_PROCESS = 2  # the CPU-time clock of all threads, including ended ones: MAKE_PROCESS_CPUCLOCK


class RequestClock:
    """Counts the seconds that a process's current request has used.

    That is the request's wall time, minus the time when other processes used the processor, plus the processor time
    that the process's threads used between the last reply and this request. Sleeping counts, as does waiting for a
    different thread of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s = 0.0  # the request's time before the process last resumed
        self._runs = False
        self._cpu_s = _cpu_s(pid)  # the process's CPU time as of its last reply
        self.restart()

    def restart(self) -> None:
        """Begin a new request."""
        self._before_s = 0.0
        self.resume()

    def pause(self) -> None:
        """Stop counting wall time: the process has replied."""
        self._before_s = self.used_s()
        self._runs = False
        self._cpu_s = _cpu_s(self._pid)

    def resume(self) -> None:
        """Count wall time again, and add the processor time that the process's threads used in the meantime."""
        if not self._runs:
            self._before_s += max(0.0, _cpu_s(self._pid) - self._cpu_s)
        self._runs = True
        self._began = time.monotonic()
        self._count_before = denied_s(self._pid)
        self._denied_s = 0.0

    def used_s(self) -> float:
        """Return the current request's time."""
        if not self._runs:
            return self._before_s
        self.notice(denied_s(self._pid))
        return self._before_s + max(0.0, time.monotonic() - self._began - self._denied_s)

    def notice(self, count: float | None) -> None:
        """Take a `denied_s` count into account, such as the server's last one before the process ended."""
        if count is not None and self._count_before is not None:
            self._denied_s = max(self._denied_s, count - self._count_before)

    def time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) the request will have used this many seconds, if it keeps its processor."""
        return self._began + self._denied_s + seconds - self._before_s

    def last_time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) a request with this limit must end, however busy the machine is."""
        return self._began + MAX_STRETCH * (seconds - self._before_s)


def denied_s(pid: int) -> float | None:
    """Return a count, in seconds, that grows while a thread of the process is ready to run but others use its core.

    However many threads the process has, the difference between two counts never exceeds the time lost this way: while
    a thread waits for a sibling, the process's processor time grows as much as the waiting time. None if the process
    has been reaped, or if the system does not report it.
    """
    counts = [ran + waited for ran, waited in _threads(pid)]
    with contextlib.suppress(OSError):
        return max(counts) - _clock(pid) if counts else None
    return None


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process; 0 if it has been reaped, or if the system does not report it."""
    with contextlib.suppress(OSError):
        return _clock(pid)
    return 0.0


def _clock(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | _CLOCK_OF_PROCESS)


def _threads(pid: int) -> Iterator[tuple[float, float]]:
    """Yield, for each thread of a process, the seconds it ran and the seconds it waited for a processor."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # the thread has just ended
                ran, waited = (thread / "schedstat").read_text("ascii").split()[:2]
                yield int(ran) / 1e9, int(waited) / 1e9
