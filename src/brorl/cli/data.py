"""`brorl data`: the options of `brorl.data`."""

from __future__ import annotations

import argparse

from brorl.api.data import SHOWN
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.errors import UserError


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "data",
        usage="brorl data [RECIPE] [--show N] [--key value ...]",
        help="check the sources of a recipe, and show their questions, dropped rows, lengths and example prompts",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", nargs="?", default="quickstart", metavar="RECIPE",
        help="YAML file or built-in name; or a file of questions, read with the default columns and domain",
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=SHOWN, metavar="N", help=f"example prompts (default: {SHOWN})")
    parser.set_defaults(execute=run_command)
    if chosen:
        add_settings(parser)


def run_command(parsed: argparse.Namespace) -> int:
    """Check and show the data of the recipe and return the exit code."""
    from brorl.api.data import data

    result = data(parsed.recipe, show=parsed.show, **overrides_of(parsed))

    from rich.console import Console

    Console(highlight=False).print(result, soft_wrap=True)
    return 0 if result.problem is None else UserError.exit_code
