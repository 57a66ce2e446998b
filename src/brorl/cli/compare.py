"""`brorl compare`: the options of `brorl.compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UserError

_UNITS = ("seconds", "samples", "unique_tokens", "steps")


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "compare",
        usage="brorl compare [A B | RECIPE --sweep KEY=V,V,... | FOLDER] [--from CHECKPOINT] [--match UNIT] "
        "[--budget X] [--seeds S] [--key value ...]",
        help="train arms from the same checkpoint with the same budget, and conclude which is better",
        allow_abbrev=False,
    )
    parser.add_argument(
        "arms", nargs="*", metavar="ARM",
        help="two or more recipes (files, built-in names), one of which may be a finished run; one recipe with "
        "--sweep; or the folder of a comparison, to continue it (default: plateau-16 plateau-512)",
    )  # fmt: skip
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("--sweep", "KEY=V,V,...", {"action": "append", "default": [], "help":
            "one arm per value of a setting; repeat it for settings that change together"}),
        ("--from", "CHECKPOINT", {"dest": "checkpoint", "help":
            "the model that all arms start from (default: the model of the recipes)"}),
        ("--budget", "X", {"type": float, "help": "budget of each run"}),
        ("--marks", "N|X,X,...", {"help":
            "evaluation points during training: how many, geometrically, or at which amounts (default: 8)"}),
        ("--seeds", "S", {"type": int, "help": "runs of each arm (default: 5)"}),
        ("--jobs", "J", {"type": int, "help":
            "runs in parallel, each on its own cores or GPU (default: as many as fit; 1 with a cluster)"}),
        ("--output-dir", "DIR", {"dest": "output_dir", "help":
            "folder (default: runs/compare-...); an unfinished comparison in it continues"}),
    ]  # fmt: skip
    parser.add_argument("--match", choices=_UNITS, help="unit in which every run gets the same (default: seconds)")
    for name, metavar, more in options:
        names = [name, "--output_dir"] if name == "--output-dir" else [name]
        parser.add_argument(*names, metavar=metavar, **more)
    parser.set_defaults(execute=compare)
    if chosen:
        add_settings(parser, lambda name: name != "output_dir")


def compare(parsed: argparse.Namespace) -> int:
    """Compare and return the exit code."""
    from rich.console import Console

    from brorl.api.compare import compare as run_comparison

    try:
        finished = run_comparison(
            *parsed.arms,
            sweep=_sweep(parsed.sweep),
            checkpoint=parsed.checkpoint,
            match=parsed.match,
            budget=parsed.budget,
            marks=_marks(parsed.marks),
            seeds=parsed.seeds,
            jobs=parsed.jobs,
            output_dir=parsed.output_dir,
            **overrides_of(parsed),
        )
    except KeyboardInterrupt:  # the message is printed already
        return STOPPED
    Console(highlight=False).print("", finished, soft_wrap=True)
    return 0


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
