"""`brorl.report`: runs as one HTML file; also the body of `brorl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brorl.errors import UserError

if TYPE_CHECKING:
    from brorl.reporting.page.page import Report


def report(*runs: str | Path, output: str | Path | None = None) -> Report:
    """Write the report of runs as one HTML file that needs no network.

    Args:
        runs: At least one run directory; charts show several together.
        output: The file (default: RUN/report.html; for several runs: runs/report.html).

    Returns:
        The file and its size. In a notebook it is a link.

    Raises:
        UserError: If a run has nothing to show, or the file exists and is not a report.
    """
    if not runs:
        raise UserError("RUN is missing; give at least one run directory")

    from brorl.reporting.page.page import write_report

    paths = [Path(run).expanduser() for run in runs]
    return write_report(paths, None if output is None else Path(output).expanduser())
