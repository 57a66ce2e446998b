"""Ctrl-C and SIGTERM: the signal of Slurm, Kubernetes and `kill` stops a command as Ctrl-C does.

A command that keeps finished work catches KeyboardInterrupt, prints the command that continues, and returns `STOPPED`.
A training run handles the signals itself (`brorl.training.stop_request`), and a comparison counts the signals that it
sends on to its runs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

STOPPED = 130  # exit code of a stopped command, for either signal
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM raises KeyboardInterrupt. Outside of the main thread it does nothing."""
    with _handled({signal.SIGTERM}, _interrupt):
        yield


@dataclass
class StopCount:
    """Counter of stop signals.

    Attributes:
        count: Signals received.
    """

    count: int = 0

    def add(self, _number: int, _frame: FrameType | None) -> None:
        """Count a signal."""
        self.count += 1


@contextmanager
def counted_stops() -> Iterator[StopCount]:
    """Within the block, SIGINT and SIGTERM are counted and do not interrupt."""
    stops = StopCount()
    with _handled(STOP_SIGNALS, stops.add):
        yield stops


@contextmanager
def _handled(numbers: Collection[signal.Signals], handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
