"""Ctrl-C: the first asks to stop after the step, the second discards the step at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Within the block, the first SIGINT or SIGTERM sets `requested`; the second raises KeyboardInterrupt.

    Outside of the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
