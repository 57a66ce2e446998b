"""The protocol between a measuring process and the scheduler.

In: a line on standard input per turn; the end of standard input ends the turns. Out: one JSON object per line: the
baseline memory, then `waiting` and a run for every turn, then the peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from measurement import Run


class DismissedError(Exception):
    """The scheduler needs no more runs."""


class Turns:
    """The worker's side of the protocol; the training loop of a peer may call it from a callback."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def ready(self) -> None:
        """Report the resident set after the imports and the loading of the model."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self._answer({"baseline_bytes": pages * resource.getpagesize()})

    def wait(self) -> None:
        """Report that this process is idle, and block until the scheduler requests a run.

        Raises:
            DismissedError: If the scheduler needs no more runs.
        """
        self._answer({"waiting": True})
        if not sys.stdin.readline():
            raise DismissedError

    def reply(self, run: Run) -> None:
        """Report a run."""
        self._answer({"run": asdict(run)})

    def finish(self) -> None:
        """Report the largest resident set of the process, and idle until standard input ends."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._answer({"peak_bytes": peak})
        sys.stdin.read()  # an exit would use the core on which other processes are measured

    def fail(self, error: BaseException) -> None:
        """Report the error that ends the runs."""
        self._answer({"error": f"{type(error).__name__}: {error}"})

    def _answer(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)
