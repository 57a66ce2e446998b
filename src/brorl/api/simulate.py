"""`brorl simulate`: the paper's token-level simulator for several N and seeds; a figure, a table and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

import brorl
from brorl.errors import UserError, option
from brorl.runs import RUNS
from brorl.storage import output_folder, storage_errors
from brorl.theory.simulator import SimulationResult, SimulationSettings
from brorl.theory.simulator import simulate as simulate_one


def simulate(
    *,
    rollouts: Sequence[int] = (4, 8, 16, 512, 51_200),
    seeds: str = "0",
    output_dir: str | Path = RUNS / "simulation",
    **settings: Any,
) -> None:
    """Simulate every N with every seed, and print and store the results.

    Args:
        rollouts: Draws per step, N, one simulation each.
        seeds: Seeds, such as 0,1,2 or 0-4.
        output_dir: Folder for simulation.json, .csv and .png; an earlier simulation in it is replaced.
        settings: Settings of the simulator; by default the paper's, and where it leaves one open, that of Figure 3.

    Raises:
        UserError: If a setting does not fit.
    """
    from brorl.reporting.simulation import end_point_table, settings_line, terms_table, write_simulation

    _require_distinct("rollouts", rollouts)
    try:
        experiments = [
            SimulationSettings(rollouts=number, seed=seed, **settings)
            for number in sorted(rollouts)
            for seed in _seeds(seeds)
        ]
    except ValueError as error:
        raise UserError(f"{error} (see brorl simulate --help)") from error
    console = Console(highlight=False)
    first = experiments[0]
    headline = f"{settings_line(first)}, weight decay {first.decay:g}; {first.steps:,} steps"
    with output_folder(Path(output_dir).expanduser()) as folder:
        console.print(f"brorl {brorl.__version__}: {headline}", soft_wrap=True, markup=False)
        results = _simulate_all(experiments, console)
        console.print()
        console.print(end_point_table(results))
        if terms := terms_table(results):
            console.print()
            console.print(terms)
        with storage_errors(folder, "rerun the command"):
            write_simulation(results, folder)
    files = f"simulation.json and simulation.png are in {folder}"
    console.print(files, soft_wrap=True, markup=False)


def _simulate_all(experiments: Sequence[SimulationSettings], console: Console) -> list[SimulationResult]:
    """Run the simulations in order, with a progress bar on a terminal and a line for each finished one."""
    from rich.progress import Progress

    results: list[SimulationResult] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(experiments)} simulations", total=sum(s.steps for s in experiments))

        def advance(step: int) -> None:
            progress.update(task, completed=len(results) * experiments[0].steps + step)

        for settings in experiments:
            started = perf_counter()
            result = simulate_one(settings, advance)
            results.append(result)
            line = (
                f"N = {settings.rollouts:,}, seed {settings.seed}: correct mass {result.correct_mass[0]:.4f} -> "
                f"{result.correct_mass[-1]:.4f}, {result.fraction_improved[-1]:.1%} of the correct tokens improved "
                f"({perf_counter() - started:.1f} s, {len(results)} of {len(experiments)})"
            )
            console.print(line, soft_wrap=True, markup=False)
    return results


def _seeds(text: str) -> tuple[int, ...]:
    """Parse a list such as 0,1,2 or a range such as 0-4, both ends included."""
    first, dash, last = text.partition("-")
    if dash and first.strip().isdecimal() and last.strip().isdecimal():
        if int(last) < int(first):
            raise UserError(f"{option('seeds')}: the range {text!r} is empty; give the lower seed first, such as 0-4")
        return tuple(range(int(first), int(last) + 1))
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option('seeds')}: expected whole numbers such as 0,1,2, not {text!r}") from None
    _require_distinct("seeds", seeds)
    return seeds


def _require_distinct(option: str, numbers: Sequence[int]) -> None:
    twice = [number for number in numbers if numbers.count(number) > 1]
    if twice:
        raise UserError(f"--{option}: {','.join(map(str, numbers))!r} has {twice[0]} twice; give each number once")
