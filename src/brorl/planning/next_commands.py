"""The commands that follow a plan: one trains with the recommendation, one measures it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brorl.config.reading import options_of
from brorl.format import plain
from brorl.planning.recommendation import PlanRow, RolloutPlan
from brorl.planning.report import PlanReport

_NOT_COMPARED = ("rollouts_per_prompt", "prompts_per_step", "seed", "steps", "evaluation.every")  # compare sets these
_COMPARED_STEPS = 100  # length of the recommended comparison
_LARGE_N = 512


def next_commands(
    report: PlanReport, recipe: str | Path, given: Mapping[str, Any], is_of_a_run: bool
) -> tuple[str | None, str | None]:
    """Return the commands that train with the recommendation and that measure the plan, as far as they exist.

    `given` has the settings that replace those of the recipe, which may be that of a run.
    """
    plan = report.plan
    row = plan.recommended
    if row is None:
        return None, None
    model = given.get("model")
    others = {name: value for name, value in given.items() if name != "model"}
    trained = {"model": model} if model else {}
    if is_of_a_run:
        trained["output_dir"] = None  # the run's own directory is not empty
    trained |= others | {"rollouts_per_prompt": row.num_rollouts, "prompts_per_step": row.budget_prompts}
    train = ["brorl", "train", str(recipe), *options_of(trained)]
    if not (sweep := _sweep(plan, row)):
        return shlex.join(train), None
    compared = {"from": model} if model else {}
    compared |= {name: value for name, value in others.items() if name not in _NOT_COMPARED}
    budget = plain(_COMPARED_STEPS * plan.budget).replace(",", "")
    compare = ["brorl", "compare", str(recipe), *options_of(compared), *sweep, "--budget", budget]
    return shlex.join(train), shlex.join(compare)


def _sweep(plan: RolloutPlan, chosen: PlanRow) -> list[str]:
    """Return the options that compare a few N of the plan, each with the prompts that fit its time."""
    fitting = [row for row in plan.rows if row.budget_prompts]
    if not fitting:
        return []
    wanted = {fitting[0].num_rollouts, plan.rows[plan.recipe].num_rollouts, chosen.num_rollouts, _LARGE_N}
    arms = [row for row in fitting if row.num_rollouts in wanted]
    if len(arms) < 2:
        return []
    rollouts = ",".join(str(row.num_rollouts) for row in arms)
    prompts = ",".join(str(row.budget_prompts) for row in arms)
    return ["--sweep", f"rollouts_per_prompt={rollouts}", "--sweep", f"prompts_per_step={prompts}"]
