"""Arguments shared by several commands: a recipe, a checkpoint, a new run directory. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from brorl.config.reading import ConfigOrPath, make_config, raw_settings
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import check_first_rows
from brorl.format import shell_command
from brorl.model.settings import check_folder, shipped_folder
from brorl.runs import RUNS
from brorl.runs.run_directory import RunDirectory
from brorl.storage import followed, is_file, is_used
from brorl.verification.sandbox.inside.functions import IN_A_WORKER, MAIN_GUARD


def refuse_in_worker() -> None:
    """Raise a UserError in a verifier worker: importing the user's file there would run a brorl command again."""
    if IN_A_WORKER in os.environ:
        raise UserError(MAIN_GUARD)


def make_run_directory(output_dir: str | None, name: str) -> RunDirectory:
    """Create a new run directory: `output_dir`, or `runs/name...`.

    `runs/` also contains evaluations, plans and comparisons, which are not runs and have no `config.yaml`.
    """
    try:
        if output_dir is None:
            return RunDirectory(_new_directory(RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"))
        path = Path(output_dir).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return RunDirectory(path)
    except FileExistsError as error:
        raise _used(path) from error
    except OSError as error:
        raise UserError(
            f"could not make output_dir {error.filename}: {error.strerror}; set output_dir to a writable folder"
        ) from error


def refuse_used_folder(path: Path) -> None:
    """Reject an `output_dir` that is a file or a nonempty directory."""
    if is_used(path):
        raise _used(path)


def _new_directory(base: Path) -> Path:
    """Create a directory under a name not yet taken, even while other processes create directories."""
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("count() does not end")


def _used(path: Path) -> UserError:
    return UserError(
        f"output_dir {path} exists and is not empty; choose a different one, or resume the run in it: "
        f"{shell_command('resume', path)}"
    )


WITHOUT_TRAINING: Mapping[str, Any] = {
    "phases": [],
    "evaluation.best_k": None,
    "engine.clock": "wall",
    "optimizer.old_logprobs": "recompute",
    "importance.correction": "truncate",
    "rewards.terms": {},
}
"""Overrides for recipes used only for sampling. They prevent conflicts between training settings."""


def resolve_config(recipe: ConfigOrPath, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return the checked config of a recipe after applying overrides.

    Overrides are nested (`{"evaluation": {"every": 5}}`) or use dotted names (`{"evaluation.every": 5}`). Overriding
    `budget.limit` without `steps` also replaces the recipe's `steps`.
    """
    if isinstance(recipe, TrainConfig) and not overrides:
        return recipe
    return make_config(raw_settings(recipe), overrides, recipe_name(recipe))


def recipe_name(recipe: ConfigOrPath) -> str:
    """Return the recipe's name for messages and folders: the given name, or `settings` if the caller passed values."""
    return str(recipe) if isinstance(recipe, str | Path) else "settings"


def check_cheaply(config: TrainConfig) -> None:
    """Check a new run's directory, its model folder, the files that define its functions, and its first data row."""
    if config.output_dir is not None:
        refuse_used_folder(Path(config.output_dir).expanduser())
    check_folder(config.model)
    for setting, function in config.own_functions.items():
        file = function.rpartition(":")[0]
        if file.endswith(".py") and not is_file(file):
            raise UserError(
                f"{setting}: there is no file {file} (working directory {Path.cwd()}); write the function, "
                "or fix the path"
            )
    check_first_rows(config)


class Checkpoint(NamedTuple):
    """A model and the run that produced it."""

    model: str  # name or folder
    run_config: Path | None  # config.yaml of the run that trained it; None if no run did

    @property
    def recipe(self) -> str | None:
        """The recipe that trained the model: that of its run, quickstart for a shipped model, or None."""
        if self.run_config is not None:
            return str(self.run_config)
        return None if shipped_folder(self.model) is None else "quickstart"


def resolve_checkpoint(name: str) -> Checkpoint:
    """Resolve a name to a model and its run: a model, a run (its last checkpoint), a checkpoint or its `ema`."""
    path = Path(name).expanduser()
    path = followed(path) if path.is_file() else path  # `best` on a system without symlinks
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        raise UserError(
            f"{name} names a file; give a model's folder or hub id, a run directory, or a checkpoint in one"
        )
    if (path / "config.yaml").is_file():
        from brorl.runs.checkpoint import last_checkpoint

        last = last_checkpoint(path / "checkpoints")
        if last is None:
            raise UserError(f"the run {path} has no complete checkpoint yet; give the model that it started from")
        return Checkpoint(str(last), path / "config.yaml")
    if not path.is_dir():
        check_folder(name)
    folder = path.resolve().parent if path.name == "ema" else path.resolve()  # averaged weights are in a subfolder
    run_config = folder.parent.parent / "config.yaml"
    if path.is_dir() and run_config.is_file() and folder.parent.name == "checkpoints":
        from brorl.runs.checkpoint import complete_checkpoints

        if folder not in [p.resolve() for p in complete_checkpoints(folder.parent)]:
            raise UserError(f"{path} is not a complete checkpoint of its run; choose a different one")
        return Checkpoint(str(path), run_config)
    return Checkpoint(name, None)
