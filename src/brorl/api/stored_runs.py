"""`brorl.report` shows stored runs as an HTML file; `brorl.samples` shows their rollouts."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from brorl.errors import UserError, option
from brorl.reporting.samples import PromptRow, Samples, of_kind, one_line
from brorl.runs.run_directory import check_run, read_run
from brorl.runs.stored_rollouts import Folder, read_groups, stored_steps

if TYPE_CHECKING:
    from brorl.algorithms.groups import Group
    from brorl.reporting.page import Report


def report(*runs: str | Path, output: str | Path | None = None) -> Report:
    """Write a report on one or more runs as one HTML file that works offline.

    Examples:
        >>> brorl.report("runs/first", "runs/second", output="both.html")

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

    from brorl.reporting.page import write_report

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
    """Read a step's prompts with their pass rates, and the rollouts of one prompt.

    Examples:
        >>> brorl.samples("runs/first", step=20, kind="wrong")

    Args:
        run: The run directory.
        step: The step (default: the last stored one).
        prompt: Number of the prompt in the step, from 1, or its name (default: the one with the pass rate nearest to
            one half, among those with responses of the kind).
        kind: Show all responses, only the incorrect ones (wrong), or only the correct ones (right).
        limit: Maximum number of responses to show, at least 1.
        held_out: Read the responses to held-out prompts at an evaluation, not the rollouts of training.

    Returns:
        The prompts and the responses, displayed as text in terminals and notebooks.

    Raises:
        UserError: If the run, the step or the prompt does not exist; the error lists those that do.
    """
    if limit < 1:
        raise UserError(f"{option('limit')}: expected a number of at least 1, not {limit}")

    path = Path(run).expanduser()
    name = None if prompt is None else str(prompt)
    check_run(path)
    folder: Folder = "evaluations" if held_out else "rollouts"
    if not (steps := stored_steps(path, folder)):
        from brorl.reporting.summary import why_missing  # imports scipy

        raise UserError(f"{path} contains no {folder}: {why_missing(read_run(path), folder)}")
    step = steps[-1] if step is None else step
    rows: list[PromptRow] = []
    nearest: tuple[float, int | None, Group | None] = inf, None, None  # (distance from the target, number, group)
    for index, group in enumerate(read_groups(path, step, folder), 1):
        rows.append(PromptRow.of(index, group))
        if name is None:
            distance = abs(rows[-1].pass_rate - 0.5) if of_kind(group, kind).size else inf
        else:
            # A number takes precedence over a name that looks like a number, so every prompt can be reached.
            distance = 0.0 if name == str(index) else 1.0 if name == group.prompt.id else inf
        if distance < nearest[0]:
            nearest = distance, index, group
    if not rows:
        raise UserError(f"step {step} of {path} sampled no prompts")
    if name is not None and nearest[1] is None:
        raise UserError(
            f"step {step} of {path} has no prompt {one_line(name)}; give a number from 1 to {len(rows)}, or a name "
            f"such as {one_line(rows[0].prompt_id)}"
        )
    return Samples(path, step, tuple(rows), *nearest[1:], name is not None, folder, kind, limit)
