"""`brorl.report` and `brorl.samples`: stored runs as an HTML file, and their rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from brorl.errors import UserError, option

if TYPE_CHECKING:
    from brorl.reporting.page.page import Report
    from brorl.reporting.samples import Samples


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


def samples(
    run: str | Path,
    *,
    step: int | None = None,
    prompt: int | str | None = None,
    kind: Literal["all", "wrong", "right"] = "all",
    limit: int = 5,
    held_out: bool = False,
) -> Samples:
    """Read the prompts of a step with their pass rates, and the rollouts of one of them.

    Args:
        run: The run directory.
        step: The step (default: the last stored one).
        prompt: Number of the prompt in the step, from 1, or its name (default: the one with the pass rate nearest to
            one half, among those with responses of the kind).
        kind: Show all responses, only the incorrect ones (wrong), or only the correct ones (right).
        limit: Most responses to show, at least 1.
        held_out: Read the responses to held-out prompts at an evaluation, not the rollouts of training.

    Returns:
        The prompts and the responses, which show as text in terminals and notebooks.

    Raises:
        UserError: If the run, the step or the prompt does not exist, with the existing ones.
    """
    if limit < 1:
        raise UserError(f"{option('limit')}: expected a number of at least 1, not {limit}")

    from brorl.reporting.samples import find_samples

    name = None if prompt is None else str(prompt)
    path = Path(run).expanduser()
    return find_samples(path, step=step, prompt=name, kind=kind, limit=limit, held_out=held_out)
