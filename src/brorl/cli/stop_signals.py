"""Ctrl-C and SIGTERM: the signal of Slurm, Kubernetes and `kill` stops a command as Ctrl-C does.

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

STOPPED = 130  # exit code of a command that was stopped, by either signal


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM raises KeyboardInterrupt. Threads other than the main one leave signals alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
