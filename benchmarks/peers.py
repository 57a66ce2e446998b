"""Ours against transformers' `generate` and TRL's GRPOTrainer, on one core, in fp32.

In: flags. Out: markdown tables on standard output and, with `--output`, a JSON file with every run.
Each measurement has a process of its own (so peak memory is its own), pinned to one core with one
thread. Peers of one comparison take turns, one run each, so that a drifting clock meets all alike.
This process imports nothing heavy: a child's peak memory starts at its parent's size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measurement import Cell, Job, Peer, Quantity, Run, Workload
from table import Results, markdown

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
PEERS: tuple[Peer, ...] = ("ours", "transformers", "trl", "trl-checkpointing")
SETTINGS = ("full", "low", "shipped", "trained")
QUANTITIES: tuple[Quantity, ...] = ("generation", "step")
MEASURES: dict[Peer, tuple[Quantity, ...]] = {
    "ours": QUANTITIES,
    "transformers": ("generation",),
    "trl": ("step",),
    "trl-checkpointing": ("step",),
}


class Worker:
    """A child process that measures one job, one run per turn."""

    def __init__(self, job: Job, core: int, log: Path) -> None:
        self.job = job
        self._log = log
        self.runs: list[Run] = []
        self.baseline_bytes = self.peak_bytes = 0
        self.error: str | None = None
        self._process = _child("worker.py", json.dumps(asdict(job)), core, log)
        self._receive_until("waiting")

    def take_turn(self) -> None:
        """Ask for one run, and wait until the child idles; nothing happens after a failure.

        What a child does after its run, such as TRL's logging, must not disturb the next child's.
        """
        if self.error is None:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            self._receive_until("waiting", "peak_bytes")

    def finish(self, num_warmups: int) -> Cell:
        """Wait for the child's end and return what was measured."""
        self._process.communicate()
        runs = [] if self.error else self.runs
        counted, warmups = runs[num_warmups:], runs[:num_warmups]
        return Cell(self.job, counted, warmups, self.baseline_bytes, self.peak_bytes, self.error)

    def _receive_until(self, *keys: str) -> None:
        message: dict[str, Any] = {}
        while self.error is None and not any(key in message for key in keys):
            message = self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        message: dict[str, Any] = json.loads(line or '{"error": "the process ended early"}')
        self.baseline_bytes = message.get("baseline_bytes", self.baseline_bytes)
        self.peak_bytes = message.get("peak_bytes", self.peak_bytes)
        if "run" in message:
            self.runs.append(Run(**message["run"]))
        if "error" in message:
            self.error = message["error"]
            _say(f"  {self.job.peer} N={self.job.num_rollouts} failed: {self.error} ({self._log})")
        return message


def _child(script: str, argument: str, core: int, log: Path) -> subprocess.Popen[str]:
    """Start one of the scripts next to this one, with one thread on one core."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    path = os.pathsep.join(p for p in (str(SOURCE), os.environ.get("PYTHONPATH")) if p)
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a", encoding="utf-8") as stderr:
        return subprocess.Popen(
            [sys.executable, str(HERE / script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | threads | offline | {"PYTHONPATH": path},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def _probe(core: int, folder: Path) -> dict[str, Any]:
    """Measure the matmul peak in GFLOP/s and read the versions."""
    output, _ = _child("worker.py", "probe", core, folder / "probe.log").communicate()
    probe: dict[str, Any] = json.loads(output)
    return probe


def _build_workload(name: str, args: argparse.Namespace, folder: Path) -> Workload:
    folder.mkdir()
    spec = {
        "name": name,
        "folder": str(folder),
        "num_prompts": (args.warmups + args.runs) * args.prompts_per_step,
        "big": args.big,
        "model": {"shipped": args.model, "trained": args.trained}.get(name),
        "recipe": args.recipe,
        "balanced": args.balanced,
        "seed": args.seed,
    }
    log = folder / "workload.log"
    process = _child("workload.py", json.dumps(spec), args.core, log)
    process.communicate()
    lines = log.read_text(encoding="utf-8").splitlines()
    if process.returncode:
        raise SystemExit(f"could not build the workload {name}:\n" + "\n".join(lines[-20:]))
    _say("\n".join(line for line in lines if line.startswith(("workload", "  "))))
    return Workload.read(folder)


def _jobs(
    workload: Workload,
    quantity: Quantity,
    num_rollouts: int,
    args: argparse.Namespace,
) -> list[Job]:
    """List who takes part in one comparison."""
    largest = max((n for n in args.num_rollouts if n <= args.peer_limit), default=0)
    jobs = []
    for peer in args.peers:
        if quantity not in MEASURES[peer]:
            continue
        if peer != "ours" and num_rollouts > args.peer_limit:
            continue
        if peer == "trl-checkpointing" and num_rollouts != largest:
            continue  # it tells what TRL's memory could be; one N says it
        jobs.append(
            Job(
                peer=peer,
                quantity=quantity,
                workload_folder=workload.folder,
                num_rollouts=num_rollouts,
                prompts_per_step=args.prompts_per_step,
                num_turns=args.warmups + args.runs,
                micro_batch=args.micro_batch,
            )
        )
    return jobs


def _compare(jobs: Sequence[Job], args: argparse.Namespace) -> Iterator[Cell]:
    """Measure jobs side by side: all are loaded, then each makes one run in turn."""
    workers = []
    for job in jobs:
        name = f"{job.quantity}-{job.peer}-{job.num_rollouts}.log"
        workers.append(Worker(job, args.core, Path(job.workload_folder) / name))
    for _ in range(args.warmups + args.runs):
        for worker in workers:
            worker.take_turn()
    for worker in workers:
        cell = worker.finish(args.warmups)
        if cell.runs:
            job = cell.job
            _say(
                f"  {job.quantity} {job.peer} N={job.num_rollouts}: {cell.seconds:.4g} s, "
                f"{cell.above_baseline_bytes / 1e6:.0f} MB above the model"
            )
        yield cell


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", type=_words, default=list(SETTINGS))
    parser.add_argument("--quantities", type=_words, default=list(QUANTITIES))
    parser.add_argument("--peers", type=_words, default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--num-rollouts", type=_numbers, default=[16, 64, 256, 512, 2048])
    parser.add_argument("--prompts-per-step", type=int, default=1)
    parser.add_argument("--peer-limit", type=int, default=512, help="largest N for the peers")
    parser.add_argument("--runs", type=int, default=5, help="runs that count; medians of these")
    parser.add_argument("--warmups", type=int, default=1, help="runs before them, dropped")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's per-device batch")
    parser.add_argument(
        "--model",
        default=str(SOURCE / "brorl" / "quickstart_model"),
        help="the setting shipped: a checkpoint folder (by default the model in the package)",
    )
    parser.add_argument("--trained", help="the setting trained: a checkpoint of `brorl train`")
    parser.add_argument("--recipe", default="quickstart", help="whose puzzles these two are asked")
    parser.add_argument("--balanced", action="store_true", help="not too easy, not too hard ones")
    parser.add_argument("--big", action="store_true", help="a larger random model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="JSON file with every run")
    parser.add_argument("--keep", type=Path, help="empty folder for models and logs (temporary)")
    args = parser.parse_args()
    for flag, known in (("settings", SETTINGS), ("quantities", QUANTITIES), ("peers", PEERS)):
        if unknown := set(getattr(args, flag)) - set(known):
            parser.error(f"--{flag}: no {sorted(unknown)}; choose from {', '.join(known)}")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty; name a new folder")
    if "trained" in args.settings and not args.trained:
        _say("no --trained CHECKPOINT given: the setting trained is left out")
        args.settings = [name for name in args.settings if name != "trained"]
    return args


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _record(args: argparse.Namespace, probes: list[dict[str, Any]], results: Results) -> str:
    """Return the JSON: the machine, versions, every run, medians and the tables."""
    record = {
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
        "versions": probes[0]["versions"],
        "matmul_gflops": [probe["matmul_gflops"] for probe in probes],
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "workloads": [asdict(workload) for workload in results.workloads],
        "cells": [_cell_record(name, cell) for name, cell in results.cells],
        "markdown": markdown(results),
    }
    return json.dumps(record, indent=1) + "\n"


def _cell_record(workload: str, cell: Cell) -> dict[str, Any]:
    record: dict[str, Any] = {"workload": workload} | asdict(cell)
    if not cell.runs:
        return record
    return record | {
        "medians": {
            "seconds": cell.seconds,
            "cpu_seconds": cell.cpu_seconds,
            "rollouts_per_s": cell.rollouts_per_s,
            "unique_fraction": cell.unique_fraction,
            "above_baseline_bytes": cell.above_baseline_bytes,
        }
    }


@contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="brorl-bench-") as folder:
        yield Path(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure everything asked for, print the tables, write the JSON."""
    args = _arguments()
    start = time.perf_counter()
    workloads: list[Workload] = []
    cells: list[tuple[str, Cell]] = []
    probes: list[dict[str, Any]] = []
    with _work_folder(args.keep) as folder:
        for name in args.settings:
            probes.append(_probe(args.core, folder))
            peak = max(max(probe["matmul_gflops"].values()) for probe in probes)
            workload = _build_workload(name, args, folder / name)
            workloads.append(workload)
            for quantity in args.quantities:
                for num_rollouts in args.num_rollouts:
                    jobs = _jobs(workload, quantity, num_rollouts, args)
                    cells += [(name, cell) for cell in _compare(jobs, args)]
                    results = Results(workloads, cells, peak)
                    if args.output:
                        args.output.write_text(_record(args, probes, results), encoding="utf-8")
    print(markdown(results))
    _say(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
