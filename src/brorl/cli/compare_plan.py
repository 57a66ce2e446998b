"""What `brorl compare` is asked to do: arms, budget, marks and seeds, from the command line or from a folder.

In: parsed options. Out: a `Plan` and its folder. Nothing is written; what contradicts itself, or a comparison that the
folder holds already, is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brorl.api.runs_folder import RUNS
from brorl.cli.settings import overrides_of
from brorl.errors import UserError
from brorl.format import exact

if TYPE_CHECKING:
    from brorl.assemble.comparison import ArmPlan
    from brorl.cost import Unit

_ARMS = ("quickstart-16", "quickstart")
_BUDGET_S = 40.0
_MARKS, _SEEDS = 8, 5
_CLOSE = 1e-3  # a budget this near to an evaluation of a finished run means that evaluation


@dataclass(frozen=True)
class Plan:
    """What is compared, before anything is run.

    Attributes:
        arms: The arms.
        unit: What the budget counts.
        budget: What each run may spend.
        marks: Amounts at which every run is evaluated, the budget being the last.
        seeds: Runs of each arm that is still to be run.
        seeds_before: Numbers of seeds that the comparison had before seeds were added to it.
    """

    arms: tuple[ArmPlan, ...]
    unit: Unit
    budget: float
    marks: tuple[float, ...]
    seeds: int
    seeds_before: tuple[int, ...] = ()


def plan_of(parsed: argparse.Namespace) -> tuple[Path, Plan]:
    """Return the folder, and what is to be compared in it.

    Raises:
        UserError: On the first thing that does not work.
    """
    from brorl.runs.run_record import SPEC_FILE

    if len(parsed.arms) == 1 and (Path(parsed.arms[0]) / SPEC_FILE).is_file():
        folder = Path(parsed.arms[0])
        return folder, _plan_again(parsed, folder)
    plan = _new_plan(parsed)
    if parsed.output_dir is None:
        return RUNS / f"compare-{datetime.now():%Y%m%d-%H%M%S}", plan
    folder = Path(parsed.output_dir).expanduser()
    if (folder / SPEC_FILE).is_file():
        before = _plan_in(folder)
        _refuse_other(folder, before, plan)
        return folder, _with_seeds(before, parsed.seeds, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output-dir {folder} exists and is not empty; choose another folder")
    return folder, plan


def _plan_again(parsed: argparse.Namespace, folder: Path) -> Plan:
    """Return what a folder was asked to compare; more seeds may be asked for."""
    options = {"sweep": "--sweep", "checkpoint": "--from", "match": "--match", "budget": "--budget",
               "marks": "--marks", "output_dir": "--output-dir"}  # fmt: skip
    given = [option for name, option in options.items() if getattr(parsed, name)]
    given += [f"--{name.removeprefix('setting:')}" for name in vars(parsed) if name.startswith("setting:")]
    if given:
        raise UserError(
            f"{folder} is a comparison already, and {given[0]} would change it; only --seeds and --jobs may"
        )
    return _with_seeds(_plan_in(folder), parsed.seeds, folder)


def _plan_in(folder: Path) -> Plan:
    """Read what a folder was asked to compare."""
    from brorl.assemble.comparison import ArmPlan
    from brorl.comparison.reading import read_spec
    from brorl.config.reading import make_config
    from brorl.runs.run_record import SPEC_FILE

    spec = read_spec(folder)
    source = str(folder / SPEC_FILE)
    arms = tuple(
        ArmPlan(
            arm["name"],
            make_config(arm["settings"], {}, source),
            Path(arm["run"]) if arm["run"] else None,
            arm.get("title", ""),
        )
        for arm in spec["arms"]
    )
    before = tuple(spec["seeds_before"])
    return Plan(arms, spec["unit"], spec["budget"], tuple(spec["marks"]), spec["seeds"], before)


def _with_seeds(before: Plan, seeds: int | None, folder: Path) -> Plan:
    """Return a plan with more seeds, if more are asked for."""
    if seeds is None or seeds == before.seeds:
        return before
    if seeds < before.seeds:
        raise UserError(f"{folder} has {before.seeds} seeds already; --seeds can only add to them")
    return replace(before, seeds=seeds, seeds_before=(*before.seeds_before, before.seeds))


def _new_plan(parsed: argparse.Namespace) -> Plan:
    """Make a plan from the command line."""
    arms = _arms(parsed)
    unit: Unit = parsed.match or "seconds"
    amounts = _amounts_of_finished_run(arms, unit)
    budget, words = parsed.budget, unit.replace("_", " ")
    if budget is None and amounts:
        budget = amounts[-1]
    if budget is None:
        if parsed.arms or parsed.sweep:
            raise UserError(f"how much may each run spend? give --budget X, in {words}")
        if unit != "seconds":
            raise UserError(f"give --budget X, in {words}")
        budget = _BUDGET_S
    if not 0 < budget < float("inf"):
        raise UserError(f"--budget: an amount above 0 is needed, not {exact(budget)}")
    if unit == "steps" and not budget.is_integer():
        raise UserError(f"--budget: a whole number of steps is needed, not {exact(budget)}")
    seeds = _SEEDS if parsed.seeds is None else parsed.seeds
    if seeds < 1:
        raise UserError(f"--seeds: at least 1 is needed, not {seeds}")
    if not amounts:
        return Plan(arms, unit, budget, _marks(parsed.marks, budget, unit), seeds)
    if parsed.marks:
        raise UserError("--marks: the other arm is evaluated where the finished run was; leave it out")
    last = next((amount for amount in amounts if abs(amount - budget) <= _CLOSE * budget), None)
    if last is None:
        told = ", ".join(map(exact, amounts))
        raise UserError(f"the finished run was not evaluated at {exact(budget)} {words}; give one of: {told}")
    return Plan(arms, unit, last, tuple(amount for amount in amounts if amount <= last), seeds)


def _arms(parsed: argparse.Namespace) -> tuple[ArmPlan, ...]:
    from brorl.assemble.comparison import read_arms, refuse_owned, sweep_arms

    overrides = overrides_of(parsed)
    refuse_owned(overrides)
    checkpoint = parsed.checkpoint
    if checkpoint is not None:
        from brorl.api.checkpoint import resolve_checkpoint

        checkpoint = resolve_checkpoint(checkpoint).model
        if Path(checkpoint).is_dir():
            checkpoint = str(Path(checkpoint).resolve())
    if not parsed.sweep:
        return tuple(read_arms(parsed.arms or _ARMS, overrides, checkpoint))
    if len(parsed.arms) > 1:
        raise UserError(f"--sweep makes the arms of one recipe, not of {len(parsed.arms)}")
    return tuple(sweep_arms(parsed.arms[0] if parsed.arms else _ARMS[1], overrides, checkpoint, _sweep(parsed.sweep)))


def _sweep(options: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the swept settings."""
    from brorl.config.reading import parse_yaml, settings_of, unknown_setting
    from brorl.config.settings import TrainConfig

    known = {name for name, _ in settings_of(TrainConfig)}
    sweep: dict[str, list[Any]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UserError(f"--sweep {option}: it should look like rollouts_per_prompt=16,64,512")
        if name not in known:
            raise UserError(unknown_setting(name))
        if name in sweep:
            raise UserError(f"--sweep: {name} is given twice; put all its values into one")
        text = values if values.startswith("[") else f"[{values}]"
        sweep[name] = parse_yaml(text, f"--sweep {name}")
    return sweep


def _amounts_of_finished_run(arms: Sequence[ArmPlan], unit: Unit) -> list[float]:
    """Return the amounts at which a finished run among the arms was evaluated; nothing if there is none.

    Raises:
        UserError: If there are several, or the run does not tell what a comparison needs.
    """
    from brorl.comparison.reading import read_trajectory
    from brorl.cost import Budget

    runs = [arm.run for arm in arms if arm.run is not None]
    if not runs:
        return []
    if len(runs) > 1:
        raise UserError(
            "only one arm can be a finished run, since each has been evaluated at amounts of its own; give the recipes "
            f"of the others: {runs[1]}/config.yaml"
        )
    if unit == "seconds":
        raise UserError(
            f"the seconds of {runs[0]} were measured at another time, beside whatever ran then, and cannot be matched "
            "now; use --match samples, unique_tokens or steps, or give its recipe to run it anew"
        )
    run = read_trajectory(runs[0], 0, Budget("samples", 1))
    amounts = sorted({score.cost.of(unit) for score in run.scores} - {0.0}) if run else []
    if not amounts:
        raise UserError(f"{runs[0]} was never evaluated after its start; there is nothing to compare with")
    return amounts


def _marks(text: str | None, budget: float, unit: Unit) -> tuple[float, ...]:
    """Return the amounts at which runs are evaluated, the budget being the last."""
    text = str(_MARKS) if text is None else text
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--marks: a number of marks, or amounts like 10,20,40, not {text!r}") from None
    if "," in text:
        if not all(0 < number <= budget for number in numbers):
            raise UserError(
                f"--marks: amounts should lie above 0 and up to the budget of {exact(budget)}, not {text!r}"
            )
        marks = [*numbers, budget]
    elif numbers[0] < 1 or not numbers[0].is_integer():
        raise UserError(f"--marks: a number of marks, or amounts like 10,20,40, not {text!r}")
    else:
        marks = [budget * 2 ** (-i / 2) for i in range(int(numbers[0]))]
    if unit == "steps":
        marks = [max(round(mark), 1) for mark in marks]
    return (*sorted({float(f"{mark:.6g}") for mark in marks} - {budget}), budget)


def _refuse_other(folder: Path, before: Plan, now: Plan) -> None:
    """Refuse a folder that holds another comparison."""
    for name in ("unit", "budget", "marks"):
        if getattr(before, name) != getattr(now, name):
            raise UserError(
                f"{folder} holds a comparison with {name} {getattr(before, name)}, not {getattr(now, name)}; choose "
                "another --output-dir"
            )
    if [(arm.config, arm.run) for arm in before.arms] != [(arm.config, arm.run) for arm in now.arms]:
        raise UserError(
            f"{folder} holds a comparison of other arms ({', '.join(arm.full_name for arm in before.arms)}) or with "
            f"other settings; choose another --output-dir, or go on with that one: brorl compare {folder}"
        )
