"""`brorl.train`: a recipe to a run directory, and the run to its end; also the body of `brorl train` and `resume`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Activity, Phase
from brorl.api.runs_folder import make_run_directory, newest_unfinished, refuse_used_folder, remove_unused
from brorl.api.settings import ConfigOrPath, recipe_name, resolve_config
from brorl.config.reading import dump_yaml, flat_settings
from brorl.config.resuming import fixed_settings
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.runs import RUNS

if TYPE_CHECKING:
    from brorl.api.training_result import TrainingResult
    from brorl.console.progress import Progress
    from brorl.console.screen import Screen
    from brorl.runs.checkpoint import TrainerState
    from brorl.runs.run_directory import Record, RunDirectory
    from brorl.training.loop import Ending, TrainingRun
    from brorl.training.stop_request import StopRequest

_RECIPE = "quickstart"
_FEW = 16  # rollouts per prompt that the hint at the end compares with


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
        progress: Print what the command prints; run.log has it in any case.
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
        return _resume(config_or_path, flat_settings(overrides), progress)
    recipe = _RECIPE if config_or_path is None else config_or_path
    config = resolve_config(recipe, overrides)
    with _screen(progress) as screen:  # before torch is imported, which takes seconds
        directory = make_run_directory(config.output_dir, Path(recipe_name(recipe)).stem)
        with directory.locked():  # until it is released, no other process uses or removes the directory
            refuse_used_folder(directory.path)
            try:
                return _run_to_end(config, directory, screen, is_new=True)
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
        from brorl.runs.run_directory import RunDirectory

        directory = RunDirectory(Path(path))
        with directory.locked():
            return _run_to_end(config, directory, screen, is_new=False)


def _screen(progress: bool) -> Screen:
    from brorl.console.screen import Screen

    return Screen(f"brorl {brorl.__version__}", silent=not progress)


def _run_to_end(config: TrainConfig, directory: RunDirectory, screen: Screen, is_new: bool) -> TrainingResult:
    """Train to the end, or to the next interruption.

    Args:
        config: The run's settings.
        directory: The run's files; the caller holds its lock.
        screen: Where the run is shown.
        is_new: Whether the run starts here.
    """
    from brorl.assemble.settings import build_budget
    from brorl.console.progress import Progress
    from brorl.runs.checkpoint import last_checkpoint
    from brorl.trackers import require_package
    from brorl.training.monitor import is_due
    from brorl.training.stop_request import StopRequest

    screen.log_to(directory.path / "run.log")
    screen.under_way.evaluates_after = lambda step: is_due(step, config.evaluation.every) or step == config.steps
    for tracker in config.tracking.to:
        require_package(tracker)
    lines, stop = Progress(config.steps, build_budget(config), screen), StopRequest(screen.answer_stop)
    try:
        run, state = _begin(config, directory, lines, screen, stop)
        ending, message = _train_tracked(config, run, state, lines, screen, stop)
    except KeyboardInterrupt:
        last = last_checkpoint(directory.checkpoints)
        where = f"resume from {last.name}" if last else "there is no checkpoint yet; start again from step 0"
        screen.say(
            f"\nstopped at once; unsaved work is discarded; {where} with: brorl resume {directory.path}",
            is_command=True,
        )
        raise
    return _finish(config, directory, lines, screen, ending, message, is_new)


def _begin(
    config: TrainConfig, directory: RunDirectory, lines: Progress, screen: Screen, stop: StopRequest
) -> tuple[TrainingRun, TrainerState]:
    """Make the parts of the run, write the files that describe it, and announce it."""
    from brorl.api.announcement import announcement, lineage_of
    from brorl.assemble.run import build_run

    def observe(activity: Activity) -> None:
        lines.observe(activity)
        stop.check()

    if not directory.config_file.exists():  # a run that is killed from here on can be resumed
        _write_config(config, directory)
    run, state = build_run(config, directory, lines.show, screen.say, observe)
    _write_config(config, directory)
    if not directory.begun_file.exists():
        directory.write_begun(fixed_settings(config), has_checkpoint=False)
    directory.write_environment(continued_from=lineage_of(config.model))
    directory.write_held_out(run.benchmark.prompts if run.benchmark else [])
    lines.recall(directory.read_metrics())
    screen.under_way.start_from(state.step)
    for line in announcement(config, run, state.step):
        screen.say(line)
    return run, state


def _train_tracked(
    config: TrainConfig, run: TrainingRun, state: TrainerState, lines: Progress, screen: Screen, stop: StopRequest
) -> tuple[Ending, str]:
    """Train, and send every line of the metrics to the screen and the trackers."""
    from brorl.trackers import open_trackers
    from brorl.training.loop import train as train_run

    tracking, directory = config.tracking, run.directory
    name, settings = tracking.run_name or directory.path.name, config.model_dump(mode="json")
    past = directory.read_metrics()
    with closing(
        open_trackers(tracking.to, tracking.project, name, settings, directory.path, screen.say, past)
    ) as trackers:

        def report(record: Record) -> None:
            lines.show(record)
            trackers.log(record)

        return train_run(replace(run, report=report), state, stop)


def _finish(
    config: TrainConfig,
    directory: RunDirectory,
    lines: Progress,
    screen: Screen,
    ending: Ending,
    message: str,
    is_new: bool,
) -> TrainingResult:
    """Write the report, print the tables and the next commands, and return the result."""
    from brorl.api.training_result import read_result
    from brorl.training.loop import Ending

    screen.observe(Phase("writing", "report"))
    hints = _hints(config, directory.path, ending, is_new)
    if config.report and ending is not Ending.INTERRUPTED:
        hints = [_write_report(directory.path), *hints]
    result = read_result(directory, ending, message)
    lines.finish(result.metrics, directory.path, message, hints)
    if ending is Ending.NO_MIXED_GROUPS:
        for line in _examples(config, result):
            screen.say(line, is_command=True)
    return result


def _hints(config: TrainConfig, path: Path, ending: Ending, is_new: bool) -> list[str]:
    """Return the commands that continue the run."""
    from brorl.training.loop import Ending

    resume = f"brorl resume {path}"
    match ending:
        case Ending.INTERRUPTED:
            return [f"continue with: {resume}"]
        case Ending.NO_MIXED_GROUPS:
            return [f"try again, with other draws: {resume}"]
        case Ending.COLLAPSED:
            return [f"continue anyway: {resume}"]
    limit, steps = config.budget.limit, config.steps
    longer = [] if limit is None else [f"--budget.limit {2 * limit:g}"]
    longer += [] if steps is None else [f"--steps {2 * steps}"]
    hints = [f"train longer: {resume} {' '.join(longer)}"]
    if is_new and not config.adaptive.enabled and config.rollouts_per_prompt > _FEW:
        again = f"{path / 'config.yaml'} --output_dir null --rollouts_per_prompt {_FEW}"
        hints.append(f"compare with few rollouts: brorl train {again}")
    return hints


def _write_report(path: Path) -> str:
    from brorl.report.page.file import write_report

    try:
        report = write_report([path])
    except UserError as error:  # the run itself is complete
        return f"no report: {error}"
    return f"charts and rollouts: open {report.path} in a browser"


def _examples(config: TrainConfig, result: TrainingResult) -> list[str]:
    """Return responses of the last step, if none was correct."""
    from brorl.report.unsolved import unsolved_examples

    last = result.metrics[-1]
    if config.store_rollouts_every:
        return unsolved_examples(result.path, last["step"])
    if last["sampling"]["share_correct"]:
        return []
    return ["store_rollouts_every: 1 stores the rollouts, and `brorl samples` shows them"]


def _write_config(config: TrainConfig, directory: RunDirectory) -> None:
    from brorl.storage import replace_file, storage_errors

    with storage_errors(directory.config_file):
        replace_file(directory.config_file, dump_yaml(config).encode())
