"""The second part of the study (docs/explanation/study.md): estimators in which N is part of the objective.

    python examples/plateau/objectives.py three              # all stages of a task: model, plateau, tries, verdict
    python examples/plateau/objectives.py four tries         # one stage

In: a task (three, four or five). Out: runs and a comparison under runs/plateau/TASK. A stopped stage continues. Seconds
are CPU seconds of one thread, so that other load on the machine hardly changes them. `tries` uses another seed and
other held-out puzzles than `verdict`. REHEARSE=1 runs everything in a few minutes, with results that mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import brorl
from brorl.training.journal import Ending

REHEARSAL = bool(os.environ.get("REHEARSE"))
ROOT = Path(os.environ.get("OUT", "runs/plateau"))
SEED, SKIPPED = 100, 256  # of tries; verdicts have the seeds from 0 and the first 256 held-out puzzles
PAPER, GRPO, MAXRL = ({"estimator": name} for name in ("reinforce_pp_baseline", "grpo", "maxrl"))
Settings = dict[str, Any]

WAY = {"three": (1e-4, 500), "four": (3e-4, 200)}  # learning rate and steps of N = 16 on the way to its plateau
MODEL = {"four": ("4", "9"), "five": ("5", "6")}  # numbers of a puzzle, largest number; three has the shipped model
BUDGET = {"three": 200.0, "four": 90.0, "five": 90.0}


def arm(n: int, prompts: int, rate: float, advantage: Settings | None = None, **more: Any) -> Settings:
    """Return the settings of an arm."""
    settings = {"rollouts_per_prompt": n, "prompts_per_step": prompts, "optimizer.learning_rate": rate, **more}
    return settings if advantage is None else settings | {f"advantage.{key}": value for key, value in advantage.items()}


def two(fraction: float, advantage: Settings, rate: float) -> Settings:
    """Return phases: MaxRL until a fraction of the budget, then another objective with its own learning rate."""
    sharpen = {"name": "sharpen", "advantage": advantage, "learning_rate": rate}
    return {"phases": [{"name": "broaden", "until": fraction, "advantage": MAXRL}, sharpen]}


SUB = {"optimizer.max_responses_per_outcome": 16}  # learning is most of the cost of N = 512 where responses differ
TRIES: dict[str, dict[str, dict[str, tuple[float, Settings]]]] = {  # by task, start and name: seconds, settings
    "three": {
        "500": {
            "n16-maxrl-1e-4": (45, arm(16, 64, 1e-4, MAXRL)),
            "n16-maxrl-3e-4": (45, arm(16, 64, 3e-4, MAXRL)),
            "n16-maxrl-p256-1e-3": (45, arm(16, 256, 1e-3, MAXRL)),
            "n128-maxrl-p64-6e-4": (45, arm(128, 64, 6e-4, MAXRL)),
            "n512-maxrl-1e-4": (45, arm(512, 16, 1e-4, MAXRL)),
            "n512-maxrl-3e-4": (45, arm(512, 16, 3e-4, MAXRL)),
            "n512-maxrl-p32-5e-4": (45, arm(512, 32, 5e-4, MAXRL)),
            "n512-maxrl-p64-1e-3": (45, arm(512, 64, 1e-3, MAXRL)),
            "n16-two-rpp": (90, arm(16, 64, 3e-4, **two(0.5, PAPER, 1e-4))),
            "n512-two-grpo": (90, arm(512, 64, 1e-3, **two(0.33, GRPO, 5e-4))),
            "n512-two-rpp": (90, arm(512, 64, 1e-3, **two(0.33, PAPER, 3e-4))),
            "n512-anneal-p64-1e-3": (90, arm(512, 64, 1e-3, MAXRL | {"final_order": 1})),
        },
        "start": {
            "n512-maxrl-p32-5e-4": (100, arm(512, 32, 5e-4, MAXRL)),
            "n512-power.75-p32-5e-4": (100, arm(512, 32, 5e-4, {"estimator": "power", "alpha": 0.75})),
        },
    },
    "four": {
        "200": {
            "n16-maxrl-3e-4": (90, arm(16, 64, 3e-4, MAXRL)),
            "n16-maxrl-1e-3": (90, arm(16, 64, 1e-3, MAXRL)),
            "n128-maxrl-1e-3": (90, arm(128, 64, 1e-3, MAXRL)),
            "n512-maxrl-1e-3": (90, arm(512, 64, 1e-3, MAXRL)),
            "n512-maxrl-p64-sub16-1e-3": (90, arm(512, 64, 1e-3, MAXRL, **SUB)),
            "n512-T15-sub16": (90, arm(512, 64, 1e-3, MAXRL | {"order": 15}, **SUB)),
        }
    },
    "five": {},  # the arms of `four`
}

VERDICT: dict[str, dict[str, Settings]] = {
    "three": {
        "16 paper": arm(16, 64, 1e-4, PAPER),
        "16 two": arm(16, 64, 3e-4, **two(0.5, PAPER, 1e-4)),
        "512 two": arm(512, 64, 1e-3, **two(0.2, GRPO, 5e-4)),
    },
    "four": {
        "16 paper": arm(16, 64, 3e-4, PAPER),
        "16 maxrl": arm(16, 64, 1e-3, MAXRL),
        "128 maxrl": arm(128, 64, 1e-3, MAXRL),
        "512 maxrl": arm(512, 64, 1e-3, MAXRL),
    },
    "five": {
        "16 paper": arm(16, 64, 3e-4, PAPER),
        "16 maxrl": arm(16, 64, 1e-3, MAXRL),
        "128 maxrl": arm(128, 64, 1e-3, MAXRL),
        "512 maxrl": arm(512, 64, 1e-3, MAXRL, **SUB),
    },
}


def recipe(task: str) -> str:
    """Return the recipe of a task."""
    return f"examples/plateau/{task}.yaml"


def checkpoint(task: str, point: str) -> str:
    """Return the model of a start: `start`, or a step of the run of N = 16."""
    if point == "start":
        return "quickstart" if task == "three" else str(ROOT / task / "model")
    return str(ROOT / task / "n16" / "checkpoints" / f"step-{int(point):06d}")


def model(task: str) -> None:
    """Make the model of a task, unless it is shipped."""
    if task in MODEL and not (ROOT / task / "model").is_dir():
        numbers, largest = MODEL[task]
        command = [sys.executable, "scripts/make_quickstart_model.py", "--output", str(ROOT / task / "model")]
        steps = "100" if REHEARSAL else "5000"
        subprocess.run([*command, "--num-numbers", numbers, "--max-number", largest, "--steps", steps], check=True)


def way(task: str) -> None:
    """Train N = 16 with the paper's advantages to its plateau."""
    if task in WAY:
        rate, steps = WAY[task]
        settings = {
            "model": checkpoint(task, "start"), "steps": 4 if REHEARSAL else steps,
            "checkpoint_every": 2 if REHEARSAL else 50, "keep_checkpoints": 0, "optimizer.learning_rate": rate,
            "evaluation.every": 50, "evaluation.num_prompts": 128, **small(),
        }  # fmt: skip
        finish(task, ROOT / task / "n16", settings)


def finish(task: str, folder: Path, settings: Settings) -> None:
    """Train one run, continue it if it was stopped, or leave it if it is complete."""
    done = folder / "complete"
    if done.exists():
        return
    if (folder / "config.yaml").exists():
        result = brorl.train(str(folder), resume=True)
    else:
        result = brorl.train(recipe(task), output_dir=str(folder), seed=SEED, report=False, **settings)
    if result.ending is Ending.INTERRUPTED:
        sys.exit(f"{folder} was stopped; the same command continues it")
    done.touch()


def tries(task: str) -> None:
    """Train every try once."""
    for point, arms in TRIES[task].items():
        for name, (seconds, settings) in arms.items():
            folder = ROOT / task / "tries" / point / name
            limit = 1.0 if REHEARSAL else seconds
            given = {
                "model": checkpoint(task, "4" if REHEARSAL and point != "start" else point),
                "budget.unit": "seconds", "budget.limit": limit, "budget.marks": [limit / 4, limit / 2],
                "evaluation.every": 0, "evaluation.num_prompts": 192, "evaluation.skip_prompts": SKIPPED,
                "engine.clock": "cpu", "steps": None, **settings, **small(),
            }  # fmt: skip
            finish(task, folder, given)


def verdict(task: str) -> None:
    """Compare the chosen arms over seeds."""
    point = str(WAY[task][1]) if task in WAY else "start"
    recipes = ROOT / task / "recipes"
    recipes.mkdir(parents=True, exist_ok=True)
    from ruamel.yaml import YAML

    arms = []
    for name, settings in VERDICT[task].items():
        arms.append(recipes / f"{name}.yaml")
        with arms[-1].open("w") as file:
            YAML(typ="safe").dump(brorl_settings(task) | settings, file)
    budget = 10.0 if REHEARSAL else BUDGET[task]  # a step is at most 5% of it
    brorl.compare(
        *arms, checkpoint=checkpoint(task, "4" if REHEARSAL and point != "start" else point), match="seconds",
        budget=budget, marks=[budget / 4, budget / 2] if task in WAY else 1,  # evaluations of `five` are slow
        seeds=2 if REHEARSAL else int(os.environ.get("SEEDS", "5")),
        jobs=int(os.environ.get("JOBS", "0")) or None, output_dir=ROOT / task / "verdict",
        **{"engine.clock": "cpu"} | small(),
    )  # fmt: skip


def brorl_settings(task: str) -> Settings:
    """Return the settings of a task's recipe."""
    from brorl.config.reading import read_recipe

    return read_recipe(recipe(task))


def small() -> Settings:
    """Return the settings of a rehearsal."""
    return {"evaluation.num_prompts": 8, "prompts_per_step": 4} if REHEARSAL else {}


if __name__ == "__main__":
    task, *stages = sys.argv[1:]
    for stage in stages or ("model", "way", "tries", "verdict"):
        {"model": model, "way": way, "tries": tries, "verdict": verdict}[stage](task)
