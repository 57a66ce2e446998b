"""Compares the predictions of `brorl plan` on the shipped model with training and sampling at several N.

    python benchmarks/plan_check.py [--steps 20] [--prompts 1024] [--repeats 3] [--rollouts 16,128,512] [--out DIR]

Every training run is a child process with the recipe's 16 prompts per step, a learning rate of practically 0, which
keeps the policy of the plan, no evaluation and no held-out check; seconds are what its metrics call
seconds.total. Shares and tokens are those of fresh prompts of another seed.
Plans and runs alternate, so a change of the machine's speed affects both. Prints the tables of
docs/how-to/plan.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import table

SETTINGS = {
    "optimizer.learning_rate": 1e-15,
    "evaluation.num_prompts": 0,
    "diagnostics.held_out_check_every": 0,
    "checkpoint_every": 1_000_000,
}
FRESH_SEED = 987_654


def child_train(num_rollouts: int, steps: int, seed: int) -> dict[str, Any]:
    """Train in this process and return seconds and fractions of its metrics."""
    from brorl.assemble import build_run
    from brorl.config.reading import make_config, read_recipe
    from brorl.runs.run_directory import RunDirectory
    from brorl.training.loop import train_run

    def build(folder: str, number_of_steps: int) -> Any:
        overrides = {**SETTINGS, "rollouts_per_prompt": num_rollouts, "steps": number_of_steps, "seed": seed}
        config = make_config(read_recipe("quickstart"), overrides, "quickstart")
        return build_run(config, RunDirectory(Path(folder)), lambda _: None)

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        train_run(*build(first, 1))  # what is imported or set up once is no part of a step
        train_run(*build(second, steps))
        records = [r for r in RunDirectory(Path(second)).read_metrics() if r.step > 2]
    names = ("groups", "unique_tokens", "sampled_tokens")
    total = {n: sum(getattr(r.sampling, n) for r in records) for n in names}
    phases = ("diagnostics", "generation", "storing", "total", "training", "verification")
    return {
        "seconds": {n: sum(getattr(r.seconds, n) or 0.0 for r in records) / len(records) for n in phases},
        "unique_tokens": total["unique_tokens"] / total["groups"],
        "groups_per_step": total["groups"] / len(records),
    }


def child_sample(num_rollouts: int, num_prompts: int) -> dict[str, Any]:
    """Sample fresh prompts and return the fraction of mixed groups and the unique tokens of a group."""
    from brorl.config.reading import make_config, read_recipe
    from brorl.planning.step_cost import sample_groups
    from brorl.training.inputs import prepare_run
    from brorl.training.local_parts import LocalParts

    config = make_config(read_recipe("quickstart"), {"seed": FRESH_SEED}, "quickstart")
    parts = LocalParts.load(config, prepare_run(config, config.model))
    mixed = tokens = 0
    for start in range(0, num_prompts, 16):
        groups = sample_groups(parts, parts.stream.take(16), num_rollouts, FRESH_SEED + start).groups
        mixed += sum(0 < g.num_correct < num_rollouts for g in groups)
        tokens += sum(g.tree.num_unique_tokens for g in groups)
    return {"mixed": mixed / num_prompts, "unique_tokens": tokens / num_prompts}


def in_child(*command: object) -> str:
    """Run a program of Python with one thread, and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def plan(out: Path, seed: int, rollouts: Sequence[int]) -> dict[str, Any]:
    """Run `brorl plan` in a child process and return its JSON."""
    in_child(
        "-m", "brorl", "plan", f"--seed={seed}", f"--output-dir={out}", f"--rollouts={','.join(map(str, rollouts))}"
    )
    record: dict[str, Any] = json.loads((out / "plan.json").read_text())
    return record


def tables(rollouts: Sequence[int], plans: list[dict[str, Any]], runs: Any, samples: Any) -> str:
    """Return the median plan and the median run, how far off the worst plan is, and the seconds of each phase."""
    rows, phases = [], []
    names = ["generation", "verification", "training", "storing", "diagnostics", "total"]
    for n in rollouts:
        planned = [next(r for r in p["rows"] if r["num_rollouts"] == n) for p in plans]
        tokens, seconds = samples[n]["unique_tokens"], median(r["seconds"]["total"] for r in runs[n])
        compared = [
            ("mixed groups", [r["mixed"]["value"] for r in planned], samples[n]["mixed"], ".3f"),
            ("unique tokens of a group", [r["unique_tokens"]["value"] for r in planned], tokens, ".1f"),
            ("seconds per step", [r["seconds"]["total"] for r in planned], seconds, ".3f"),
        ]
        for name, values, measured, form in compared:
            middle, off = median(values), [value / measured - 1 for value in values]
            errors = (f"{middle / measured - 1:+.1%}", f"{max(off, key=abs):+.1%}")
            rows.append((n, name, f"{middle:{form}}", f"{measured:{form}}", *errors))
        pairs = ([[r["seconds"].get(name, 0.0) for r in some] for some in (planned, runs[n])] for name in names)
        phases.append((n, *(f"{median(a):.3f} / {median(b):.3f}" for a, b in pairs)))
    first = table(("N", "", "planned", "measured", "off", "worst plan off"), rows)
    return f"{first}\n\nSeconds of a step by phase, planned / measured:\n\n{table(('N', *names), phases)}"


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("train", "sample"):
        numbers = [int(a) for a in sys.argv[2:]]
        print(json.dumps(child_train(*numbers) if sys.argv[1] == "train" else child_sample(*numbers)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", default="16,128,512")
    parser.add_argument("--out", type=Path, default=None, help="keep the plans and all measurements here")
    parsed = parser.parse_args()
    rollouts = [int(n) for n in parsed.rollouts.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        out = parsed.out or Path(temporary)
        plans: list[dict[str, Any]] = []
        runs: dict[int, list[dict[str, Any]]] = {n: [] for n in rollouts}
        for repeat in range(parsed.repeats):
            plans.append(plan(out / f"plan-{repeat}", repeat, rollouts))
            for n in rollouts:
                runs[n].append(json.loads(in_child(__file__, "train", n, parsed.steps, 100 + repeat)))
        samples = {n: json.loads(in_child(__file__, "sample", n, parsed.prompts)) for n in rollouts}
        if parsed.out:
            out.mkdir(parents=True, exist_ok=True)
            (out / "measured.json").write_text(json.dumps({"runs": runs, "samples": samples}, indent=2))
    print(
        f"{parsed.repeats} plans of 64 prompts x 64 rollouts, {parsed.repeats} runs of {parsed.steps} steps for each N "
        f"(medians), {parsed.prompts} fresh prompts\n"
    )
    print(tables(rollouts, plans, runs, samples))
    for best in (record["recommendation"] for record in plans):
        print(f"recommended: N = {best['rollouts_per_prompt']} x {best['prompts_per_step']}, tied {best['tied']}")


if __name__ == "__main__":
    main()
