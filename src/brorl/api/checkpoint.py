"""The meaning of CHECKPOINT on the command line and in Python: a model, a run, or a checkpoint in a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from brorl.errors import UserError
from brorl.model.name import check_folder


class Checkpoint(NamedTuple):
    """A model, and the run that trained it.

    Attributes:
        model: Name or folder of the model to load.
        run_config: Config of the run; None if the model is not from a run.
    """

    model: str
    run_config: Path | None


def resolve_checkpoint(name: str) -> Checkpoint:
    """Return the model and the run of a name.

    Args:
        name: `quickstart`, a model's folder or hub id, a run directory (its last checkpoint), or a checkpoint in one,
            such as `best`.

    Raises:
        UserError: If the name is a file, or the run has no complete checkpoint.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"{name} is a file; give a model's folder or hub id, a run directory, or a checkpoint in one")
    if (path / "config.yaml").is_file():
        from brorl.runs.checkpoint import last_checkpoint

        last = last_checkpoint(path / "checkpoints")
        if last is None:
            raise UserError(f"the run {path} has no complete checkpoint yet; give the model that it started from")
        return Checkpoint(str(last), path / "config.yaml")
    check_folder(name)
    run_config = path.resolve().parent.parent / "config.yaml"
    if path.is_dir() and run_config.is_file() and path.resolve().parent.name == "checkpoints":
        from brorl.runs.checkpoint import complete_checkpoints

        if path.resolve() not in [p.resolve() for p in complete_checkpoints(path.resolve().parent)]:
            raise UserError(f"{path} is not a complete checkpoint of its run; choose another one")
        return Checkpoint(str(path), run_config)
    return Checkpoint(name, None)
