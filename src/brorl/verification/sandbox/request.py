"""A request to a process: its `Limits`, its `RequestClock`, its `Reply`, and the `Fault`s that can end it.

Nothing here knows the right answer: expected values stay with the judge, and never enter a program. Time is wall time
minus the time when others used the processor, as counted by the kernel: an overloaded machine causes no timeouts.
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
"""Output limit of a request whose reply contains no value or a short one; any failure fits in it."""


class LostError(Exception):
    """An infrastructure failure: something other than the program ended or stopped it. The message names it."""


class Fault(StrEnum):
    """The ways a program can end other than by an exception. A value is a failure's text, or how the text begins.

    `exited` and `killed by signal` begin a text: `exited with code 3`, `killed by signal 11`.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = program.OUT_OF_MEMORY
    TOO_MUCH_OUTPUT = program.TOO_MUCH_OUTPUT
    TOO_MANY_THREADS = program.TOO_MANY_THREADS
    BROKE_PROTOCOL = "broke the sandbox protocol"
    EXITED = program.EXITED
    KILLED = "killed by signal"


def fault_of(failure: str) -> Fault | None:
    """Return the fault that a failure begins with, even if the program wrote that text; None for other failures."""
    return next((fault for fault in Fault if failure == fault or failure.startswith(f"{fault} ")), None)


@dataclass(frozen=True)
class Limits:
    """The limits of one request."""

    # Wall time. Waiting for a core on a busy machine does not count, up to ten times the limit.
    seconds: float = 4.0
    # The program's memory, in later calls too.
    memory_bytes: int = 1 << 29
    # Size of the output or of a returned value's text. Longer text is not read.
    output_bytes: int = 1 << 20
    # Parts of a returned value's text (see `values.Size`); None for no limit. A text with more is not decoded, because
    # each part takes this process up to 10 microseconds.
    output_parts: int | None = None


@dataclass(frozen=True)
class Reply:
    """The result of running a program, loading it, or calling its function."""

    # After a run: the output, decoded as UTF-8 with replacement, even if the program failed. After a call: the returned
    # value, of builtin types. None after loading and after a failed call.
    value: Any
    # A `Fault`, such as `timeout` or `exited with code 3`, or the last line of an uncaught exception. After a call also
    # `exited inside the call` or `did not return a plain value`. None after a normal end.
    failure: str | None
    # Wall time minus the time when others used the core. It includes the time to read the value in this process.
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

    They are the request's wall time minus the time when others used the processor, plus the processor time that the
    process's threads used since the last reply. Sleeping counts, and so does waiting for another thread of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s = 0.0  # the request's time before the process last resumed
        self._runs = False
        self._cpu_s = _cpu_s(pid)  # the process's processor time at its last reply
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
        """Use the `denied_s` count that the server read just before the process ended."""
        if count is not None and self._count_before is not None:
            self._denied_s = max(self._denied_s, count - self._count_before)

    def time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) the request will have used this many seconds, if it keeps its processor."""
        return self._began + self._denied_s + seconds - self._before_s

    def last_time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) a request with this limit must end, however busy the machine is."""
        return self._began + MAX_STRETCH * (seconds - self._before_s)


def denied_s(pid: int) -> float | None:
    """Return a count in seconds that grows while a process's thread is ready to run but others use its processor.

    The difference between two counts never exceeds that time, for any number of threads: while a thread waits for a
    sibling, the process's processor time grows by as much as the thread's waiting time. None if the process has been
    reaped, or if the system does not report it.
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
    """Yield the seconds that each thread of a process ran, and that it waited for a processor."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # the thread has just ended
                ran, waited = (thread / "schedstat").read_text("ascii").split()[:2]
                yield int(ran) / 1e9, int(waited) / 1e9
