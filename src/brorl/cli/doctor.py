"""`brorl doctor`: facts on this machine and the sandbox that holds on it, or the faults of a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

import brorl
from brorl.activity import Phase
from brorl.cli.settings import Commands
from brorl.runs import RUNS


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        usage="brorl doctor [--cluster ADDRESS [--folder DIR]]",
        help="examine this machine (device, memory, extras; exit code 1 without a sandbox of code) or a cluster",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="examine all machines of a running Ray cluster instead (exit code 1 with a fault): HOST:PORT of its head, "
        "or auto for a cluster that runs on this machine",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default=RUNS,
        help="folder of the runs, which all machines of the cluster must share (default: %(default)s)",
    )
    parser.set_defaults(execute=run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from brorl.console.screen import Screen

    with Screen(f"brorl {brorl.__version__}") as screen:  # shown while torch is imported
        if parsed.cluster is not None:
            screen.observe(Phase("examining", "the cluster"))
            is_sound, report = _cluster(parsed.cluster, Path(parsed.folder))
        else:
            screen.observe(Phase("examining", "this machine"))
            is_sound, report = _machine()
    screen.console.print(report)
    return 0 if is_sound else 1


def _machine() -> tuple[bool, object]:
    """Return whether a sandbox holds on this machine, and the report."""
    from brorl.api.doctor import doctor

    found = doctor(progress=False)
    return found.level is not None, found


def _cluster(address: str, folder: Path) -> tuple[bool, object]:
    """Return whether a cluster has no fault, and the report."""
    from brorl.api.cluster_diagnosis import diagnose_cluster

    found = diagnose_cluster(address, folder)
    return not found.faults, found
