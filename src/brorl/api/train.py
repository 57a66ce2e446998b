"""`brorl.train`, `brorl train` and `brorl resume`: start a run from a recipe or resume one, and return the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from brorl.api.arguments import (
    check_cheaply,
    make_run_directory,
    recipe_name,
    refuse_in_worker,
    refuse_used_folder,
    resolve_config,
)
from brorl.api.in_memory import FOLDER, Rewards, moved, resolve_in_memory
from brorl.config.reading import ConfigOrPath
from brorl.config.settings import TrainConfig
from brorl.console.screen import Screen
from brorl.errors import EngineLostError, LearnerLostError, UserError
from brorl.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from brorl.api.training_session import TrainingResult


_RECIPE = "quickstart"


def train(
    recipe: ConfigOrPath | None = None,
    *,
    reward: Rewards | None = None,
    resume: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> TrainingResult:
    """Train a model and return the result; the files are in the run directory.

    On Ctrl-C, a notebook interrupt or SIGTERM, the run saves a checkpoint and returns. A second one discards the step
    in progress and raises KeyboardInterrupt. Signals work only in the main thread.

    Examples:
        >>> run = brorl.train("quickstart", steps=30, evaluation={"every": 5}, output_dir="runs/first")
        >>> run = brorl.train("runs/first", resume=True, steps=60)
        >>> run = brorl.train(data=rows, reward=lambda response, reference: reference in response)

    Args:
        recipe: A built-in recipe, a YAML file, nested settings, or a config (default: `quickstart`, or for rows
            the recipe that `brorl init` writes). With `resume`, a run directory.
        reward: A function that verifies the responses of all domains: `verify(response, reference)`, or with TRL's
            signature `reward(completions, **columns) -> list[float]`. Give several terms as a mapping, `{"right":
            right, "brief": (brief, 0.2)}`: the first decides what is correct, and the weighted sum is the reward.
            Worker processes import a function's file; lambdas, closures and functions of a notebook or script are
            pickled into the run directory.
        resume: Continue a run from its last checkpoint. Settings such as `steps` can change
            (`brorl.config.reading.CHANGEABLE_ON_RESUME`).
        progress: Print the output of the command, which run.log always contains.
        overrides: Settings that replace those of the recipe, nested or by dotted name, such as `output_dir` (default: a
            new directory in `runs/`). `data` may also be rows: a `datasets.Dataset`, a list of dicts, a data frame or a
            table. Their columns are guessed as by `brorl init`, and they are stored in the run directory. `tools` may
            also be a list of functions with types and a docstring, which responses can call.

    Returns:
        The result, displayed as tables in terminals and notebooks.

    Raises:
        UserError: If a setting, the data, the model or the machine's memory does not fit. No files are left behind.
    """
    refuse_in_worker()
    if resume:
        if not isinstance(recipe, str | Path):
            raise UserError("resume=True needs a run directory as the first argument")
        if reward is not None:
            raise UserError("a resumed run keeps its reward; omit reward, or start a new run with it")
        if isinstance(overrides.get("tools"), list | tuple):
            raise UserError("a resumed run keeps its tools; omit tools, or start a new run with them")
        return _resume(recipe, overrides, progress)
    with TemporaryDirectory(prefix="brorl-given-") as scratch:
        folder = Path(scratch) / FOLDER
        recipe, config, lines = resolve_in_memory(recipe, overrides, reward, folder)
        check_cheaply(config)
        if progress and lines:
            print("\n".join(lines))  # noqa: T201
        return _train_new(config, Path(recipe_name(recipe)).stem, folder, progress)


def _train_new(config: TrainConfig, name: str, made_files: Path, progress: bool) -> TrainingResult:
    """Train in a new directory, where the files of in-memory rows and functions in `made_files` are copied."""
    with Screen(silent=not progress) as screen:  # shown while torch is imported
        from brorl.api.training_session import TrainingSession

        directory = make_run_directory(config.output_dir, name)
        with directory.locked():  # no other process uses or removes the directory meanwhile
            refuse_used_folder(directory.path)
            try:
                config = moved(config, made_files, directory.path / made_files.name)
                return TrainingSession(config, directory, screen, is_new=True).run_to_end()
            except (EngineLostError, LearnerLostError):  # it can be resumed, even from step 0
                raise
            except UserError:
                if not directory.read_metrics():  # no step was completed: clean up so the command can be repeated
                    rmtree(directory.path, ignore_errors=True)
                raise


def train_command(recipe: str = _RECIPE, **overrides: Any) -> TrainingResult:
    """Train from the command line.

    Args:
        recipe: Built-in recipe or YAML file.
        overrides: Settings.
    """
    return train(recipe, **overrides)


def resume_command(run: str, **overrides: Any) -> TrainingResult:
    """Resume from the command line.

    Args:
        run: Run directory.
        overrides: Settings.
    """
    return train(run, resume=True, **overrides)


def _resume(path: str | Path, overrides: Mapping[str, Any], progress: bool) -> TrainingResult:
    """Resume the run in a directory."""
    config_file = Path(path) / "config.yaml"
    if not config_file.is_file():
        raise UserError(
            f"{path} is not a run directory (it has no config.yaml); use the directory that `brorl train` printed"
        )
    config = resolve_config(config_file, overrides)
    with Screen(silent=not progress) as screen:
        from brorl.api.training_session import TrainingSession

        directory = RunDirectory(Path(path))
        with directory.locked():
            return TrainingSession(config, directory, screen, is_new=False).run_to_end()
