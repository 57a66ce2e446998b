"""`brorl.train`: a recipe to a run directory, and the run to its end; and the commands `brorl train` and `resume`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from brorl.api.recipe import (
    check_cheaply,
    make_run_directory,
    newest_unfinished,
    recipe_name,
    refuse_used_folder,
    resolve_config,
)
from brorl.api.training_result import TrainingResult
from brorl.config.reading import ConfigOrPath
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import LearnerLostError, UserError
from brorl.runs import RUNS
from brorl.verification.sandbox.inside.functions import IN_A_WORKER

if TYPE_CHECKING:
    from brorl.api.given import Rewards

_RECIPE = "quickstart"


def train(
    config_or_path: ConfigOrPath | None = None,
    *,
    reward: Rewards | None = None,
    resume: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> TrainingResult:
    """Train a model and return the result; the files are in the run directory.

    Ctrl-C, the interrupt of a notebook and SIGTERM stop the run: it saves a checkpoint and returns. A second one
    discards the step in progress and raises KeyboardInterrupt. Outside of the main thread, signals have no effect.

    Args:
        config_or_path: Name of a built-in recipe, path of a YAML file, nested settings, or a config; None is
            `quickstart`. With `resume`, a run directory; None is the newest unfinished run in `runs/`.
        reward: A function that verifies responses, for all domains of the data (`verification.functions`): with TRL's
            signature, `reward(completions, **columns) -> list[float]`, or `verify(response, reference)`. Several terms
            are a mapping, `{"right": right, "brief": (brief, 0.2)}`: the first decides what is correct, and the
            weighted sum is the reward. Worker processes import the file of a function; the source of one of a notebook
            is written into the run directory.
        resume: Continue a run from its last checkpoint. Settings such as `steps` can change
            (`brorl.config.resuming.CHANGEABLE_ON_RESUME`).
        progress: Print the output of the command; run.log has it in any case.
        overrides: Settings that replace those of the recipe, nested or by dotted name:
            `train("quickstart", steps=30, evaluation={"every": 5}, **{"sampling.top_k": 0})`. Among them are
            `output_dir` (default: a new directory in `runs/`), `report`, and `tracking`. `data` may also be rows: a
            `datasets.Dataset`, a list of dicts, a data frame or a table. Their columns are guessed as `brorl init`
            does, and they are stored in the run directory. Without a recipe, the other settings are those that `brorl
            init` writes.

    Returns:
        The result. It shows as tables in terminals and notebooks.

    Raises:
        UserError: If a setting, the data, the model or the machine's memory does not fit; nothing is left on the disk.
    """
    if IN_A_WORKER in os.environ:
        raise UserError(
            "a worker that loads the file of a function called train; put the call under if __name__ == '__main__'"
        )
    if resume:
        if not isinstance(config_or_path, str | Path | None):
            raise UserError("resume=True needs a run directory as the first argument, or None for the newest run")
        return _resume(config_or_path, overrides, progress)
    from brorl.api.given import FOLDER, resolve_given

    with TemporaryDirectory(prefix="brorl-given-") as scratch:
        folder = Path(scratch) / FOLDER
        recipe, config, said = resolve_given(config_or_path, overrides, reward, folder)
        check_cheaply(config)
        if progress and said:
            print("\n".join(said))  # noqa: T201
        return _train_new(config, Path(recipe_name(recipe)).stem, folder, progress)


def _train_new(config: TrainConfig, name: str, given: Path, progress: bool) -> TrainingResult:
    """Train in a new directory, which gets the files that Python gave."""
    with Screen(silent=not progress) as screen:  # shown while torch is imported
        from brorl.api.given import moved
        from brorl.api.training_session import TrainingSession

        directory = make_run_directory(config.output_dir, name)
        with directory.locked():  # until it is released, no other process uses or removes the directory
            refuse_used_folder(directory.path)
            try:
                config = moved(config, given, directory.path / given.name)
                return TrainingSession(config, directory, screen, is_new=True).run_to_end()
            except LearnerLostError:  # it can be resumed, even from step 0
                raise
            except UserError:
                if not directory.read_metrics():  # it was empty, and the same command can be repeated
                    rmtree(directory.path, ignore_errors=True)
                raise


def train_command(config_or_path: str = _RECIPE, **overrides: Any) -> TrainingResult:
    """Train as a command.

    Args:
        config_or_path: Built-in recipe or YAML file.
        overrides: Settings.
    """
    return train(config_or_path, **overrides)


def resume_command(run: str | None = None, **overrides: Any) -> TrainingResult:
    """Resume as a command.

    Args:
        run: Run directory (default: the newest unfinished run in runs/).
        overrides: Settings.
    """
    return train(run, resume=True, **overrides)


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
    with Screen(silent=not progress) as screen:
        from brorl.api.training_session import TrainingSession
        from brorl.runs.run_directory import RunDirectory

        directory = RunDirectory(Path(path))
        with directory.locked():
            return TrainingSession(config, directory, screen, is_new=False).run_to_end()
