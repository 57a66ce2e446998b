"""Ours against transformers' `generate`, vLLM and TRL's GRPOTrainer, on one core, in fp32.

In: flags. Out: markdown tables on standard output and, with `--output`, a JSON file with every run. Each measurement
has a fresh process with its own peak memory, pinned to one core with one thread. Peers of one comparison take turns,
one run each, so a drifting clock affects all equally. This process imports nothing heavy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from child import SOURCE, Child, Limits, start
from measurement import Cell, Job, Peer, Quantity
from results import Entry, Results
from table import markdown
from workload import Workload

PEERS: tuple[Peer, ...] = ("ours", "transformers", "vllm", "trl", "trl-checkpointing")
RANDOM = ("full", "low", "big-full", "big-low")
SETTINGS = (*RANDOM, "shipped", "trained")
QUANTITIES: tuple[Quantity, ...] = ("generation", "step")
MEASURES: dict[Peer, tuple[Quantity, ...]] = {
    "ours": QUANTITIES,
    "transformers": ("generation",),
    "vllm": ("generation",),
    "trl": ("step",),
    "trl-checkpointing": ("step",),
}


def _probe(core: int, folder: Path) -> dict[str, Any]:
    """Measure the matmul peak in GFLOP/s and read the versions."""
    output, _ = start("worker.py", "probe", core, folder / "probe.log").communicate()
    probe: dict[str, Any] = json.loads(output)
    return probe


def _versions(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Read the versions in the environment of vLLM."""
    output, _ = start("worker.py", "versions", args.core, folder / "versions.log", args.vllm_python).communicate()
    versions: dict[str, Any] = json.loads(output)
    return versions


def _workloads(args: argparse.Namespace) -> list[tuple[str, int]]:
    """List settings with the lengths of their responses; puzzles have natural ends."""
    lengths = {name: args.response_tokens if name in RANDOM else args.response_tokens[:1] for name in args.settings}
    return [(name, tokens) for name in args.settings for tokens in lengths[name]]


def _build_workload(setting: str, response_tokens: int, args: argparse.Namespace, folder: Path) -> Workload:
    folder.mkdir()
    spec = {
        "setting": setting,
        "folder": str(folder),
        "num_prompts": (args.warmups + args.runs) * args.prompts_per_step,
        "response_tokens": response_tokens,
        "model": {"shipped": args.model, "trained": args.trained}.get(setting),
        "recipe": args.recipe,
        "balanced": args.balanced,
        "seed": args.seed,
    }
    log = folder / "workload.log"
    process = start("build_workload.py", json.dumps(spec), args.core, log)
    process.communicate()
    lines = log.read_text(encoding="utf-8").splitlines()
    if process.returncode:
        raise SystemExit(f"could not build the workload {setting}:\n" + "\n".join(lines[-20:]))
    _say("\n".join(line for line in lines if line.startswith(("workload", "  "))))
    return Workload.read(folder)


def _jobs(workload: Workload, quantity: Quantity, num_rollouts: int, args: argparse.Namespace) -> list[Job]:
    """List the jobs of one comparison."""
    largest = max((n for n in args.num_rollouts if n <= args.peer_limit), default=0)
    jobs = []
    for peer in args.peers:
        if quantity not in MEASURES[peer]:
            continue
        if peer != "ours" and num_rollouts > args.peer_limit:
            continue
        if peer == "trl-checkpointing" and num_rollouts != largest:
            continue  # one N is enough for the memory of TRL with gradient checkpointing
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
    """Measure jobs side by side: load all, then run them in turns."""
    limits = Limits(args.runs, args.warmups, args.cell_s)
    children = []
    for job in jobs:
        log = Path(job.workload_folder) / f"{job.quantity}-{job.peer}-{job.num_rollouts}.log"
        python = args.vllm_python if job.peer == "vllm" else sys.executable
        children.append(Child(job, limits, args.core, log, python))
    while waiting := [child for child in children if not child.is_done]:
        for child in waiting:
            child.take_turn()
    for child in children:
        cell = child.finish()
        if cell.runs:
            job = cell.job
            _say(
                f"  {job.quantity} {job.peer} N={job.num_rollouts}: {cell.seconds:.4g} s in {len(cell.runs)} runs, "
                f"{cell.above_baseline_bytes / 1e6:.0f} MB above the model"
            )
        yield cell


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", type=_words, default=["full", "low", "shipped", "trained"])
    parser.add_argument("--response-tokens", type=_numbers, default=[64], help="lengths of random models' responses")
    parser.add_argument("--quantities", type=_words, default=list(QUANTITIES))
    parser.add_argument("--peers", type=_words, default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--num-rollouts", type=_numbers, default=[16, 64, 256, 512, 2048])
    parser.add_argument("--prompts-per-step", type=int, default=1)
    parser.add_argument("--peer-limit", type=int, default=512, help="largest N for the peers")
    parser.add_argument("--runs", type=int, default=5, help="counted runs; tables show their medians")
    parser.add_argument("--warmups", type=int, default=1, help="dropped runs before the counted ones")
    parser.add_argument("--cell-s", type=float, default=60.0, help="seconds for all runs of a cell")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's per-device batch")
    parser.add_argument(
        "--model",
        default=str(SOURCE / "brorl" / "quickstart_model"),
        help="checkpoint folder of the setting `shipped` (default: the model of the package)",
    )
    parser.add_argument("--trained", help="checkpoint of `brorl train` for the setting `trained`")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM, made by vllm_environment.sh")
    parser.add_argument("--recipe", default="quickstart", help="recipe of the puzzles for these two settings")
    parser.add_argument("--balanced", action="store_true", help="only puzzles with pass rates from 1/8 to 7/8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="JSON file with every run")
    parser.add_argument("--keep", type=Path, help="empty folder for models and logs (temporary)")
    args = parser.parse_args()
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject unknown names, and leave out settings and peers whose option is missing."""
    for flag, known in (("settings", SETTINGS), ("quantities", QUANTITIES), ("peers", PEERS)):
        if unknown := set(getattr(args, flag)) - set(known):
            parser.error(f"--{flag}: no {sorted(unknown)}; choose from {', '.join(known)}")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty; name a new folder")
    if args.vllm_python and not os.access(args.vllm_python, os.X_OK):
        parser.error(f"--vllm-python {args.vllm_python} is not a program; make it with benchmarks/vllm_environment.sh")
    if "trained" in args.settings and not args.trained:
        _say("no --trained CHECKPOINT given: the setting trained is left out")
        args.settings = [name for name in args.settings if name != "trained"]
    if "vllm" in args.peers and not args.vllm_python:
        _say("no --vllm-python PYTHON given: the peer vllm is left out")
        args.peers = [name for name in args.peers if name != "vllm"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _write(args: argparse.Namespace, versions: dict[str, Any], results: Results, complete: bool) -> None:
    """Write the machine, versions, runs, medians and tables to `--output`, if given."""
    if not args.output:
        return
    record = {
        "complete": complete,
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
        "versions": versions,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        **results.record(),
        "markdown": markdown(results, args.runs),
    }
    unfinished = args.output.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(args.output)  # an interruption leaves a readable file


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
    """Measure, print the tables and write the JSON file."""
    args = _arguments()
    began = time.perf_counter()
    with _work_folder(args.keep) as folder:
        probe = _probe(args.core, folder)
        versions = probe["versions"] | ({"vllm's environment": _versions(args, folder)} if "vllm" in args.peers else {})
        results = Results([], max(probe["matmul_gflops"].values()))
        for setting, tokens in _workloads(args):
            workload = _build_workload(setting, tokens, args, folder / f"{setting}-{tokens}")
            for quantity in args.quantities:
                for num_rollouts in args.num_rollouts:
                    jobs = _jobs(workload, quantity, num_rollouts, args)
                    entries = [Entry(workload, cell) for cell in _compare(jobs, args)]
                    results = Results([*results.entries, *entries], results.matmul_gflops)
                    _write(args, versions, results, complete=False)
        _write(args, versions, results, complete=True)
    print(markdown(results, args.runs))
    _say(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
