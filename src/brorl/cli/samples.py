"""`brorl samples`: the options of `brorl.samples`."""

from __future__ import annotations

import argparse
from pathlib import Path

from brorl.cli.settings import Commands


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "samples",
        usage="brorl samples RUN [--held-out] [--step S] [--prompt NUMBER_OR_NAME] [--wrong | --right] [--limit K]",
        help="show stored rollouts: prompts with their pass rates, responses with verdicts",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--held-out", action="store_true",
        help="show the responses to held-out prompts at an evaluation, not the rollouts of training",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="S", help="the step (default: the last stored one)")
    parser.add_argument(
        "--prompt", metavar="NUMBER_OR_NAME",
        help="the prompt whose responses to show (default: the one with the pass rate nearest to one half)",
    )  # fmt: skip
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in (("wrong", "incorrect"), ("right", "correct")):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=f"only {what} responses")
    parser.add_argument("--limit", type=_positive, default=5, metavar="K", help="most responses to show (default: 5)")
    parser.set_defaults(execute=samples)


def samples(parsed: argparse.Namespace) -> int:
    """Show rollouts of a run and return the exit code."""
    from rich.console import Console

    from brorl.api.samples import samples as find_samples

    found = find_samples(
        parsed.run, step=parsed.step, prompt=parsed.prompt, kind=parsed.kind or "all", limit=parsed.limit,
        held_out=parsed.held_out,
    )  # fmt: skip
    Console(highlight=False).print(found, soft_wrap=True)
    return 0


def _positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r}")
    return int(text)
