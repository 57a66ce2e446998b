"""`brorl simulate`: the paper's token-level simulator for several N and seeds; a figure, a table and files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import brorl
from brorl.cli.settings import Commands
from brorl.errors import StorageError, UserError
from brorl.runs import RUNS

if TYPE_CHECKING:
    from rich.console import Console

    from brorl.theory.simulator import SimulationResult, SimulationSettings

ROLLOUTS = (4, 8, 16, 512, 51_200)

_HELP = {
    "vocabulary_size": "number of tokens, V",
    "num_correct": "number of correct tokens",
    "steps": "gradient steps",
    "init": "initial logits: 0, correct tokens 3, anchor 5; `normal` adds noise to them",
    "init_spread": "standard deviation of that noise",
    "anchor": "verdict on the one token with logit 5",
    "surrogate": "factor of a drawn token's advantage in the loss: p, or p / p_old",
    "duplicates": "whether a token drawn c times counts c times or once in the loss",
    "baseline": "number subtracted from each reward: the mean over the N draws, or nothing",
    "reward_correct": "reward of a correct token",
    "reward_wrong": "reward of any other token",
    "optimizer": "torch's optimizer, with torch's default constants",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay of the logits; torch's default (adamw 0.01, else 0) if not given",
    "epsilon": "constant in the denominator of adamw and adam",
    "record_every": "steps between two records",
}


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "simulate",
        usage="brorl simulate [--rollouts 4,16,512] [--seeds 0-4] [--key value ...]",
        help="simulate the effect of N on the correct tokens of one softmax (the paper's Figure 3)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rollouts",
        type=_whole_numbers,
        default=ROLLOUTS,
        metavar="LIST",
        help=f"draws per step, N, one simulation each (default: {','.join(map(str, ROLLOUTS))})",
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=(0,), metavar="LIST", help="seeds, such as 0,1,2 or 0-4 (default: 0)"
    )
    parser.add_argument(
        "--output-dir",
        "--output_dir",
        type=Path,
        default=RUNS / "simulation",
        metavar="DIR",
        help="folder for simulation.json, .csv and .png; an earlier simulation in it is replaced "
        "(default: %(default)s)",
    )
    parser.set_defaults(execute=run_command)
    if chosen:
        _add_settings(parser)


def run_command(parsed: argparse.Namespace) -> int:
    """Simulate every N with every seed, print and store the results, and return the exit code."""
    from rich.console import Console

    from brorl.reporting.simulation import check_output_dir, end_point_table, settings_line, write_simulation

    experiments = _experiments(parsed)
    output_dir = parsed.output_dir.expanduser()
    replaces = check_output_dir(output_dir)
    console = Console(highlight=False)
    first = experiments[0]
    headline = f"{settings_line(first)}, weight decay {first.decay:g}; {first.steps:,} steps"
    console.print(f"brorl {brorl.__version__}: {headline}", soft_wrap=True, markup=False)
    results = _simulate_all(experiments, console)
    console.print()
    console.print(end_point_table(results))
    try:
        write_simulation(results, output_dir)
    except OSError as error:
        raise StorageError(
            f"could not write to {output_dir}: {error.strerror}; free space or choose another --output-dir"
        ) from error
    note = " (in place of the earlier simulation there)" if replaces else ""
    files = f"simulation.json, simulation.csv and simulation.png are in {output_dir}{note}"
    console.print(files, soft_wrap=True, markup=False)
    return 0


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of the simulator's settings, except rollouts and seed, which are lists here."""
    from brorl.theory.simulator import SimulationSettings

    group = parser.add_argument_group("settings", "defaults: the paper's; where it leaves one open, that of Figure 3")
    hints = get_type_hints(SimulationSettings)
    for name, help_text in _HELP.items():
        hint, default = hints[name], getattr(SimulationSettings, name)
        options: dict[str, Any] = {"type": int if hint is int else float, "metavar": "INT" if hint is int else "FLOAT"}
        if get_origin(hint) is Literal:
            options = {"choices": get_args(hint)}
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            *sorted({f"--{name}", f"--{name.replace('_', '-')}"}),
            dest=name,
            default=argparse.SUPPRESS,
            help=f"{help_text}{shown}",
            **options,
        )


def _experiments(parsed: argparse.Namespace) -> list[SimulationSettings]:
    """Return the settings of every simulation, seed by seed within each N."""
    from brorl.theory.simulator import SimulationSettings

    given = {name: value for name, value in vars(parsed).items() if name in _HELP}
    try:
        return [
            SimulationSettings(rollouts=rollouts, seed=seed, **given)
            for rollouts in sorted(parsed.rollouts)
            for seed in parsed.seeds
        ]
    except ValueError as error:
        raise UserError(f"{error} (see brorl simulate --help)") from error


def _simulate_all(experiments: Sequence[SimulationSettings], console: Console) -> list[SimulationResult]:
    """Run the simulations in order, with a progress bar on a terminal and a line for each finished one."""
    from rich.progress import Progress

    from brorl.theory.simulator import simulate

    results: list[SimulationResult] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(experiments)} simulations", total=sum(s.steps for s in experiments))

        def advance(step: int) -> None:
            progress.update(task, completed=len(results) * experiments[0].steps + step)

        for settings in experiments:
            started = perf_counter()
            result = simulate(settings, advance)
            results.append(result)
            line = (
                f"N = {settings.rollouts:,}, seed {settings.seed}: correct mass {result.correct_mass[0]:.4f} -> "
                f"{result.correct_mass[-1]:.4f}, {result.fraction_improved[-1]:.1%} of the correct tokens improved "
                f"({perf_counter() - started:.1f} s, {len(results)} of {len(experiments)})"
            )
            console.print(line, soft_wrap=True, markup=False)
    return results


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parse a list such as 4,8,16."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 4,16,512, not {text!r}") from error
    twice = [number for number in numbers if numbers.count(number) > 1]
    if twice:
        raise argparse.ArgumentTypeError(f"{text!r} has {twice[0]} twice; give each number once")
    return numbers


def _seeds(text: str) -> tuple[int, ...]:
    """Parse a list such as 0,1,2 or a range such as 0-4, both ends included."""
    first, dash, last = text.partition("-")
    if dash and first.strip().isdecimal() and last.strip().isdecimal():
        if int(last) < int(first):
            raise argparse.ArgumentTypeError(f"the range {text!r} is empty; give the lower seed first, such as 0-4")
        return tuple(range(int(first), int(last) + 1))
    return _whole_numbers(text)
