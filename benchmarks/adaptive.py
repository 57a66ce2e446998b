"""Adaptive rollouts against a fixed N at equal samples.

In: options. Out: a Markdown table and, with `--output`, all numbers behind it. Each run is a
`brorl train` of the shipped model; arms take turns within a seed, on one thread. Every run continues
until it has drawn the samples of the last mark, including refills. Held-out pass@k at a mark is interpolated between
evaluations.

    python benchmarks/adaptive.py --folder runs/adaptive --output adaptive.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import table
from scipy.stats import t as student

from brorl.cli import main as brorl

MARKS = (5_000, 10_000)  # cumulative samples
KS = (1, 16, 256)
FIRST = 6  # steps after which a run's length is foretold
ARMS = {
    "fixed 16": ["--rollouts_per_prompt=16"],
    "fixed 8": ["--rollouts_per_prompt=8"],
    "adaptive": [
        "--adaptive.enabled=true",
        "--rollouts_per_prompt=16",
        "--adaptive.pilot_rollouts=8",
        "--adaptive.max_rollouts=128",
    ],
}
PUZZLES = {
    "quickstart": ["--evaluation.every=8"],  # 3,889 training prompts, pass@1 0.09, pass@256 0.98
    # 22,194 training prompts, pass@1 0.02, pass@256 0.25
    "hard": ["--evaluation.every=2", "--data.sources={task: countdown, max_number: 25}"],
    "few": ["--evaluation.every=8", "--data.held_out_fraction=0.97"],  # the quickstart's, but 163 training prompts
}
COMMON = [
    "--prompts_per_step=16",
    "--evaluation.num_prompts=96",
    "--store_rollouts_every=0",
    "--diagnostics.held_out_check_every=0",
    "--checkpoint_every=1000",
    "--keep_checkpoints=1",
    "--engine.threads=1",
]


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples_of(records: list[dict[str, Any]]) -> list[int]:
    """Cumulative samples after each record."""
    return np.cumsum([r["sampling"]["samples"] if "sampling" in r else 0 for r in records]).tolist()


def command(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = brorl(list(arguments))
    if code:
        raise SystemExit(f"brorl {' '.join(arguments)} ended with {code}")


def run_to_last_mark(run: Path, settings: list[str]) -> list[dict[str, Any]]:
    command("train", "quickstart", *COMMON, *settings, f"--steps={FIRST}", "--output_dir", str(run))
    while samples_of(records := read(run))[-1] < MARKS[-1]:
        step, missing = records[-1]["step"], MARKS[-1] / samples_of(records)[-1]
        command("resume", str(run), f"--steps={max(step + 1, round(step * missing))}")
    return records


def at_marks(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return everything that is compared, at each mark."""
    samples = samples_of(records)
    evaluated = [i for i, r in enumerate(records) if "evaluation" in r]
    found: dict[str, list[float]] = {}
    for k in KS:
        values = [records[i]["evaluation"]["pass_at"][str(k)]["value"] for i in evaluated]
        found[f"pass@{k}"] = np.interp(MARKS, [samples[i] for i in evaluated], values).tolist()

    def total(section: str, name: str) -> list[float]:
        sums = np.cumsum([r[section].get(name, 0) if section in r else 0 for r in records])
        return np.interp(MARKS, samples, sums).tolist()

    groups, mixed = np.array(total("sampling", "groups")), np.array(total("sampling", "groups_mixed"))
    found["steps"] = np.interp(MARKS, samples, [r["step"] for r in records]).tolist()
    found["prompts"] = groups.tolist()
    found["mixed groups"] = mixed.tolist()
    found["mixed fraction"] = (mixed / groups).tolist()
    found["with a success"] = ((mixed + total("sampling", "groups_all_correct")) / groups).tolist()
    found["mean N"] = (MARKS / groups).tolist()
    found["extended"] = (np.array(total("sampling", "groups_widened")) / groups).tolist()
    found["extended, then mixed"] = (np.array(total("sampling", "groups_widened_mixed")) / groups).tolist()
    return found


def interval(differences: np.ndarray) -> str:
    """Mean and 95% t interval."""
    half = student.ppf(0.975, differences.size - 1) * differences.std(ddof=1) / np.sqrt(differences.size)
    return f"{differences.mean():+.3f} ± {half:.3f}"


def tables(results: dict[str, dict[str, list[dict[str, list[float]]]]]) -> str:
    """Return the means of everything, and the differences of pass@k, for each mix of puzzles."""
    scores = [f"pass@{k}" for k in KS]
    shown = [*scores, "mixed fraction", "with a success", "mean N", "extended", "extended, then mixed"]
    shown += ["mixed groups", "steps"]
    texts = []
    for puzzles, arms in results.items():
        means, differences = [], []
        for place, mark in enumerate(MARKS):
            at = {arm: {q: np.array([r[q][place] for r in runs]) for q in shown} for arm, runs in arms.items()}
            for arm, values in at.items():
                cells = (f"{v.mean():.3f}" if v.mean() < 1 else f"{v.mean():,.1f}" for v in values.values())
                means.append((f"{mark:,}", arm, *cells))
                if arm != "adaptive":
                    against = (interval(at["adaptive"][q] - values[q]) for q in scores)
                    differences.append((f"{mark:,}", arm, *against))
        texts += [f"\n### {puzzles}\n", table(("samples", "arm", *shown), means), ""]
        texts.append(table(("samples", "adaptive minus", *scores), differences))
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go; must be new")
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--puzzles", default="quickstart,few", help=f"of {', '.join(PUZZLES)}")
    options = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, list[float]]]]] = {}
    for seed in range(1, options.seeds + 1):
        for puzzles in options.puzzles.split(","):
            for arm, settings in ARMS.items():
                started = time.perf_counter()
                run = options.folder / f"{puzzles}-{arm.replace(' ', '')}-{seed}"
                records = run_to_last_mark(run, [*settings, *PUZZLES[puzzles], f"--seed={seed}"])
                results.setdefault(puzzles, {}).setdefault(arm, []).append(at_marks(records))
                print(f"{run}: {records[-1]['step']} steps, {time.perf_counter() - started:.0f} s", flush=True)
        if options.output:
            options.output.write_text(json.dumps({"marks": MARKS, "results": results}, indent=1))
    print(tables(results))


if __name__ == "__main__":
    main()
