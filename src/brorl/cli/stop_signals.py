"""SIGTERM and SIGHUP: the signals of Slurm, Kubernetes, `kill` and a closed terminal stop a command as Ctrl-C does.

A command that keeps its work catches KeyboardInterrupt, prints the kept work and the command that continues, and
returns `STOPPED`. A training run requests its own stop (`brorl.training.stop_request`), and a comparison counts the
signals that it passes on to its runs (`brorl.api.arm_runs`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from brorl.training.stop_request import is_hangup, stop_signals

STOPPED = 130  # exit code of a command that was stopped, by any of these signals


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Within the block, stop signals raise KeyboardInterrupt. Threads other than the main one leave signals alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in stop_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    is_hangup(number)
    raise KeyboardInterrupt
