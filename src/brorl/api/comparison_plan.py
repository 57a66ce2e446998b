"""The plan of a comparison: arms, budget, evaluation points and seeds, from arguments or from a folder.

Contradictions are errors, and so is a folder with another comparison.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import brorl
from brorl.api.arm_runs import ArmRun
from brorl.assemble.comparison import ArmPlan, differences, read_arms, reject_owned, run_config, sweep_arms
from brorl.comparison.reading import read_run_scores, read_spec
from brorl.config.reading import ConfigOrPath, dump_yaml, make_config
from brorl.cost import UNIT_WORDS, UNITS, Budget, Unit
from brorl.errors import UserError
from brorl.format import exact
from brorl.runs.run_record import SPEC_FILE
from brorl.storage import replace_file, storage_errors

DEFAULT_ARMS = ("plateau-16", "plateau-512")
_BUDGET_S, _DEFAULT_POINTS = 30.0, 4  # of the default arms: five minutes on two cores
_NUM_POINTS, _SEEDS = 8, 5
_SWEPT = "quickstart"  # without a recipe
_CLOSE = 1e-3  # a budget this near to an evaluation of a finished run means that evaluation
_LONGEST_NAME = 60  # of a folder of an arm


@dataclass(frozen=True)
class Arguments:
    """The arguments of `brorl.compare` that make a new plan; None and empty ones are not given."""

    arms: tuple[ConfigOrPath, ...] = ()
    sweep: Mapping[str, Sequence[Any]] | None = None
    checkpoint: str | None = None
    match: Unit | None = None
    budget: float | None = None
    marks: int | Sequence[float] | None = None
    seeds: int | None = None
    overrides: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison before it is run."""

    arms: tuple[ArmPlan, ...]
    unit: Unit
    budget: float  # of each run
    eval_points: tuple[float, ...]  # amounts at which every run is evaluated; the last is the budget
    seeds: int  # runs of each arm that is still to be run
    seeds_before: tuple[int, ...] = ()  # numbers of seeds before seeds were added

    def runs_in(self, folder: Path) -> list[ArmRun]:
        """Return the runs to make, seed by seed; the first arm changes with the seed."""
        budget = Budget(self.unit, self.budget, self.eval_points)
        folders = arm_folders(self.arms)
        runs = []
        for seed in range(self.seeds):
            turn = seed % len(self.arms)
            for arm in (*self.arms[turn:], *self.arms[:turn]):
                if arm.run is None:
                    directory = folder / folders[arm.name] / f"seed-{seed}"
                    runs.append(ArmRun(arm.name, seed, directory.with_name(f"seed-{seed}.yaml"), directory, budget))
        return runs

    def write(self, folder: Path, machine: str, jobs: int) -> None:
        """Write `compare.json` and a recipe for every run."""
        arm_of = {arm.name: arm for arm in self.arms}
        with storage_errors(folder):
            for run in self.runs_in(folder):
                run.directory.mkdir(parents=True, exist_ok=True)
                config = run_config(arm_of[run.arm], run.seed, run.directory, run.budget)
                replace_file(run.recipe, dump_yaml(config).encode())
            replace_file(folder / SPEC_FILE, json.dumps(self._spec(machine, jobs), indent=2).encode())

    def _spec(self, machine: str, jobs: int) -> dict[str, Any]:
        """Return the content of `compare.json`; paths of runs are relative to its folder."""
        folders = arm_folders(self.arms)
        arms = []
        for arm, different in zip(self.arms, differences([arm.config for arm in self.arms]), strict=True):
            n = None if arm.config.adaptive.enabled else arm.config.rollouts_per_prompt
            runs = [{"seed": seed, "path": f"{folders[arm.name]}/seed-{seed}"} for seed in range(self.seeds)]
            arms.append({
                "name": arm.name, "title": arm.title, "num_rollouts": n,
                "prompts_per_step": arm.config.prompts_per_step, "differs": different,
                "run": str(arm.run) if arm.run else None,
                "runs": [{"seed": arm.config.seed, "path": str(arm.run)}] if arm.run else runs,
                "settings": arm.config.model_dump(mode="json"),
            })  # fmt: skip
        return {
            "brorl": brorl.__version__, "checkpoint": self.arms[0].config.model, "unit": self.unit,
            "budget": self.budget, "marks": list(self.eval_points), "seeds": self.seeds,
            "seeds_before": list(self.seeds_before), "machine": machine, "jobs": jobs, "arms": arms,
        }  # fmt: skip


def arm_folders(arms: Sequence[ArmPlan]) -> dict[str, str]:
    """Return the folder of each arm by its name: the name itself if it is valid and unique as a folder's name."""
    slugs = ["".join(c if c.isalnum() or c in "=.-" else "_" for c in arm.name) for arm in arms]
    plain = len({slug.lower() for slug in slugs}) == len(slugs) and max(map(len, slugs)) <= _LONGEST_NAME
    return {
        arm.name: f"arms/{slug}" if plain else f"arms/{number}-{slug[:_LONGEST_NAME]}"
        for number, (arm, slug) in enumerate(zip(arms, slugs, strict=True), 1)
    }


def plan_in(folder: Path, arguments: Arguments) -> ComparisonPlan:
    """Read the plan of a folder; `seeds` may add to its seeds, and no other argument may be given."""
    options = {"sweep": "--sweep", "checkpoint": "--from", "match": "--match", "budget": "--budget", "marks": "--marks"}
    given = [option for name, option in options.items() if getattr(arguments, name)]
    given += [f"--{name}" for name in arguments.overrides or ()]
    if given:
        raise UserError(
            f"{folder} is a comparison already, and {given[0]} would change it; only --seeds and --jobs may"
        )
    return _with_seeds(_read_plan(folder), arguments.seeds, folder)


def plan_for(folder: Path | None, arguments: Arguments) -> ComparisonPlan:
    """Make the plan of a comparison in a folder that is empty or has the same comparison."""
    plan = _new_plan(arguments)
    if folder is None or not folder.exists():
        return plan
    if (folder / SPEC_FILE).is_file():
        before = _read_plan(folder)
        _require_same(folder, before, plan)
        return _with_seeds(before, arguments.seeds, folder)
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"--output-dir {folder} exists and is not empty; choose another folder")
    return plan


def _read_plan(folder: Path) -> ComparisonPlan:
    spec = read_spec(folder)
    source = str(folder / SPEC_FILE)
    arms = tuple(
        ArmPlan(
            name=arm["name"],
            config=make_config(arm["settings"], {}, source),
            run=Path(arm["run"]) if arm["run"] else None,
            title=arm.get("title", ""),
        )
        for arm in spec["arms"]
    )
    before = tuple(spec["seeds_before"])
    return ComparisonPlan(arms, spec["unit"], spec["budget"], tuple(spec["marks"]), spec["seeds"], before)


def _with_seeds(before: ComparisonPlan, seeds: int | None, folder: Path) -> ComparisonPlan:
    if seeds is None or seeds == before.seeds:
        return before
    if seeds < before.seeds:
        raise UserError(f"{folder} has {before.seeds} seeds already; --seeds can only add to them")
    return replace(before, seeds=seeds, seeds_before=(*before.seeds_before, before.seeds))


def _new_plan(arguments: Arguments) -> ComparisonPlan:
    arms = _arms(arguments)
    unit: Unit = arguments.match or "seconds"
    if unit not in UNITS:
        raise UserError(f"--match: {unit!r} is not a unit; the units are {', '.join(UNITS)}")
    seeds = _SEEDS if arguments.seeds is None else arguments.seeds
    if seeds < 1:
        raise UserError(f"--seeds: at least 1 is needed, got {seeds}")
    amounts = _amounts_of_finished_run(arms, unit)
    budget = _budget(arguments, unit, amounts)
    if not amounts:
        default = not (arguments.arms or arguments.sweep)
        marks = _DEFAULT_POINTS if default and arguments.marks is None else arguments.marks
        return ComparisonPlan(arms, unit, budget, _eval_points(marks, budget, unit), seeds)
    if arguments.marks:
        raise UserError(
            "--marks cannot be combined with a finished run, whose evaluation points both arms have; remove --marks"
        )
    last = next((amount for amount in amounts if abs(amount - budget) <= _CLOSE * budget), None)
    if last is None:
        raise UserError(
            f"the finished run was not evaluated at {exact(budget)} {UNIT_WORDS[unit]}; give one of: "
            f"{', '.join(map(exact, amounts))}"
        )
    return ComparisonPlan(arms, unit, last, tuple(amount for amount in amounts if amount <= last), seeds)


def _budget(arguments: Arguments, unit: Unit, amounts: Sequence[float]) -> float:
    budget = arguments.budget
    if budget is None and amounts:
        return amounts[-1]
    if budget is None and (arguments.arms or arguments.sweep or unit != "seconds"):
        raise UserError(f"the budget of each run is missing; give --budget X, in {UNIT_WORDS[unit]}")
    budget = _BUDGET_S if budget is None else float(budget)
    if not 0 < budget < float("inf"):
        raise UserError(f"--budget: an amount above 0 is needed, got {exact(budget)}")
    if unit == "steps" and not budget.is_integer():
        raise UserError(f"--budget: a whole number of steps is needed, got {exact(budget)}")
    return budget


def _arms(arguments: Arguments) -> tuple[ArmPlan, ...]:
    overrides, recipes = arguments.overrides or {}, arguments.arms
    reject_owned(overrides)
    settings = dict(overrides) | ({} if arguments.checkpoint is None else {"model": arguments.checkpoint})
    if not arguments.sweep:
        return tuple(read_arms(recipes or DEFAULT_ARMS, settings))
    if len(recipes) > 1:
        raise UserError(f"--sweep makes the arms of one recipe, not of {len(recipes)}")
    return tuple(sweep_arms(recipes[0] if recipes else _SWEPT, settings, arguments.sweep))


def _amounts_of_finished_run(arms: Sequence[ArmPlan], unit: Unit) -> list[float]:
    """Return the amounts at which a finished run among the arms was evaluated; nothing if there is none."""
    runs = [arm.run for arm in arms if arm.run is not None]
    if not runs:
        return []
    if len(runs) > 1:
        raise UserError(
            "only one arm can be a finished run, because each has its own evaluation points; give the recipes of "
            f"the others: {runs[1]}/config.yaml"
        )
    if unit == "seconds":
        raise UserError(
            f"the seconds of {runs[0]} were measured earlier, under another load, and cannot be matched now; use "
            "--match samples, unique_tokens or steps, or give its recipe to run it again"
        )
    run = read_run_scores(runs[0], 0, Budget("samples", 1))
    amounts = sorted({score.cost.of(unit) for score in run.scores} - {0.0}) if run else []
    if not amounts:
        raise UserError(f"{runs[0]} was never evaluated after its start; there is nothing to compare with")
    return amounts


def _eval_points(marks: int | Sequence[float] | None, budget: float, unit: Unit) -> tuple[float, ...]:
    """Return the amounts at which runs are evaluated, the budget being the last.

    A number of points is spread geometrically, each a factor of the square root of 2 from the next.
    """
    if marks is None or isinstance(marks, int):
        number = _NUM_POINTS if marks is None else marks
        if number < 1:
            raise UserError(f"--marks: a number of evaluation points, or amounts like 10,20,40, not {number}")
        points = [budget * 2 ** (-i / 2) for i in range(number)]
    else:
        if not all(0 < point <= budget for point in marks):
            given = ",".join(map(exact, marks))
            raise UserError(f"--marks: amounts must be above 0 and up to the budget of {exact(budget)}, got {given}")
        points = [*marks, budget]
    if unit == "steps":
        points = [max(round(point), 1) for point in points]
    rounded = {float(f"{point:.6g}") for point in points if point < budget}
    return (*sorted(point for point in rounded if point < budget), budget)


def _require_same(folder: Path, before: ComparisonPlan, now: ComparisonPlan) -> None:
    """Raise a UserError if a folder contains another comparison."""
    for name, attribute in (("unit", "unit"), ("budget", "budget"), ("evaluation points", "eval_points")):
        old, new = getattr(before, attribute), getattr(now, attribute)
        if old != new:
            raise UserError(f"{folder} contains a comparison with {name} {old}, not {new}; choose another --output-dir")
    if [(arm.config, arm.run) for arm in before.arms] != [(arm.config, arm.run) for arm in now.arms]:
        raise UserError(
            f"{folder} contains a comparison of other arms ({', '.join(arm.full_name for arm in before.arms)}) or with "
            f"other settings; choose another --output-dir, or continue that one: brorl compare {folder}"
        )
