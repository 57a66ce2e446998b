"""The cost of a step of each arm, from a few real steps before a comparison: groups that are drawn again included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from brorl.comparison.arm_plans import run_config
from brorl.comparison.arm_runs import ArmRun, progress_of
from brorl.comparison.plan import TRIAL, Arguments, ComparisonPlan, arm_folders, fit_budget
from brorl.comparison.run_processes import finish_runs
from brorl.comparison.slots import Slot
from brorl.comparison.view import ComparisonView
from brorl.config.reading import dump_yaml, with_settings
from brorl.cost import Budget
from brorl.runs.run_directory import RunDirectory
from brorl.storage import output_folder, replace_file, storage_errors

_STEPS = 3  # whose median is the cost of a step: the first one contains startup
_QUICK = {"evaluation.num_prompts": 1, "tracking.to": []}


def fitted(
    plan: ComparisonPlan, arguments: Arguments, folder: Path, slots: Sequence[Slot], console: Console
) -> ComparisonPlan:
    """Return the plan with a budget that fits a few steps of every arm; steps as the unit always fit."""
    if plan.unit == "steps" or any(arm.run is not None for arm in plan.arms):
        return plan
    console.print("a few steps of each arm, for their cost", markup=False)
    with output_folder(folder), RunDirectory(folder).locked():
        cost_of = costs_of_steps(plan, folder, slots)
        return fit_budget(plan, arguments, cost_of) if cost_of else plan


def costs_of_steps(plan: ComparisonPlan, folder: Path, slots: Sequence[Slot]) -> dict[str, float]:
    """Return the cost of a step by arm, in the unit of the plan; without arms that made none."""
    folders = arm_folders(plan.arms)
    with TemporaryDirectory(prefix=TRIAL, dir=folder) as scratch:
        runs = []
        for arm in plan.arms:
            directory = Path(scratch) / folders[arm.name]
            run = ArmRun(arm.name, 0, directory.with_name(f"{directory.name}.yaml"), directory, Budget("steps", _STEPS))
            config = with_settings(run_config(arm, 0, directory, run.budget), _QUICK)
            with storage_errors(folder):
                directory.parent.mkdir(parents=True, exist_ok=True)
                replace_file(run.recipe, dump_yaml(config).encode())
            runs.append(run)
        finish_runs(runs, slots, ComparisonView(Console(quiet=True), runs))
        costs = {run.arm: progress_of(run).costs_of_steps(plan.unit) for run in runs}
    return {arm: median(of_arm) for arm, of_arm in costs.items() if of_arm}
