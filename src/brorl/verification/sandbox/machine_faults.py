"""Faults of the machine that end a call of a verifier, as opposed to faults of the call.

In: a process. Out: whether it ended, and how long it waited for a processor. A call that the machine ended has
no verdict. A call that ended its own worker has failed.

SIGKILL and SIGTERM come from outside, unless the pool sent them: from the kernel when the machine is out of memory,
from a guard of the system, or from a person. A call that aborts, exits, crashes in C code or exceeds its own limit of
memory ends in another way.

The kernel counts how long a process was ready to run and had to wait for a processor. A call that computes, sleeps or
waits for input on a free machine does not wait for a processor. Therefore this time is taken off a call's wall time.
Where the system does not report it, it counts as 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MAX_STRETCH = 10  # wall time of a call in multiples of its limit, at most, where the machine is overloaded
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
_POLL_S = 0.001
_CLOCK_OF_PROCESS = 2  # the clock of the processor time of all threads, also of ended ones: MAKE_PROCESS_CPUCLOCK


def ended_from_outside(exit_code: int) -> bool:
    """Whether something else ended a worker that the pool has not killed.

    Args:
        exit_code: Its exit code: the negative number of the signal that ended it.
    """
    return exit_code in _FROM_OUTSIDE


def has_ended(pid: int, within_s: float) -> bool:
    """Whether a child process ends on its own within a time; it can still be waited for.

    Args:
        pid: Number of a child process that has not been waited for.
        within_s: The time in seconds; 0 only looks.
    """
    if not hasattr(os, "waitid"):
        return within_s > 0  # its output has ended; few processes close their output and continue
    end = time.monotonic() + within_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def waited_s(pid: int) -> float:
    """Return how long a process was ready to run without a processor, in seconds; the most of its threads.

    Args:
        pid: Number of a process.

    Returns:
        The time since its start; 0 if it has ended, or if the system does not report it.
    """
    return max((waited for _, waited in _threads(pid)), default=0.0)


def denied_s(pid: int) -> float | None:
    """Return a count that grows while others have the one core of a process and one of its threads is ready to run.

    Differences of two counts are at most that time, for any threads: while a thread waits for a sibling, the processor
    time of the process grows as much as the thread's waiting.

    Args:
        pid: Number of a process whose threads share one core.

    Returns:
        Seconds, also below 0; None if the process has been reaped, or if the system does not report it.
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
