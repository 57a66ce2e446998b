"""`brorl doctor`: facts on this machine and its sandbox, or on the machines of a cluster."""

from __future__ import annotations

import argparse

import brorl
from brorl.activity import Phase
from brorl.cli.settings import Commands
from brorl.errors import UserError


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        usage="brorl doctor [--cluster ADDRESS [--folder FOLDER]]",
        help="examine this machine: device, memory, the sandbox of untrusted code (exit code 1 without one), extras; "
        "or the machines of a cluster (exit code 1 with a fault)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="Ray cluster to examine: HOST:PORT, or auto for one on this machine"
    )
    parser.add_argument("--folder", metavar="FOLDER", help="folder that all machines of the cluster should share")
    parser.set_defaults(execute=run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from brorl.console.screen import Screen

    if parsed.folder is not None and parsed.cluster is None:
        raise UserError("--folder is checked on the machines of a cluster; add --cluster ADDRESS")
    with Screen(f"brorl {brorl.__version__}") as screen:  # shown while torch is imported
        screen.observe(Phase("examining", "this machine" if parsed.cluster is None else "the cluster"))
        report, is_well = _machine() if parsed.cluster is None else _cluster(parsed.cluster, parsed.folder)
    screen.console.print(report)
    return 0 if is_well else 1


def _machine() -> tuple[object, bool]:
    from brorl.api.doctor import doctor

    found = doctor(progress=False)
    return found, found.level is not None


def _cluster(address: str, folder: str | None) -> tuple[object, bool]:
    from brorl.api.cluster_diagnosis import diagnose_cluster

    found = diagnose_cluster(address, folder)
    return found, not found.faults
