"""The check that a run can be resumed, before the data and the model are read.

Changed settings, missing checkpoints, a damaged checkpoint and lost lines of metrics are errors that name the fix.
"""

from __future__ import annotations

from pathlib import Path

from brorl.config.resuming import CHANGEABLE_ON_RESUME, first_change, fixed_settings
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.runs.checkpoint import complete_checkpoints, find_damage, read_step
from brorl.runs.run_directory import RunDirectory


def check_resumable(config: TrainConfig, directory: RunDirectory, checkpoint: Path | None) -> None:
    """Reject a run that cannot continue as the same run; a new run passes."""
    begun = directory.read_begun()
    before = begun.get("settings", {})
    changed = first_change(before, config)
    if changed is not None:
        now = fixed_settings(config)[changed]
        raise UserError(
            f"{changed} was {before[changed]} when the run began, and {directory.config_file} now has {now}; set it "
            f"back to resume, or start a new run: {start_anew(directory)}. These settings can change: "
            f"{', '.join(CHANGEABLE_ON_RESUME)}"
        )
    if checkpoint is None and begun.get("has_checkpoint", any(line["step"] for line in directory.read_metrics())):
        raise UserError(
            f"{directory.checkpoints} no longer has a complete checkpoint; restore the checkpoints to resume, or "
            f"start a new run: {start_anew(directory)}"
        )
    if checkpoint is None:
        return
    step = read_step(checkpoint)
    missing = {*range(step + 1)} - {r["step"] for r in directory.read_metrics() if "attempt" not in r}
    if missing:
        raise UserError(
            f"{directory.metrics_file} has no line of step {min(missing)}, although {checkpoint} was saved after it; "
            "restore the file, or repeat the steps: remove the checkpoints of that step and of later ones, then rerun "
            "the command"
        )
    damage = find_damage(checkpoint)
    if damage:
        raise UserError(f"checkpoint {checkpoint} is damaged: {damage}; {go_back(directory)}")


def go_back(directory: RunDirectory) -> str:
    """Return the command to use if the last checkpoint cannot be used."""
    *earlier, last = complete_checkpoints(directory.checkpoints)
    if earlier:
        return f"resume from {earlier[-1].name} with: rm -r {last} && brorl resume {directory.path}"
    return f"there is no earlier one; start a new run: {start_anew(directory)}"


def start_anew(directory: RunDirectory) -> str:
    """Return the command that starts a new run with the settings of this one."""
    return f"brorl train {directory.config_file} --output_dir null"
