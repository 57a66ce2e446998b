"""`brorl doctor`: facts on this machine, and the sandbox that holds on it."""

from __future__ import annotations

import argparse

import brorl
from brorl.activity import Phase
from brorl.cli.settings import Commands


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        usage="brorl doctor",
        help="examine this machine: device, memory, the sandbox of untrusted code (exit code 1 without one), extras",
        allow_abbrev=False,
    )
    parser.set_defaults(execute=run_command)


def run_command(parsed: argparse.Namespace) -> int:  # noqa: ARG001 (no options)
    """Print the report and return the exit code."""
    from brorl.console.screen import Screen

    with Screen(f"brorl {brorl.__version__}") as screen:  # shown while torch is imported
        screen.observe(Phase("examining", "this machine"))

        from brorl.api.doctor import doctor

        found = doctor(progress=False)
    screen.console.print(found)
    return 0 if found.level is not None else 1
