"""`brorl.train`: a recipe to a run directory, and the run to its end; also the body of `brorl train` and `resume`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.api.cheap_checks import check_cheaply
from brorl.api.runs_folder import make_run_directory, newest_unfinished, refuse_used_folder, remove_unused
from brorl.api.settings import ConfigOrPath, recipe_name, resolve_config
from brorl.errors import UserError
from brorl.runs import RUNS

if TYPE_CHECKING:
    from brorl.api.training_result import TrainingResult
    from brorl.console.screen import Screen

_RECIPE = "quickstart"


def train(
    config_or_path: ConfigOrPath | None = None, *, resume: bool = False, progress: bool = True, **overrides: Any
) -> TrainingResult:
    """Train a model and return the result; the files are in the run directory.

    Ctrl-C, the interrupt of a notebook and SIGTERM stop the run: it saves a checkpoint and returns. A second one
    discards the step under way and raises KeyboardInterrupt. Outside of the main thread, signals have no effect.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file, nested settings, or a config; None is
            `quickstart`. With `resume`, a run directory; None is the newest unfinished run in `runs/`.
        resume: Continue a run from its last checkpoint. Settings such as `steps` can change
            (`brorl.config.resuming.CHANGEABLE_ON_RESUME`).
        progress: Print the output of the command; run.log has it in any case.
        overrides: Settings that replace those of the recipe, nested or by dotted name:
            `train("quickstart", steps=30, evaluation={"every": 5}, **{"sampling.top_k": 0})`. Among them are
            `output_dir` (default: a new directory in `runs/`), `report`, and `tracking`.

    Returns:
        The result. It shows as tables in terminals and notebooks.

    Raises:
        UserError: If a setting, the data, the model or the machine's memory does not fit; nothing is left on the disk.
    """
    if resume:
        if not isinstance(config_or_path, str | Path | None):
            raise UserError("resume=True needs a run directory as the first argument, or None for the newest run")
        return _resume(config_or_path, overrides, progress)
    recipe = _RECIPE if config_or_path is None else config_or_path
    config = resolve_config(recipe, overrides)
    check_cheaply(config)
    with _screen(progress) as screen:  # shown while torch is imported, which takes seconds
        from brorl.api.training_session import TrainingSession

        directory = make_run_directory(config.output_dir, Path(recipe_name(recipe)).stem)
        with directory.locked():  # until it is released, no other process uses or removes the directory
            refuse_used_folder(directory.path)
            try:
                return TrainingSession(config, directory, screen, is_new=True).run_to_end()
            except UserError:
                if not directory.read_metrics():
                    remove_unused(directory)
                raise


def _resume(path: str | Path | None, overrides: Mapping[str, Any], progress: bool) -> TrainingResult:
    """Continue the run in a directory, or the newest one."""
    if path is None:
        path = newest_unfinished(overrides)
        if progress:
            print(f"resuming {path}, the newest unfinished run in {RUNS}/")  # noqa: T201
    config_file = Path(path) / "config.yaml"
    if not config_file.is_file():
        raise UserError(
            f"{path} is not a run directory (it has no config.yaml); use the directory that `brorl train` printed"
        )
    config = resolve_config(config_file, overrides)
    with _screen(progress) as screen:
        from brorl.api.training_session import TrainingSession
        from brorl.runs.run_directory import RunDirectory

        directory = RunDirectory(Path(path))
        with directory.locked():
            return TrainingSession(config, directory, screen, is_new=False).run_to_end()


def _screen(progress: bool) -> Screen:
    from brorl.console.screen import Screen

    return Screen(f"brorl {brorl.__version__}", silent=not progress)
