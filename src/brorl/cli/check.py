"""`brorl check`: the options of `brorl.check`."""

from __future__ import annotations

import argparse

from brorl.cli.settings import Commands, add_settings, overrides_of


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "check",
        usage="brorl check [RECIPE] [--no-timing] [--key value ...]",
        help="check a recipe without training: settings, prompts, verifier, memory, seconds per step",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", default="quickstart", metavar="RECIPE", help="YAML file or built-in name")
    parser.add_argument(
        "--no-timing", "--no_timing", dest="timing", action="store_false",
        help="do not load the model to measure the seconds of a step",
    )  # fmt: skip
    parser.set_defaults(execute=run_command)
    if chosen:
        add_settings(parser)


def run_command(parsed: argparse.Namespace) -> int:
    """Check the recipe and return the exit code."""
    from brorl.api.check import check

    check(parsed.recipe, timing=parsed.timing, **overrides_of(parsed))
    return 0
