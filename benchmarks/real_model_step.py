"""What a step of a real model costs: `examples/real_model/recipe.yaml` with 16 x 8 and 64 x 2 rollouts.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/real_model_step.py

In the root of the project, with the model and the data of docs/tutorials/real_model.md in `runs/`. A learning rate of
1e-9 leaves the model as it is, and no group is dropped, so all steps are alike. Prints the table of the page: medians
of 5 steps after a first one, by `brorl train`'s own metrics. It takes about 6 minutes of a quiet core.
"""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness import table

from brorl import train

RECIPE = Path("examples/real_model/recipe.yaml")
SHAPES = ((16, 8), (64, 2))  # N and prompts
NUM_STEPS = 5  # and a first one that does not count


def step(num_rollouts: int, num_prompts: int) -> tuple[str, ...]:
    """Return the cells of a number of rollouts and of prompts."""
    settings: dict[str, Any] = {
        "rollouts_per_prompt": num_rollouts,
        "prompts_per_step": num_prompts,
        "steps": NUM_STEPS + 1,
        "report": False,
        "dynamic_sampling": {"enabled": False},
        "optimizer": {"learning_rate": 1e-9},
        "evaluation": {"num_prompts": 0, "sources": []},
        "diagnostics": {"held_out_check_every": 0},
    }
    with TemporaryDirectory() as scratch:
        done = train(str(RECIPE), progress=False, output_dir=f"{scratch}/run", **settings)
    counted = [record for record in done.metrics if record.update][1:]
    seconds = [median(getattr(record.seconds, part) for record in counted) for part in _PARTS]
    totals = ("sampled_tokens", "unique_tokens")
    sampled, distinct = (median(getattr(r.sampling, name) for r in counted) for name in totals)
    print(json.dumps({"N": num_rollouts, "seconds": [asdict(r.seconds) for r in counted]}), flush=True)
    times = (f"{value:.2f} s" for value in seconds)
    return (f"{num_rollouts} x {num_prompts}", *times, f"{sampled:,.0f}", f"{distinct:,.0f}")


_PARTS = ("generation", "verification", "training", "total")
_COLUMNS = ("N x prompts", "sampling", "verifying", "learning", "step", "sampled tokens", "distinct tokens")

if __name__ == "__main__":
    print(table(_COLUMNS, [step(*shape) for shape in SHAPES]))
