"""`brorl compare`: arms from one checkpoint with one budget, and what can be said about which is better."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.cli.settings import Commands, add_settings
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UserError

if TYPE_CHECKING:
    from brorl.assemble.comparison import ArmPlan
    from brorl.cli.arm_runs import Job, Slot
    from brorl.cli.compare_plan import Plan

_UNITS = ("seconds", "samples", "unique_tokens", "steps")
_LONGEST_NAME = 60  # of a folder of an arm


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "compare",
        usage="brorl compare [A B | RECIPE --sweep KEY=V,V,... | FOLDER] [--from CHECKPOINT] [--match UNIT] "
        "[--budget X] [--seeds S] [--key value ...]",
        help="train arms from the same checkpoint with the same budget, and say which is better",
        allow_abbrev=False,
    )
    parser.add_argument(
        "arms", nargs="*", metavar="ARM",
        help="two or more recipes (files, built-in names), one of which may be a finished run; one recipe with "
        "--sweep; or the folder of a comparison, to continue it (default: quickstart-16 quickstart)",
    )  # fmt: skip
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("--sweep", "KEY=V,V,...", {"action": "append", "default": [], "help":
            "one arm per value of a setting; given again for settings that change with it"}),
        ("--from", "CHECKPOINT", {"dest": "checkpoint", "help":
            "what all arms start from (default: the model of the recipes)"}),
        ("--budget", "X", {"type": float, "help": "how much each run may spend"}),
        ("--marks", "N|X,X,...", {"help":
            "evaluations on the way: how many, geometrically, or at which amounts (default: 8)"}),
        ("--seeds", "S", {"type": int, "help": "runs of each arm (default: 5)"}),
        ("--jobs", "J", {"type": int, "help":
            "runs at a time, each on cores (or a GPU) of its own (default: as many as fit)"}),
        ("--output-dir", "DIR", {"dest": "output_dir", "help":
            "folder (default: runs/compare-...); an unfinished comparison in it continues"}),
    ]  # fmt: skip
    parser.add_argument("--match", choices=_UNITS, help="unit in which every run gets the same (default: seconds)")
    for name, metavar, more in options:
        names = [name, "--output_dir"] if name == "--output-dir" else [name]
        parser.add_argument(*names, metavar=metavar, **more)
    parser.set_defaults(execute=compare)
    if chosen:
        from brorl.config.reading import settings_of
        from brorl.config.settings import TrainConfig

        add_settings(parser, [name for name, _ in settings_of(TrainConfig) if name != "output_dir"])


def compare(parsed: argparse.Namespace) -> int:
    """Run what is still to be run, say what came of it, and return the exit code."""
    from rich.console import Console

    from brorl.assemble.comparison import check_arms
    from brorl.cli.arm_runs import progress_of
    from brorl.cli.compare_plan import plan_of
    from brorl.cli.compare_view import present
    from brorl.runs.run_record import SPEC_FILE

    if parsed.jobs is not None and parsed.jobs < 1:
        raise UserError(f"--jobs: at least 1 is needed, not {parsed.jobs}")
    folder, plan = plan_of(parsed)
    jobs = _jobs(folder, plan)
    console = Console(highlight=False)
    if (folder / SPEC_FILE).is_file() and all(progress_of(job).ended for job in jobs):
        console.print(f"{len(jobs)} of {len(jobs)} runs are complete already", markup=False)
        present(console, folder)
        return 0
    slots = _slots(parsed.jobs, plan)
    machine = _machine(slots)
    _refuse_other_machine(folder, plan, machine)
    check_arms(plan.arms, plan.unit, plan.budget, plan.seeds, len(slots))
    return _run(console, folder, plan, jobs, slots, machine)


def _run(console: Any, folder: Path, plan: Plan, jobs: Sequence[Job], slots: Sequence[Slot], machine: str) -> int:
    """Bring all runs to their end and present them; nobody else may work in the folder meanwhile."""
    from brorl.cli.arm_runs import run_jobs
    from brorl.cli.compare_view import View, announce, present, stopped_words
    from brorl.runs.run_directory import RunDirectory
    from brorl.storage import storage_errors

    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder).locked():
        _write(folder, plan, jobs, machine)
        announce(console, plan, len(jobs), machine, folder)
        view = View(console, jobs)
        try:
            left = [job for job in jobs if job not in view.complete]
            run_jobs(left, slots, view.say, view.show, view.stopping)
            view.close()
            present(console, folder)
        except KeyboardInterrupt:
            console.print(f"\n{stopped_words(folder, jobs)}", soft_wrap=True, markup=False)
            return STOPPED
        finally:
            view.close()
    return 0


def _jobs(folder: Path, plan: Plan) -> list[Job]:
    """Return the runs that the arms consist of, seed by seed; who goes first changes with the seed."""
    from brorl.cli.arm_runs import Job
    from brorl.cost import Budget

    budget = Budget(plan.unit, plan.budget, plan.marks)
    folders = _folders(plan.arms)
    jobs = []
    for seed in range(plan.seeds):
        turn = seed % len(plan.arms)
        for arm in (*plan.arms[turn:], *plan.arms[:turn]):
            if arm.run is None:
                directory = folder / folders[arm.name] / f"seed-{seed}"
                jobs.append(Job(arm.name, seed, directory.with_name(f"{directory.name}.yaml"), directory, budget))
    return jobs


def _folders(arms: Sequence[ArmPlan]) -> dict[str, str]:
    """Return the folder of each arm by its name: the name, where that can be a folder's and is nobody else's."""
    slugs = ["".join(c if c.isalnum() or c in "=.-" else "_" for c in arm.name) for arm in arms]
    plain = len({slug.lower() for slug in slugs}) == len(slugs) and max(map(len, slugs)) <= _LONGEST_NAME
    return {
        arm.name: f"arms/{slug}" if plain else f"arms/{number}-{slug[:_LONGEST_NAME]}"
        for number, (arm, slug) in enumerate(zip(arms, slugs, strict=True), 1)
    }


def _write(folder: Path, plan: Plan, jobs: Sequence[Job], machine: str) -> None:
    """Write what is to be done: `compare.json`, and a recipe for every run."""
    from brorl.assemble.comparison import run_config
    from brorl.config.reading import dump_yaml
    from brorl.runs.run_record import SPEC_FILE
    from brorl.storage import replace_file, storage_errors

    arm_of = {arm.name: arm for arm in plan.arms}
    with storage_errors(folder):
        for job in jobs:
            job.directory.mkdir(parents=True, exist_ok=True)
            config = run_config(arm_of[job.arm], job.seed, job.directory, job.budget)
            replace_file(job.recipe, dump_yaml(config).encode())
        replace_file(folder / SPEC_FILE, json.dumps(_spec(plan, machine), indent=2).encode())


def _spec(plan: Plan, machine: str) -> dict[str, Any]:
    """Return what `compare.json` holds; paths of runs are relative to its folder."""
    from brorl.assemble.comparison import differences

    folders = _folders(plan.arms)
    arms = []
    for arm, different in zip(plan.arms, differences([arm.config for arm in plan.arms]), strict=True):
        n = None if arm.config.adaptive.enabled else arm.config.rollouts_per_prompt
        runs = [{"seed": seed, "path": f"{folders[arm.name]}/seed-{seed}"} for seed in range(plan.seeds)]
        arms.append({
            "name": arm.name, "title": arm.title, "num_rollouts": n,
            "prompts_per_step": arm.config.prompts_per_step, "differs": different,
            "run": str(arm.run) if arm.run else None,
            "runs": [{"seed": arm.config.seed, "path": str(arm.run)}] if arm.run else runs,
            "settings": arm.config.model_dump(mode="json"),
        })  # fmt: skip
    return {
        "brorl": brorl.__version__, "checkpoint": plan.arms[0].config.model, "unit": plan.unit, "budget": plan.budget,
        "marks": list(plan.marks), "seeds": plan.seeds, "seeds_before": list(plan.seeds_before), "machine": machine,
        "arms": arms,
    }  # fmt: skip


def _slots(jobs: int | None, plan: Plan) -> list[Slot]:
    """Return where runs may work at the same time.

    Raises:
        UserError: If there are not as many places as runs are asked for.
    """
    from brorl.cli.arm_runs import Slot, cpu_slots, gpu_slots
    from brorl.model.load import choose_device

    device = plan.arms[0].config.device
    if choose_device(device).type == "cpu":
        return cpu_slots(jobs, max(arm.config.engine.threads for arm in plan.arms))
    if ":" not in device:
        return gpu_slots(jobs)
    if jobs not in (None, 1):
        raise UserError(f"--jobs {jobs}: device = {device} is one GPU, and runs must not share one; set device: cuda")
    return [Slot()]


def _machine(slots: Sequence[Slot]) -> str:
    """Say what the runs are made on."""
    import torch

    from brorl.runs.run_directory import processor_name

    if not slots[0].cores and torch.cuda.is_available():
        place, name = "a GPU", torch.cuda.get_device_name()
    else:
        cores, name = len(slots[0].cores) or 1, processor_name()
        place = "1 core" if cores == 1 else f"{cores} cores"
    return f"{name}, {len(slots)} run{'s' if len(slots) != 1 else ''} at a time, each on {place} of its own"


def _refuse_other_machine(folder: Path, plan: Plan, machine: str) -> None:
    """Refuse to go on with seconds on another machine, or with other cores for each run."""
    from brorl.comparison.reading import read_spec
    from brorl.runs.run_record import SPEC_FILE

    if plan.unit != "seconds" or not (folder / SPEC_FILE).is_file():
        return
    before = read_spec(folder)["machine"]
    if before != machine:
        raise UserError(
            f"{folder} was started on {before}, and this is {machine}: a comparison in seconds cannot continue here; "
            "use the same --jobs, or start a new one in another --output-dir"
        )
