"""Ctrl-C, SIGTERM and SIGHUP: the first requests a stop and is answered immediately; the second discards the step.

Python runs a signal handler only after the main thread's current call, and a backward pass is one call. So a separate
thread, woken by the signal, gives the answer.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop: SIGINT, SIGTERM, and SIGHUP unless the program ignores it (`nohup`)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


@contextmanager
def on_stop(handle: Callable[[int], object], signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Within the block, call `handle` with the number of each of these signals when it arrives.

    Outside the main thread, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, _frame: FrameType | None) -> None:
        _ignore_hangup(number)
        handle(number)

    before = {number: signal.signal(number, receive) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _ignore_hangup(number: int) -> None:
    """Ignore SIGHUP after the first one: the terminal is gone, and a shell sends the signal again."""
    if number not in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        leave_terminal()


def leave_terminal() -> None:
    """Discard output if its terminal is gone, because a write error would prevent the checkpoint."""
    for descriptor in (1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


class StopNow(Exception):  # noqa: N818 (not an error)
    """A stop was requested during work that can be discarded because nothing was learned in it."""


class StopRequest:
    """Within the block, the first stop signal sets `requested`. The second raises KeyboardInterrupt.

    Outside the main thread, signals are left alone.

    Args:
        answer: Called once, at the first signal, from a separate thread; True means that work in progress is discarded.
    """

    def __init__(self, answer: Callable[[bool], None] = lambda _: None) -> None:
        self.requested = False
        self._answer = answer
        self._discards = False
        self._discarded = False  # whether the step could be discarded at the first signal
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._thread = threading.Thread(target=self._answer_the_first, name="answer to Ctrl-C", daemon=True)
            self._thread.start()
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
            self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.close()  # the thread reads end-of-file
        self._thread.join()
        self._reader.close()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Mark work in which nothing is learned. A stop request ends it at its start, at a `check`, or at its end."""
        self._discards = True
        try:
            self.check()
            yield
            self.check()
        finally:
            self._discards = False

    def check(self) -> None:
        """End the work in progress if a stop was requested and the work can be discarded."""
        if self.requested and self._discards:
            raise StopNow

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        _ignore_hangup(number)
        if self.requested:
            raise KeyboardInterrupt
        self._discarded = self._discards
        self.requested = True

    def _answer_the_first(self) -> None:
        while received := self._reader.recv(1):
            if received[0] in self._previous:
                leave_terminal()
                # Until the main thread runs its handler, it is still in the call that the signal interrupted, so go by
                # what it is doing now.
                discards = self._discards
                if self.requested:
                    discards = self._discarded
                self._answer(discards)
                return
