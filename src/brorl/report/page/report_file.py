"""The report as a file: the page of some runs, written over nothing but an earlier report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from brorl.errors import StorageError, UserError
from brorl.report.page.page import MARK, make_page
from brorl.runs.run_record import read_runs

REPORT = "report.html"


def write_report(paths: Sequence[Path], target: Path) -> int:
    """Write the report of runs and return its size in bytes.

    Args:
        paths: Run directories.
        target: The file; an earlier report is replaced.

    Raises:
        UserError: If there is nothing to show, or `target` is a folder or another file.
    """
    _check_target(target)
    content = make_page(read_runs(paths)).html.encode()
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"could not write {target}: {error.strerror or error}; free some space or give another --output"
        ) from error
    return len(content)


def _check_target(target: Path) -> None:
    """Reject a target that is not a report."""
    if target.is_dir():
        raise UserError(f"--output {target} is a folder; give the name of a file in it, such as {target / REPORT}")
    if not target.exists():
        return
    with target.open("rb") as file:
        if MARK.encode() not in file.read(200):
            raise UserError(f"{target} exists already and is not a report; give another --output, or move it away")
