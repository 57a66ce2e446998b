"""`brorl.compare`: train arms from one checkpoint with one budget, and conclude which is better."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from brorl.api.arm_runs import Slot, cpu_slots, finish_runs, gpu_slots
from brorl.api.recipe import resolve_checkpoint
from brorl.config.reading import ConfigOrPath, flat_settings, parse_yaml, settings_of, unknown_setting
from brorl.config.settings import TrainConfig
from brorl.cost import Unit
from brorl.errors import UserError
from brorl.format import counted
from brorl.runs import RUNS
from brorl.runs.run_record import SPEC_FILE
from brorl.storage import replace_file, storage_errors
from brorl.table import Result, Table

if TYPE_CHECKING:
    from brorl.api.comparison_plan import Arguments, ComparisonPlan
    from brorl.api.comparison_view import ComparisonView
    from brorl.assemble.comparison import ArmPlan
    from brorl.comparison.arms import Arm
    from brorl.comparison.next_command import NextCommand
    from brorl.comparison.paired import PairedDifference
    from brorl.comparison.results import ComparisonResults


@dataclass(frozen=True, eq=False, repr=False)
class FinishedComparison(Result):
    """A comparison whose runs are complete."""

    path: Path  # its folder
    results: ComparisonResults  # all numbers, with 95% intervals
    answer: tuple[str, ...]  # the answer; and what the letters stand for, if the arms have letters as names
    caveats: tuple[str, ...]  # what limits the answer, at most three sentences or so
    tables: tuple[Table, ...]  # the tables; the first one shows the answer
    # the written files: `comparison.json`, `comparison.md`, `comparison.png`, `frontier.png` for more than two arms,
    # and `comparison.html`
    files: tuple[Path, ...]
    next: NextCommand  # the command that follows, with the reason for it

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms with their runs and evaluations."""
        return self.results.comparison.arms

    @property
    def unit(self) -> Unit:
        """The unit in which the arms are matched; `results.unmatched` names runs that are not."""
        return self.results.comparison.unit

    @property
    def difference(self) -> PairedDifference | None:
        """pass@1 of the second arm minus the first, with its interval and conclusion; None for more than two arms."""
        return None if self.results.pair is None else self.results.pair.differences[1]

    def parts(self) -> Iterator[str | Text | Table]:
        """Yield the answer, the table that shows it, its caveats, the files and the next command."""
        yield Text("\n".join(self.answer), style="bold")
        yield from ("", self.tables[0], "")
        yield from (f"- {line}" for line in self.caveats)
        names = ", ".join(file.name for file in self.files[:-1])
        yield f"\nwritten to {self.path}: {names}; all tables and figures: open {self.files[-1]} in a browser"
        yield f"{self.next.why}: {self.next.command}"

    def __repr__(self) -> str:
        return f"FinishedComparison({str(self.path)!r}: {self.answer[0]})"


def compare(
    *arms: ConfigOrPath,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    checkpoint: str | Path | None = None,
    match: Unit | None = None,
    budget: str | float | None = None,
    marks: int | Sequence[float] | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    output_dir: str | Path | None = None,
    progress: bool = True,
    **overrides: Any,
) -> FinishedComparison:
    """Train arms from one checkpoint with one budget, and return which is better.

    Three steps of every arm come first. Steps that are too long for the budget get fewer prompts, and a budget that was
    not given is raised; a line states it. The runs are child processes on their own cores or GPUs. A stopped comparison
    continues with the same call, or with its folder as the only argument; finished runs are not repeated.

    Args:
        arms: Two or more recipes (names, files, nested settings, configs), one of which may be the directory of a
            finished run; one recipe, with `sweep` or to compare its N with 512 (with 16 if it is 512 or more); or the
            folder of a comparison (default: plateau-16, plateau-512).
        sweep: Values by setting, one arm per value; several settings change together.
        checkpoint: The model that all arms start from: a model, a run (its last checkpoint), or a checkpoint in a run
            (default: the model of the recipes).
        match: Unit in which every run gets the same budget (default: seconds).
        budget: Budget of each run, in that unit; seconds also as 90s, 5m or 8h (default: 24 steps of every arm, and at
            least 30 seconds).
        marks: Evaluation points: how many (default: 8), each a factor of the square root of 2 from the next and the
            last at the budget; or the amounts at which to evaluate.
        seeds: Runs of each arm (default: 5). More seeds can be added to a folder later.
        jobs: Runs in parallel, each on its own cores or GPU (default: as many as fit, 1 with a cluster; an unfinished
            comparison keeps its number).
        output_dir: The folder (default: runs/compare-...); an unfinished comparison in it continues.
        progress: Whether to print the plan and the runs as they end.
        overrides: Settings for all arms, by dotted name or nested.

    Raises:
        UserError: If an argument is wrong, the arms cannot be compared, or a run failed.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, once every run has saved its state.
    """
    from brorl.api.comparison_plan import Arguments
    from brorl.api.comparison_view import ComparisonView
    from brorl.assemble.comparison import check_arms
    from brorl.comparison.reading import read_spec

    model = None if checkpoint is None else resolve_checkpoint(str(checkpoint)).model
    arguments = Arguments(arms, sweep, model, match, budget, marks, seeds, flat_settings(overrides))
    folder, plan = _folder_and_plan(arguments, output_dir)
    console = Console(highlight=False, quiet=not progress)
    view = ComparisonView(console, plan.runs_in(folder))
    if (folder / SPEC_FILE).is_file() and len(view.complete) == len(plan.runs_in(folder)):
        view.print_complete()
        return finished_comparison(folder)
    before = read_spec(folder) if (folder / SPEC_FILE).is_file() else {}
    slots = slots_for(before.get("jobs") if jobs is None else jobs, plan.arms)
    machine = machine_of(slots, plan.arms)
    if plan.unit == "seconds" and machine != before.get("machine", machine):
        raise UserError(
            f"{folder} was started on {before['machine']}, and this is {machine}: a comparison in seconds cannot "
            "continue here; use the same --jobs, or start a new one in another --output-dir"
        )
    check_arms(plan.arms, plan.unit, plan.seeds, len(slots))
    if not before:
        plan = _fitted(plan, arguments, folder, slots, console)
        view = ComparisonView(console, plan.runs_in(folder))
    run_comparison(folder, plan, slots, machine, view)
    return finished_comparison(folder)


def _fitted(
    plan: ComparisonPlan, arguments: Arguments, folder: Path, slots: Sequence[Slot], console: Console
) -> ComparisonPlan:
    """Return the plan with steps that fit its budget, from a few steps of every arm; steps as the unit always fit."""
    from brorl.api.comparison_plan import fit_steps
    from brorl.api.step_trial import costs_of_steps
    from brorl.runs.run_directory import RunDirectory

    if plan.unit == "steps" or any(arm.run is not None for arm in plan.arms):
        return plan
    is_new = not folder.exists()
    console.print("a few steps of each arm, for their cost", markup=False)
    try:
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with RunDirectory(folder).locked():
            cost_of = costs_of_steps(plan, folder, slots)
        return fit_steps(plan, arguments, cost_of) if cost_of else plan
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def compare_command(
    *arms: str, sweep: Sequence[str] = (), marks: str | None = None, **options: Any
) -> FinishedComparison:
    """Compare as a command.

    Args:
        arms: Two or more recipes (files, built-in names), one of which may be a finished run; one recipe, with --sweep
            or to compare its N with 512 (with 16 if it is 512 or more); or the folder of a comparison, to continue it
            (default: plateau-16 plateau-512).
        sweep: One arm per value of a setting; repeat it for settings that change together.
        marks: Evaluation points during training: how many, geometrically, or at which amounts (default: 8).
        options: Those of `compare`.
    """
    finished = compare(*arms, sweep=_sweep(sweep), marks=_marks(marks), **options)
    print()  # noqa: T201
    return finished


def _marks(text: str | None) -> int | list[float] | None:
    """Return a number of evaluation points, or the amounts."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise UserError(f"--marks: a number of evaluation points, or amounts like 10,20,40, not {text!r}") from None


def _sweep(options: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the swept settings."""
    known = {name for name, _ in settings_of(TrainConfig)}
    sweep: dict[str, list[Any]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UserError(f"--sweep {option}: expected KEY=V,V,... such as rollouts_per_prompt=16,64,512")
        if name not in known:
            raise UserError(unknown_setting(name))
        if name in sweep:
            raise UserError(f"--sweep: {name} is given twice; put all its values into one")
        sweep[name] = parse_yaml(values if values.startswith("[") else f"[{values}]", f"--sweep {name}")
    return sweep


def _folder_and_plan(arguments: Arguments, output_dir: str | Path | None) -> tuple[Path, ComparisonPlan]:
    """Return the folder, which is new or contains the same comparison, and the plan."""
    from brorl.api.comparison_plan import plan_for, plan_in

    first = arguments.arms[0] if len(arguments.arms) == 1 else None
    if isinstance(first, str | Path) and (Path(first) / SPEC_FILE).is_file():
        if output_dir is not None:
            raise UserError(
                f"{first} is a comparison already, and --output-dir would change it; only --seeds and --jobs may"
            )
        return Path(first), plan_in(Path(first), arguments)
    if output_dir is None:
        return RUNS / f"compare-{datetime.now():%Y%m%d-%H%M%S}", plan_for(None, arguments)
    folder = Path(output_dir).expanduser()
    return folder, plan_for(folder, arguments)


def run_comparison(
    folder: Path,
    plan: ComparisonPlan,
    slots: Sequence[Slot],
    machine: str,
    view: ComparisonView,
    again: str | None = None,
    deadline: float | None = None,
) -> bool:
    """Run all runs to completion or to a deadline, and return whether they are complete.

    The folder is locked meanwhile; `again` is the command that continues it.
    """
    from brorl.runs.run_directory import RunDirectory

    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder).locked():
        plan.write(folder, machine, len(slots))
        view.announce(plan, machine, folder, sum(len(slot.cores) for slot in slots))
        with view.running(again or f"brorl compare {shlex.quote(str(folder))}"):
            left = [run for run in plan.runs_in(folder) if run not in view.complete]
            return finish_runs(left, slots, view, deadline)


def finished_comparison(folder: Path) -> FinishedComparison:
    """Read the runs of a complete comparison, and write its files."""
    from brorl.comparison.next_command import next_command
    from brorl.comparison.reading import read_comparison
    from brorl.comparison.report import write_report
    from brorl.comparison.results import results_of
    from brorl.comparison.tables import tables_of
    from brorl.comparison.text import text_of
    from brorl.reporting.page.answer import comparison_page

    results = results_of(read_comparison(folder))
    files, following = write_report(results, folder), next_command(results, folder)
    text, tables = text_of(results), tables_of(results)
    page = folder / "comparison.html"
    figures = [file for file in files if file.suffix == ".png"]
    with storage_errors(folder):
        replace_file(page, comparison_page(results, text, tables, figures, following).encode())
    return FinishedComparison(folder, results, text.answer, text.caveats, tuple(tables), (*files, page), following)


def slots_for(jobs: int | None, arms: Sequence[ArmPlan]) -> list[Slot]:
    """Return a slot for each run that is in progress at the same time."""
    from brorl.model.load import choose_device

    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: at least 1 is needed, got {jobs}")
    device = arms[0].config.device
    if _num_machines(arms):
        if jobs not in (None, 1):
            raise UserError(
                f"--jobs {jobs}: the arms train on a cluster, and each run needs the whole cluster; use --jobs 1, or "
                "--cluster.nodes 0"
            )
        return cpu_slots(1, 0) if choose_device(device).type == "cpu" else [Slot()]
    if choose_device(device).type == "cpu":
        return cpu_slots(jobs, max(arm.config.engine.threads for arm in arms))
    if device != "mps" and ":" not in device:
        return gpu_slots(jobs)
    if jobs not in (None, 1):
        raise UserError(f"--jobs {jobs}: device = {device} is one GPU, and runs cannot share one; use --jobs 1")
    return [Slot()]


def _num_machines(arms: Sequence[ArmPlan]) -> int:
    """Return the machines of the largest cluster of an arm that is still to be run; 0 without a cluster."""
    return max((arm.config.cluster.nodes for arm in arms if arm.run is None), default=0)


def machine_of(slots: Sequence[Slot], arms: Sequence[ArmPlan]) -> str:
    """Return the processor or accelerator and the slots of runs, in the wording of existing folders."""
    import torch

    from brorl.runs.run_directory import processor_name

    if not slots[0].cores and torch.cuda.is_available():
        place, name = "a GPU of its own", torch.cuda.get_device_name()
    else:
        place, name = f"{counted(len(slots[0].cores) or 1, 'core')} of its own", processor_name()
    if machines := _num_machines(arms):
        place = f"a cluster of {counted(machines, 'machine')}"
    seconds = ", in CPU seconds" if arms[0].config.engine.clock == "cpu" else ""
    return f"{name}, {counted(len(slots), 'run')} at a time, each on {place}{seconds}"
