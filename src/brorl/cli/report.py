"""`brorl report`: runs as one HTML file that needs no network."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from brorl.cli.runs_folder import RUNS
from brorl.cli.settings import Commands
from brorl.errors import StorageError, UserError

if TYPE_CHECKING:
    from brorl.report.page.page import Page

REPORT = "report.html"


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
        help=f"where to write it (default: RUN/{REPORT}; of several runs: {RUNS / REPORT})",
    )
    parser.set_defaults(execute=lambda parsed: report(parsed.runs, parsed.output))


def report(paths: list[Path], output: Path | None) -> int:
    """Write the report of runs and return the exit code."""
    target = output or (paths[0] / REPORT if len(paths) == 1 else RUNS / REPORT)
    size = write_report(paths, target)
    print(f"{target} ({size / 1e6:.1f} MB): open it in a browser")  # noqa: T201
    return 0


def write_report(paths: list[Path], target: Path) -> int:
    """Write the report of runs and return its size in bytes.

    Raises:
        UserError: If there is nothing to show, or the target is something else.
    """
    from brorl.report.page.page import make_page
    from brorl.runs.run_record import read_runs

    _check_target(target)
    page = make_page(read_runs(paths))
    _write(target, page)
    return len(page.html.encode())


def _check_target(target: Path) -> None:
    """Refuse to write over anything but a report."""
    from brorl.report.page.page import MARK

    if target.is_dir():
        raise UserError(f"--output {target} is a folder; give the name of a file in it, such as {target / REPORT}")
    if not target.exists():
        return
    with target.open("rb") as file:
        if MARK.encode() not in file.read(200):
            raise UserError(f"{target} is there already and is not a report; give another --output, or move it away")


def _write(target: Path, page: Page) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page.html, "utf-8")
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; free some space or give another --output"
        ) from error
