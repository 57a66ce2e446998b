"""The folder `runs/`, where every command puts its output unless told otherwise, and the newest run in it.

In: the folder, and the settings that `brorl resume` changes. Out: the run that was active last and is not finished.
Evaluations, plans, simulations and comparisons lie in the same folder; they have no `config.yaml` and are not runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brorl.errors import UserError
from brorl.runs import RUNS as RUNS

_ACTIVITY = ("config.yaml", "metrics.jsonl", "run.log")  # what a run writes; a report written later does not count


def newest_unfinished(overrides: Mapping[str, Any]) -> Path:
    """Return the run under `runs/` that was active last, among those that can go on.

    Args:
        overrides: Settings that resume changes, by dotted name; more steps make a finished run one that can go on.

    Raises:
        UserError: If there is none; it names the newest run and what to do.
    """
    runs = sorted((folder for folder in RUNS.glob("*") if (folder / "config.yaml").is_file()), key=_last_activity)
    if not runs:
        raise UserError(
            f"there is no run in {RUNS}/ to resume; start one with brorl train, or give the run's directory"
        )
    reasons = []
    for run in reversed(runs):
        reason = _why_not(run, overrides)
        if reason is None:
            return run
        reasons.append(reason)
    raise UserError(f"no run in {RUNS}/ can be resumed; the newest, {runs[-1]}, {reasons[0]}")


def _last_activity(run: Path) -> tuple[int, str]:
    """Return when a run wrote last, in nanoseconds; its name decides where that is equal."""
    return max((run / name).stat().st_mtime_ns for name in _ACTIVITY if (run / name).exists()), run.name


def _why_not(run: Path, overrides: Mapping[str, Any]) -> str | None:
    """Return why a run cannot go on; None if it can."""
    from brorl.assemble.settings import build_budget
    from brorl.config.reading import make_config, read_recipe
    from brorl.cost import total_cost
    from brorl.runs.checkpoint import last_checkpoint, read_step
    from brorl.runs.run_directory import RunDirectory

    directory = RunDirectory(run)
    try:
        with directory.locked():
            config = make_config(read_recipe(str(directory.config_file)), overrides, str(directory.config_file))
            records = directory.read_metrics()
    except UserError as error:
        return f"cannot go on: {error}"
    checkpoint = last_checkpoint(directory.checkpoints)
    step = read_step(checkpoint) if checkpoint else 0
    if config.steps is not None and step >= config.steps:
        return (
            f"is finished ({step:,} step{'s' * (step != 1)}); train longer with: brorl resume {run} --steps {2 * step}"
        )
    budget = build_budget(config)
    if budget.is_spent(total_cost(record for record in records if record["step"] <= step)):
        return f"has spent its budget; train longer with: brorl resume {run} --budget.limit {2 * budget.limit:g}"
    return None
