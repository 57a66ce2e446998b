"""`brorl samples`: stored rollouts in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from brorl.cli.settings import Commands

if TYPE_CHECKING:
    from brorl.report.samples import Kind
    from brorl.runs.stored_rollouts import Folder


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "samples",
        usage="brorl samples RUN [--held-out] [--step S] [--prompt NUMBER_OR_NAME] [--wrong | --right] [--limit K]",
        help="show stored rollouts: prompts with their success, responses with verdicts",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--held-out",
        dest="folder",
        action="store_const",
        const="evaluations",
        default="rollouts",
        help="show the responses to held-out prompts at an evaluation, not the rollouts of training",
    )
    parser.add_argument("--step", type=int, metavar="S", help="the step (default: the last one stored)")
    parser.add_argument(
        "--prompt", metavar="NUMBER_OR_NAME", help="the prompt whose responses to show (default: the most mixed one)"
    )
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in (("wrong", "incorrect"), ("right", "correct")):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=f"only {what} responses")
    parser.add_argument("--limit", type=_positive, default=5, metavar="K", help="show so many responses (default: 5)")
    parser.set_defaults(
        execute=lambda parsed: samples(
            parsed.run, parsed.step, parsed.prompt, parsed.kind or "all", parsed.limit, parsed.folder
        )
    )


def samples(run: Path, step: int | None, prompt: str | None, kind: Kind, limit: int, folder: Folder) -> int:
    """Show rollouts of a run and return the exit code."""
    from rich.console import Console

    from brorl.report.samples import find_samples, show_samples

    show_samples(find_samples(run, step, prompt, kind, folder), kind, limit, Console(highlight=False))
    return 0


def _positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r}")
    return int(text)
