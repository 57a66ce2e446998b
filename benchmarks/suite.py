"""All measurements of docs/explanation/benchmarks.md against peers, on one core, in fp32.

    python benchmarks/suite.py FOLDER --trained CHECKPOINT --vllm-python PYTHON [--parts REGEX]

Ours is compared with transformers' `generate`, vLLM and TRL's GRPOTrainer. FOLDER/result.json has every run of every
finished part, and FOLDER/benchmarks.md the tables of all. A finished part is not measured again, so an interrupted
suite continues. Each measurement has a fresh process with its own peak memory, pinned to one core with one thread.
Peers of one comparison take turns, one run each, so a drifting clock affects all equally. This process imports nothing
heavy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from child import Child, start
from harness import Findings, Limits, OtherOptionsError, Part, Record, run_parts
from measurement import PEERS, Cell, Job, Peer, Quantity, Workload
from tables import markdown

QUANTITIES: tuple[Quantity, ...] = ("generation", "step")
MEASURES: dict[Peer, tuple[Quantity, ...]] = {"ours": QUANTITIES, "trl": ("step",), "trl-checkpointing": ("step",)}
MEASURES |= {"transformers": ("generation",), "vllm": ("generation",)}
MAX_OF_PEERS = 512  # only ours is measured at a larger N
LIMITS = Limits(5, 1, 60.0)
MICRO_BATCH = 32  # TRL's per-device batch


@dataclass(frozen=True)
class Comparison:
    """What a part measures: each quantity of each peer at each N."""

    setting: str
    num_rollouts: tuple[int, ...]
    peers: tuple[Peer, ...] = PEERS
    response_tokens: int = 64  # of random models
    quantities: tuple[Quantity, ...] = QUANTITIES
    prompts_per_step: int = 1
    largest_of_peers: int = MAX_OF_PEERS
    limits: Limits = LIMITS

    def jobs(self, workload: Workload, quantity: Quantity, num_rollouts: int, peers: Sequence[Peer]) -> Iterator[Job]:
        """Yield the jobs that are measured side by side, of the peers that this machine has."""
        largest = max((n for n in self.num_rollouts if n <= self.largest_of_peers), default=0)
        for peer in self.peers:
            if quantity not in MEASURES[peer] or peer not in peers:
                continue
            if peer != "ours" and num_rollouts > self.largest_of_peers:
                continue
            if peer == "trl-checkpointing" and num_rollouts != largest:
                continue  # one N is enough for the memory of TRL with gradient checkpointing
            num_turns = self.limits.num_warmups + self.limits.num_runs
            yield Job(peer, quantity, workload.folder, num_rollouts, self.prompts_per_step, num_turns, MICRO_BATCH)


# N, peers and seconds per cell are chosen so that everything takes about an hour on one idle core. What is left out
# is a dash in the tables.
_SLOW, _SLOWER = Limits(5, 1, 20.0), Limits(5, 1, 30.0)
_NO_CHECKPOINTING: tuple[Peer, ...] = ("ours", "transformers", "vllm", "trl")
PARTS = {
    "full": Comparison("full", (16, 64, 512), ("ours", "transformers", "trl")),
    "low": Comparison("low", (16, 64, 512, 2048)),
    "trained": Comparison("trained", (16, 64, 512, 2048), ("ours", "transformers", "trl", "trl-checkpointing")),
    "trained-16-prompts": Comparison("trained", (16, 512), ("ours", "trl"), quantities=("step",), prompts_per_step=16),
    "length-512": Comparison("low", (16, 64), _NO_CHECKPOINTING, 512, limits=_SLOW),
    "length-2048": Comparison("low", (16,), _NO_CHECKPOINTING, 2048, limits=_SLOW),
    "length-512-many": Comparison("low", (512,), ("ours", "vllm"), 512, ("generation",), limits=_SLOWER),
    "length-2048-many": Comparison("low", (64,), ("ours", "vllm"), 2048, ("generation",), limits=_SLOWER),
    "big-full": Comparison(
        "big-full", (64, 512), ("ours", "transformers", "vllm"), quantities=("generation",), limits=_SLOWER
    ),
    "big-full-step": Comparison(
        "big-full", (64, 512), ("ours", "trl"), quantities=("step",), largest_of_peers=64, limits=_SLOWER
    ),
    "big-low": Comparison("big-low", (64, 512), ("ours",), limits=_SLOWER),
    # Every kind of measurement in seconds, to see that it runs; only measured if --parts names it.
    "small": Comparison("full", (4,), ("ours", "transformers", "trl"), 8, limits=Limits(1, 0, 1.0)),
}


def measure(comparison: Comparison, args: argparse.Namespace, probe: Any) -> Findings:
    """Build the workload of a comparison, and measure all cells."""
    peers = [peer for peer in PEERS if peer != "vllm" or args.vllm_python]
    with tempfile.TemporaryDirectory(prefix="brorl-bench-") as folder:
        workload = _build_workload(comparison, args, Path(folder) / "workload")
        cells = [
            cell
            for quantity in comparison.quantities
            for number in comparison.num_rollouts
            for cell in compare(list(comparison.jobs(workload, quantity, number, peers)), comparison.limits, args)
        ]
    workload_record = asdict(workload) | {"prompts": workload.prompts[:1]}
    return Findings(facts={**probe(), "workload": workload_record, "cells": [asdict(cell) for cell in cells]})


def compare(jobs: Sequence[Job], limits: Limits, args: argparse.Namespace) -> Iterator[Cell]:
    """Measure jobs side by side: load all, then run them in turns."""
    children = []
    for job in jobs:
        log = Path(job.workload_folder) / f"{job.quantity}-{job.peer}-{job.num_rollouts}.log"
        children.append(Child(job, limits, args.core, log, args.vllm_python if job.peer == "vllm" else sys.executable))
    while waiting := [child for child in children if not child.is_done]:
        for child in waiting:
            child.take_turn()
    for child in children:
        cell = child.finish()
        if cell.runs:
            print(
                f"  {cell.job.quantity} {cell.job.peer} N={cell.job.num_rollouts}: {cell.seconds:.4g} s in "
                f"{len(cell.runs)} runs, {cell.above_baseline_bytes / 1e6:.0f} MB above the model",
                file=sys.stderr,
                flush=True,
            )
        yield cell


def _build_workload(comparison: Comparison, args: argparse.Namespace, folder: Path) -> Workload:
    folder.mkdir()
    spec = {
        "setting": comparison.setting,
        "folder": str(folder),
        "num_prompts": (comparison.limits.num_warmups + comparison.limits.num_runs) * comparison.prompts_per_step,
        "response_tokens": comparison.response_tokens,
        "model": args.trained if comparison.setting == "trained" else None,
    }
    log = folder / "workload.log"
    process = start("build_workload.py", json.dumps(spec), args.core, log)
    process.communicate()
    text = log.read_text(encoding="utf-8")
    if process.returncode:
        raise RuntimeError(f"could not build the workload {comparison.setting}:\n{text[-4000:]}")
    return Workload.read(folder)


def _answer(question: str, args: argparse.Namespace, python: str = sys.executable) -> dict[str, Any]:
    """Start a measuring process for one answer: `probe` or `versions`."""
    output, _ = start("worker.py", question, args.core, args.folder / f"{question}.log", python).communicate()
    answer: dict[str, Any] = json.loads(output)
    return answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of result.json and benchmarks.md")
    parser.add_argument("--trained", help="a checkpoint of `brorl train` on the recipe quickstart")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM, made by vllm_environment.sh")
    parser.add_argument("--parts", help=f"regular expression of parts, of {', '.join(PARTS)} (default: all but small)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.vllm_python and not os.access(args.vllm_python, os.X_OK):
        parser.error(f"--vllm-python {args.vllm_python} is not a program; make it with benchmarks/vllm_environment.sh")
    return args


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return names[0] if names else "unknown"


def main() -> int:
    """Measure the missing parts, then write the tables of all parts."""
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)

    @cache
    def probe() -> dict[str, Any]:
        vllm = {"vllm": _answer("versions", args, args.vllm_python)} if args.vllm_python else {}
        return {**_answer("probe", args), **vllm, "load_average": os.getloadavg()}

    wanted = [name for name in PARTS if (re.search(args.parts, name) if args.parts else name != "small")]
    if not args.trained:
        print("no --trained CHECKPOINT given: its parts are left out", file=sys.stderr)
        wanted = [name for name in wanted if PARTS[name].setting != "trained"]
    try:
        record = Record(args.folder, {"processor": _processor(), "num_cores": os.cpu_count()})
    except OtherOptionsError as error:
        print(error, file=sys.stderr)
        return 1
    run_parts([Part(name, partial(measure, PARTS[name], args, probe)) for name in wanted], record, math.inf)
    tables = markdown(record, LIMITS.num_runs)
    (args.folder / "benchmarks.md").write_text(tables + "\n", encoding="utf-8")
    print(tables)
    return 1 if record.failed_parts() else 0


if __name__ == "__main__":
    sys.exit(main())
