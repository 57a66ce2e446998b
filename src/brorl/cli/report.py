"""`brorl report`: the options of `brorl.report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from brorl.cli.settings import Commands
from brorl.runs import RUNS


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "report",
        usage="brorl report RUN... [--output FILE]",
        help="show runs as one HTML file: charts, rollouts, settings",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories; charts show all of them")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help=f"the file (default: RUN/report.html; for several runs: {RUNS}/report.html)",
    )  # fmt: skip
    parser.set_defaults(execute=report)


def report(parsed: argparse.Namespace) -> int:
    """Write the report of runs and return the exit code."""
    from brorl.api.report import report as write_report

    print(write_report(*parsed.runs, output=parsed.output))  # noqa: T201
    return 0
