"""A request to a process: its limits, the time that it has used, its reply, and the ways in which it can end.

Nothing here knows the right answer: expected values stay with the judge, and never enter a program. Time is wall time
without the time in which others had the processor, as the kernel counts it: an overloaded machine causes no timeouts.
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
"""Output limit of a request whose reply contains no value or a short one; any failure fits into it."""


class LostError(Exception):
    """An infrastructure failure: something other than the program ended or stopped it. The message names it."""


class Fault(StrEnum):
    """How a program can end other than by an exception: the text of a failure, or its beginning.

    More words follow `exited` and `killed by signal`: `exited with code 3`, `killed by signal 11`.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = program.OUT_OF_MEMORY
    TOO_MUCH_OUTPUT = program.TOO_MUCH_OUTPUT
    TOO_MANY_THREADS = program.TOO_MANY_THREADS
    BROKE_PROTOCOL = "broke the protocol of the sandbox"
    EXITED = program.EXITED
    KILLED = "killed by signal"


def fault_of(failure: str) -> Fault | None:
    """Return the fault that a failure names, even if the program wrote that text; None for any other failure."""
    return next((fault for fault in Fault if failure == fault or failure.startswith(f"{fault} ")), None)


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    # Wall time. Time in which the program waited for a core of a busy machine does not count, up to ten times the
    # limit.
    seconds: float = 4.0
    # memory of the program, in later calls too
    memory_bytes: int = 1 << 29
    # Size of its output, or of the text of a returned value. A longer text is not read.
    output_bytes: int = 1 << 20
    # Parts of the text of a returned value, see `values.Size`. A text with more is not decoded, because each part takes
    # this process up to 10 microseconds. None for no limit.
    output_parts: int | None = None


@dataclass(frozen=True)
class Reply:
    """A program has run or has been loaded, or a call has ended."""

    # The output of a whole program, even if it failed, decoded as UTF-8 with replacement; or the value of builtin types
    # that a function returned. None after loading and after a failed call.
    value: Any
    # A `Fault`, such as `timeout` or `exited with code 3`, or the last line of an uncaught exception; after a call
    # also `exited inside the call` and `returned no plain value`. None after a normal end.
    failure: str | None
    # wall time without the time in which others had the core, and with the time in which this process reads the value
    seconds: float


@dataclass(frozen=True)
class Undecided:
    """No decision, because of an infrastructure failure: the response is unverified."""

    reason: str  # for example `a worker was lost`


class JudgeTimeout(Undecided):
    """No decision, because the programs of the judge used up their part of the batch's time: a timeout."""


MAX_STRETCH = 10  # wall time of a call in multiples of its limit, at most, where the machine is overloaded
_CLOCK_OF_PROCESS = 2  # processor time of all threads, ended ones included: MAKE_PROCESS_CPUCLOCK


class Stopwatch:
    """The time of the current request of one process, in seconds.

    It is the wall time of the request, without the time in which others had the processor, and the processor time that
    threads of the process used since the last reply. Sleep counts, and so does waiting for each other.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s = 0.0  # of the request, before the process was last asked
        self._runs = False
        self._cpu_s = _cpu_s(pid)  # of the process, at its last reply
        self.restart()

    def restart(self) -> None:
        """Begin another request."""
        self._before_s = 0.0
        self.resume()

    def pause(self) -> None:
        """Stop counting wall time: the process has replied."""
        self._before_s = self.used_s()
        self._runs = False
        self._cpu_s = _cpu_s(self._pid)

    def resume(self) -> None:
        """Count wall time again; the processor time that the threads of the process used meanwhile counts too."""
        if not self._runs:
            self._before_s += max(0.0, _cpu_s(self._pid) - self._cpu_s)
        self._runs, self._began = True, time.monotonic()
        self._count_before, self._denied_s = denied_s(self._pid), 0.0

    def used_s(self) -> float:
        """Return the time of the current request."""
        if not self._runs:
            return self._before_s
        self.notice(denied_s(self._pid))
        return self._before_s + max(0.0, time.monotonic() - self._began - self._denied_s)

    def notice(self, count: float | None) -> None:
        """Use the count that the server read just before the process ended."""
        if count is not None and self._count_before is not None:
            self._denied_s = max(self._denied_s, count - self._count_before)

    def time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) the request has used these seconds, if nothing else takes its processor."""
        return self._began + self._denied_s + seconds - self._before_s

    def last_time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) a request of this limit has had its chance, however busy the machine is."""
        return self._began + MAX_STRETCH * (seconds - self._before_s)


def denied_s(pid: int) -> float | None:
    """Return a count that grows while others have the processor of a process and one of its threads is ready to run.

    Differences of two counts, in seconds, are at most that time, for any threads: while a thread waits for a sibling,
    the processor time of the process grows as much as the thread's waiting. None if the process has been reaped, or if
    the system does not report it.
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
    """Yield the seconds that each thread of a process ran, and was ready to run without a processor."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                ran, waited = (thread / "schedstat").read_text("ascii").split()[:2]
                yield int(ran) / 1e9, int(waited) / 1e9
