"""Run-queue delay: the time that a process was runnable and had no processor, as the kernel counts it.

It is subtracted from a call's wall time, so that an overloaded machine causes no timeouts. Where the system does not
report it, it counts as 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

MAX_STRETCH = 10  # wall time of a call in multiples of its limit, at most, where the machine is overloaded
_CLOCK_OF_PROCESS = 2  # the clock of the processor time of all threads, also of ended ones: MAKE_PROCESS_CPUCLOCK


def waited_s(pid: int) -> float:
    """Return how long a process was ready to run without a processor, in seconds since its start.

    It is the most of its threads; 0 if the process has ended, or if the system does not report it.
    """
    return max((waited for _, waited in _threads(pid)), default=0.0)


def denied_s(pid: int) -> float | None:
    """Return a count that grows while others have the one core of a process and one of its threads is ready to run.

    Differences of two counts, in seconds, are at most that time, for any threads: while a thread waits for a sibling,
    the processor time of the process grows as much as the thread's waiting. None if the process has been reaped, or if
    the system does not report it.
    """
    counts = [ran + waited for ran, waited in _threads(pid)]
    with contextlib.suppress(OSError):
        return max(counts) - time.clock_gettime(~pid << 3 | _CLOCK_OF_PROCESS) if counts else None
    return None


def _threads(pid: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds that each thread of a process ran, and was ready to run without a processor."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                ran, waited = (thread / "schedstat").read_text("ascii").split()[:2]
                yield int(ran) / 1e9, int(waited) / 1e9
