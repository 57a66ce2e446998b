"""Learning curves of independent against systematic sampling, at equal unique tokens.

In: the recipe `quickstart`. Out: one training run per N, scheme and seed (a finished run is not repeated),
and a table of the paired differences in held-out pass@k. Both arms of a pair have the same seed, so the same order
of prompts and the same held-out draws. Held-out rollouts are independent in both arms.

A curve is read at marks of cumulative unique tokens: 50% and 100% of the tokens of the cheapest run of that N,
linearly interpolated between evaluations. The table also has the difference at the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

FloatArray = NDArray[np.float64]
SCHEMES = ("iid", "systematic")
MARKS = (0.5, 1.0)


class Curve(NamedTuple):
    """Held-out results of one run, at its evaluations."""

    unique_tokens_E: FloatArray
    pass_at: dict[int, FloatArray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and of curves.json")
    parser.add_argument("--num-rollouts", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... per arm")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for num_rollouts in options.num_rollouts:
            for scheme in SCHEMES:
                train(run_folder(options.output, num_rollouts, scheme, seed), num_rollouts, scheme, seed, options.steps)
    rows = [row for n in options.num_rollouts for row in compared(options.output, n, options.seeds)]
    (options.output / "curves.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def run_folder(output: Path, num_rollouts: int, scheme: str, seed: int) -> Path:
    return output / f"n{num_rollouts}-{scheme}-seed{seed}"


def train(folder: Path, num_rollouts: int, scheme: str, seed: int, steps: int) -> None:
    """Train one run on one thread, unless it is there."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and json.loads(metrics.read_text().splitlines()[-1])["step"] == steps:
        return
    settings = {
        "rollouts_per_prompt": num_rollouts,
        "sampling.scheme": scheme,
        "seed": seed,
        "steps": steps,
        "checkpoint_every": steps,
        "store_rollouts_every": 0,
        "output_dir": folder,
    }
    command = [sys.executable, "-c", "from brorl.cli import main; raise SystemExit(main())", "train"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    print(f"{folder.name} ...", file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def read_curve(folder: Path) -> Curve:
    """Read the evaluations of a run, and the unique tokens sampled for training before each."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    unique_tokens = np.cumsum([r.get("sampling", {}).get("unique_tokens", 0) for r in records])
    evaluated = [i for i, r in enumerate(records) if "evaluation" in r]
    ks = records[0]["evaluation"]["pass_at"]
    return Curve(
        unique_tokens[evaluated].astype(np.float64),
        {int(k): np.array([records[i]["evaluation"]["pass_at"][k]["value"] for i in evaluated]) for k in ks},
    )


def compared(output: Path, num_rollouts: int, seeds: int) -> list[dict[str, float | str]]:
    """Compare the two arms of one N, paired by seed."""
    curves = {s: [read_curve(run_folder(output, num_rollouts, s, i)) for i in range(seeds)] for s in SCHEMES}
    smallest = min(float(c.unique_tokens_E[-1]) for arm in curves.values() for c in arm)
    rows: list[dict[str, float | str]] = []
    for k in curves["iid"][0].pass_at:
        for mark in (*MARKS, None):
            if mark is None:
                value = {s: np.array([c.pass_at[k][-1] for c in arm]) for s, arm in curves.items()}
            else:
                at = mark * smallest
                value = {
                    s: np.array([np.interp(at, c.unique_tokens_E, c.pass_at[k]) for c in arm])
                    for s, arm in curves.items()
                }
            difference = value["systematic"] - value["iid"]
            error = float(difference.std(ddof=1) / np.sqrt(seeds))
            rows.append({
                "num_rollouts": num_rollouts,
                "k": k,
                "at": "equal steps, the last" if mark is None else f"{mark * smallest:,.0f} unique tokens",
                "iid": float(value["iid"].mean()),
                "systematic": float(value["systematic"].mean()),
                "difference": float(difference.mean()),
                "half_width": float(student.ppf(0.975, seeds - 1)) * error,
                "seeds": seeds,
            })  # fmt: skip
    total = {s: float(np.mean([c.unique_tokens_E[-1] for c in arm])) for s, arm in curves.items()}
    for row in rows:
        row |= {f"unique_tokens_{s}": v for s, v in total.items()}
    return rows


def table(rows: list[dict[str, float | str]]) -> str:
    """Write the comparison as a Markdown table."""
    lines = [
        "| N | pass@k | read at | iid | systematic | difference, 95% interval |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['num_rollouts']} | pass@{r['k']} | {r['at']} | {r['iid']:.4f} | {r['systematic']:.4f} | "
        f"{r['difference']:+.4f} ± {r['half_width']:.4f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
