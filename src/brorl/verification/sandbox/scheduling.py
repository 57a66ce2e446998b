"""The time of a process: its wall time without that in which others had its processor, as the kernel counts it.

An overloaded machine therefore causes no timeouts. Where the system does not report a count, it counts as 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

MAX_STRETCH = 10  # wall time of a call in multiples of its limit, at most, where the machine is overloaded
_CLOCK_OF_PROCESS = 2  # the clock of the processor time of all threads, also of ended ones: MAKE_PROCESS_CPUCLOCK


class Stopwatch:
    """The time of the current request of one process, in seconds.

    It is the wall time while the process is asked, without that in which others had its processor, and the processor
    time that its threads have taken since the last request. Sleep counts, and so does the time in which threads of the
    process wait for each other.

    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s = 0.0  # of the request, until the process was asked last
        self._runs = False
        self._cpu_s = _cpu_s(pid)  # when it was asked no more
        self.restart()

    def restart(self) -> None:
        """Begin another request."""
        self._before_s = 0.0
        self.resume()

    def pause(self) -> None:
        """The process is asked no more."""
        self._before_s = self.used_s()
        self._runs = False
        self._cpu_s = _cpu_s(self._pid)

    def resume(self) -> None:
        """Ask the process again; what its threads have used meanwhile counts."""
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
        """Take account of a count that another process has read before the end of this one."""
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
