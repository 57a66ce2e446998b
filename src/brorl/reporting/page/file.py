"""The report's file: one HTML page per call, which replaces earlier reports and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from brorl.errors import UserError
from brorl.reporting.page.page import MARK, make_page
from brorl.runs import RUNS
from brorl.runs.run_record import read_runs
from brorl.storage import replace_file, storage_errors

REPORT = "report.html"


@dataclass(frozen=True)
class Report:
    """A report on disk.

    Attributes:
        path: The file.
        num_bytes: Its size.
    """

    path: Path
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.path} ({self.num_bytes / 1e6:.1f} MB): open it in a browser"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.path.as_posix())}" target="_blank">{escape(str(self))}</a>'


def write_report(runs: Sequence[Path], output: Path | None = None) -> Report:
    """Write the report of some runs.

    Args:
        runs: At least one run directory; charts show several together.
        output: The file; by default `report.html` in the run directory, or in `runs` if there are several.

    Raises:
        UserError: If a run has nothing to show, or the file exists and is not a report.
        StorageError: If the file cannot be written.
    """
    target = output or (runs[0] / REPORT if len(runs) == 1 else RUNS / REPORT)
    if target.is_dir():
        raise UserError(f"--output {target} is a folder; give the name of a file in it, such as {target / REPORT}")
    if target.exists():
        with target.open("rb") as file:
            if MARK.encode() not in file.read(200):
                raise UserError(f"{target} exists and is not a report; give another --output, or move it away")
    content = make_page(read_runs(runs)).html.encode()
    with storage_errors(target, "rerun the command, or give another --output"):
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, content)
    return Report(target, len(content))
