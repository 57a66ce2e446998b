"""`brorl.compare`: train arms from one checkpoint with one budget, and find which arm is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brorl.api.arguments import refuse_in_worker, resolve_checkpoint
from brorl.config.reading import ConfigOrPath, flat_settings, parse_yaml, setting_fields, unknown_setting
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.cost import Unit
from brorl.errors import UserError, option
from brorl.runs import RUNS
from brorl.runs.run_directory import SPEC_FILE

if TYPE_CHECKING:
    from brorl.comparison.answer import FinishedComparison
    from brorl.comparison.spec import ComparisonRequest, ComparisonSpec


def compare(
    *arms: ConfigOrPath,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    checkpoint: str | Path | None = None,
    match: Unit | None = None,
    budget: str | float | None = None,
    eval_points: int | Sequence[float] | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    output_dir: str | Path | None = None,
    progress: bool = True,
    **overrides: Any,
) -> FinishedComparison:
    """Train arms from one checkpoint with one budget, and return which arm is better.

    Three steps of every arm are timed first, and the budget is raised if it is too small. Each run is a child process
    with its own cores or GPU. To resume a stopped comparison, repeat the call or pass the folder as the only argument;
    finished runs are not repeated.

    Examples:
        >>> result = brorl.compare("quickstart", sweep={"rollouts_per_prompt": [16, 256]}, budget="5m")
        >>> result.figure().savefig("comparison.png")

    Args:
        arms: Two or more recipes (names, files, nested settings, configs); one recipe, with `sweep` or to compare its
            N with 512 (with 16 if it is 512 or more); or the folder of a comparison (default: plateau-16, plateau-512).
        sweep: Values by setting, one arm per value; several settings change together.
        checkpoint: The model that all arms start from: a model, a run (its last checkpoint), or a checkpoint in a run
            (default: the model of the recipes).
        match: Unit of the budget, which is the same for every run (default: seconds).
        budget: Budget of each run, in that unit; seconds also as 90s, 5m or 8h (default: 24 steps of every arm, and at
            least 30 seconds).
        eval_points: Number of evaluation points (default: 8), spaced by a factor of the square root of 2 with the last
            one at the budget; or the amounts at which to evaluate.
        seeds: Runs of each arm (default: 5). More seeds can be added to a folder later.
        jobs: Runs in parallel, each on its own cores or GPU (default: as many as fit, 1 with a cluster; an unfinished
            comparison keeps its number).
        output_dir: The folder (default: runs/compare-...); an unfinished comparison in it continues.
        progress: Print what is run, and each run as it ends.
        overrides: Settings for all arms, by dotted name or nested.

    Raises:
        UserError: If an argument is wrong, the arms cannot be compared, or a run failed.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, once every run has saved its state.
    """
    refuse_in_worker()
    from brorl.comparison.answer import finished_comparison
    from brorl.comparison.spec import ComparisonRequest

    model = None if checkpoint is None else resolve_checkpoint(str(checkpoint)).model
    arguments = ComparisonRequest(arms, sweep, model, match, budget, eval_points, seeds, flat_settings(overrides))
    folder, spec = _folder_and_spec(arguments, output_dir)
    with Screen(silent=not progress) as screen:
        _complete(folder, spec, arguments, jobs, screen)
        return finished_comparison(folder)


def _complete(
    folder: Path, spec: ComparisonSpec, arguments: ComparisonRequest, jobs: int | None, screen: Screen
) -> None:
    """Complete the unfinished runs of a comparison."""
    from brorl.comparison.arm_recipes import check_arms
    from brorl.comparison.run_processes import ComparisonView, fitted, machine_of, run_comparison, slots_for

    runs = spec.runs_in(folder)
    if spec.machine and len((view := ComparisonView(screen, runs)).complete) == len(runs):
        view.print_complete()
        return
    slots = slots_for(spec.jobs or None if jobs is None else jobs, spec.arms)
    machine = machine_of(slots, spec.arms)
    if spec.unit == "seconds" and spec.machine not in ("", machine):
        raise UserError(
            f"{folder} was started on {spec.machine}, but this is {machine}: a comparison matched on seconds "
            "can only continue on the machine it started on; "
            f"use the same {option('jobs')}, or start a new one in a different {option('output-dir')}"
        )
    check_arms(spec.arms, spec.unit, spec.seeds, len(slots), None if spec.machine else folder)
    if not spec.machine:
        spec = fitted(spec, arguments, folder, slots, screen)
    run_comparison(folder, replace(spec, machine=machine, jobs=len(slots)), slots, screen)


def compare_command(
    *arms: str, sweep: Sequence[str] = (), eval_points: str | None = None, **options: Any
) -> FinishedComparison:
    """Compare arms from the command line.

    Args:
        arms: Two or more recipes (files, built-in names); one recipe, with --sweep or to compare its N with 512 (with
            16 if it is 512 or more); or the folder of a comparison, to continue it (default: plateau-16 plateau-512).
        sweep: One arm per value of a setting; repeat the option for settings that change together.
        eval_points: Evaluation points during training: their number, spaced geometrically, or amounts (default: 8).
        options: Those of `compare`.
    """
    finished = compare(*arms, sweep=_sweep(sweep), eval_points=_points(eval_points), **options)
    print()  # noqa: T201
    return finished


def _points(text: str | None) -> int | list[float] | None:
    """Parse the number of evaluation points, or their amounts."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")] if "," in text else int(text)
    except ValueError:
        raise UserError(
            f"{option('eval-points')}: expected a number of evaluation points, or amounts like 10,20,40, got {text!r}"
        ) from None


def _sweep(options: Sequence[str]) -> dict[str, list[Any]]:
    """Parse the swept settings and their values."""
    known = {name for name, _ in setting_fields(TrainConfig)}
    sweep: dict[str, list[Any]] = {}
    for text in options:
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UserError(f"{option('sweep', text)}: expected KEY=V,V,... such as rollouts_per_prompt=16,64,512")
        if name not in known:
            raise UserError(unknown_setting(name))
        if name in sweep:
            raise UserError(f"{option('sweep')}: {name} is given twice; list all its values in one")
        sweep[name] = parse_yaml(values if values.startswith("[") else f"[{values}]", option("sweep", name))
    return sweep


def _folder_and_spec(arguments: ComparisonRequest, output_dir: str | Path | None) -> tuple[Path, ComparisonSpec]:
    """Return the folder and the spec. The folder is new or already contains this comparison."""
    from brorl.comparison.spec import spec_for, spec_in

    first = arguments.arms[0] if len(arguments.arms) == 1 else None
    if isinstance(first, str | Path) and (Path(first) / SPEC_FILE).is_file():
        if output_dir is not None:
            raise UserError(
                f"{first} is already a comparison, which {option('output-dir')} cannot change; only {option('seeds')} "
                f"and {option('jobs')} can"
            )
        return Path(first), spec_in(Path(first), arguments)
    if output_dir is None:
        return RUNS / f"compare-{datetime.now():%Y%m%d-%H%M%S}", spec_for(None, arguments)
    folder = Path(output_dir).expanduser()
    return folder, spec_for(folder, arguments)
