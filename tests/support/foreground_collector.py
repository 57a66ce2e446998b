"""An asynchronous collector that works within the calls of the loop, not in a thread.

Over a pool with a virtual clock (`virtual_pool`) a run is then reproducible bit for bit: what is done by when depends
on the work alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from brorl.runs.checkpoint import CollectorState
from brorl.training.async_collector import AsyncCollector


class ForegroundCollector(AsyncCollector):
    """Does the thread's work when the loop publishes, and while it waits."""

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._changed:
            self._check()
            while self._work_once(0.0):
                pass  # until nothing else is done by now
            super().publish(weights, version)

    def state(self) -> CollectorState:
        """Return the state, and sample again what a resumed run would: this one goes on exactly as that one does."""
        with self._changed:
            state = super().state()
            self.load_state(state)
            self._fill()
            return state

    def _start_thread(self) -> None:
        pass

    def _await_work(self) -> None:
        self._work_once(None)

    def _work_once(self, timeout_s: float | None) -> bool:
        """Do all work of the next results; return whether there were any."""
        any_done, ended = self._receive(timeout_s)
        if ended:
            self._add(ended, self._verify(ended))
        return any_done
