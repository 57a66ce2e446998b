"""Measuring processes, from the side of the scheduler: one core, one thread, one job, one run per turn.

In: jobs. Out: cells. It imports nothing heavy: a child's peak memory starts at its parent's size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Limits
from measurement import Cell, Job, Run

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"


class Child:
    """A process that measures one job, with one run per turn.

    Args:
        job: The job.
        limits: The limits of its runs.
        core: The core of the process.
        log: File for the output of the process and its libraries.
        python: The interpreter.
    """

    def __init__(self, job: Job, limits: Limits, core: int, log: Path, python: str = sys.executable) -> None:
        self.job = job
        self.error: str | None = None
        self._limits = limits
        self._log = log
        self._runs: list[Run] = []
        self._baseline_bytes = self._peak_bytes = 0
        self._process = start("worker.py", json.dumps(asdict(job)), core, log, python)
        self._receive_until("waiting")

    @property
    def is_done(self) -> bool:
        """Whether the process failed or reached its limits."""
        return self.error is not None or self._limits.reached([run.seconds for run in self._runs])

    def take_turn(self) -> None:
        """Request one run, and wait until the child idles.

        Work after a run, such as TRL's logging, must not disturb the next child's run.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._receive_until("waiting", "peak_bytes")

    def finish(self) -> Cell:
        """Dismiss the child, wait for its end and return its cell."""
        output, _ = self._process.communicate()
        for line in output.splitlines():
            self._take(json.loads(line))
        if self.error is None and not self._peak_bytes:
            self._fail("the process ended early")
        num_warmups = self._limits.warmups([run.seconds for run in self._runs])
        runs = [] if self.error else self._runs
        counted, warmups = runs[num_warmups:], runs[:num_warmups]
        return Cell(self.job, counted, warmups, self._baseline_bytes, self._peak_bytes, self.error)

    def _receive_until(self, *keys: str) -> None:
        assert self._process.stdout is not None
        message: dict[str, Any] = {}
        while self.error is None and not any(key in message for key in keys):
            line = self._process.stdout.readline()
            message = json.loads(line or '{"error": "the process ended early"}')
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        self._baseline_bytes = message.get("baseline_bytes", self._baseline_bytes)
        self._peak_bytes = message.get("peak_bytes", self._peak_bytes)
        if "run" in message:
            self._runs.append(Run.of(message["run"]))
        if "error" in message:
            self._fail(message["error"])

    def _fail(self, error: str) -> None:
        self.error = error
        print(f"  {self.job.peer} N={self.job.num_rollouts} failed: {error} ({self._log})", file=sys.stderr, flush=True)


def start(script: str, argument: str, core: int, log: Path, python: str = sys.executable) -> subprocess.Popen[str]:
    """Start a script of this folder with one thread on one core."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    path = os.pathsep.join(p for p in (str(SOURCE), os.environ.get("PYTHONPATH")) if p)
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a", encoding="utf-8") as stderr:
        return subprocess.Popen(
            [python, str(HERE / script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | threads | offline | {"PYTHONPATH": path},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
