"""Learning rates for adapters and for all weights: held-out pass@k of the shipped model before and after 30 steps.

In: options. Out: a Markdown table, the best rate of each kind, and, with `--output`, every number behind
them. Each cell is a `brorl train quickstart` in a separate process with one thread; `--jobs` of them run in parallel.
The last evaluation counts if a run ends early because no group is mixed.

    python benchmarks/lora_rates.py --folder runs/lora_rates --output lora_rates.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import table

RATES = (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2)
KS = ("1", "16", "256")
COMMON = (
    "--evaluation.every=0",  # at the start and at the end
    "--evaluation.keep_best=false",
    "--store_rollouts_every=0",
    "--diagnostics.held_out_check_every=0",
    "--checkpoint_every=1000",
    "--report=false",
)
COLUMNS = (
    "trained",
    "learning rate",
    "pass@1 before",
    "pass@1 after",
    "of all seeds",
    "pass@16 after",
    "pass@256 after",
)
Scores = dict[str, float]


def train(run: Path, rank: int, rate: float, steps: int, seed: int) -> tuple[Scores, Scores]:
    """Train, and return held-out pass@k before and after."""
    settings = {"lora.rank": rank, "optimizer.learning_rate": rate, "steps": steps, "seed": seed, "output_dir": run}
    options = (f"--{name}={value}" for name, value in settings.items())
    command = [sys.executable, "-m", "brorl", "train", "quickstart", *COMMON, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if done.returncode and not (records and "ended" in records[-1]):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    before, after = (record["evaluation"]["pass_at"] for record in (records[0], records[-1]))
    print(f"{run.name}: pass@1 {before['1']['value']:.3f} -> {after['1']['value']:.3f}", flush=True)
    return {k: before[k]["value"] for k in KS}, {k: after[k]["value"] for k in KS}


def row(result: dict[str, Any]) -> list[str]:
    """Return the means over seeds of a kind and rate, and the range of pass@1."""
    before, after = fmean(b["1"] for b in result["before"]), [fmean(a[k] for a in result["after"]) for k in KS]
    ones = [a["1"] for a in result["after"]]
    cells = [f"{before:.3f}", f"{after[0]:.3f}", f"{min(ones):.3f} to {max(ones):.3f}"]
    return [result["kind"], f"{result['rate']:.1e}", *cells, *(f"{value:.3f}" for value in after[1:])]


def best_rates(results: list[dict[str, Any]]) -> str:
    """Name the rate with the highest mean pass@1 of each kind; one at the end of the grid may not be the best."""
    said = []
    for kind in dict.fromkeys(r["kind"] for r in results):
        cells = [r for r in results if r["kind"] == kind]
        best = max(cells, key=lambda r: fmean(a["1"] for a in r["after"]))
        edge = " (end of the grid)" if best is cells[0] or best is cells[-1] else ""
        said.append(f"{kind}: {best['rate']:.1e}{edge}")
    return f"highest pass@1 at {', '.join(said)}"


def main() -> None:
    """Sweep, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the runs; must be new")
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates, ascending")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind and rate")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    kinds = {"all weights": 0, f"adapters, rank {options.rank}": options.rank}
    jobs = [(kind, rate, seed) for seed in range(options.seeds) for rate in options.rates for kind in kinds]

    def run_job(job: tuple[str, float, int]) -> tuple[Scores, Scores]:
        kind, rate, seed = job
        run = options.folder / f"rank{kinds[kind]}-rate{rate:g}-seed{seed}"
        return train(run, kinds[kind], rate, options.steps, seed)

    with ThreadPoolExecutor(options.jobs) as pool:
        scores = dict(zip(jobs, pool.map(run_job, jobs), strict=True))
    results: list[dict[str, Any]] = []
    for kind in kinds:
        for rate in options.rates:
            before, after = zip(*(scores[kind, rate, seed] for seed in range(options.seeds)), strict=True)
            results.append({"kind": kind, "rate": rate, "before": before, "after": after})
    print(f"\n{table(COLUMNS, map(row, results))}\n\n{best_rates(results)}")
    if options.output:
        named = {name: str(value) for name, value in vars(options).items()}
        options.output.write_text(json.dumps({"options": named, "results": results}))


if __name__ == "__main__":
    main()
