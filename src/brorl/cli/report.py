"""`brorl report`: runs as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from brorl.api.runs_folder import RUNS
from brorl.cli.settings import Commands

_REPORT = "report.html"


def add_parser(commands: Commands, chosen: bool) -> None:  # noqa: ARG001 (no settings to add)
    """Add the command."""
    parser = commands.add_parser(
        "report",
        usage="brorl report RUN... [--output FILE]",
        help="show runs as one HTML file: charts, rollouts, settings",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories; several are overlaid")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where to write it (default: RUN/{_REPORT}; of several runs: {RUNS / _REPORT})",
    )
    parser.set_defaults(execute=lambda parsed: report(parsed.runs, parsed.output))


def report(paths: list[Path], output: Path | None) -> int:
    """Write the report of runs and return the exit code."""
    from brorl.report.page.report_file import REPORT, write_report

    target = output or (paths[0] / REPORT if len(paths) == 1 else RUNS / REPORT)
    size = write_report(paths, target)
    print(f"{target} ({size / 1e6:.1f} MB): open it in a browser")  # noqa: T201
    return 0
