"""`brorl train`: a recipe to a run directory, and the run to its end."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Activity, Phase
from brorl.cli.runs_folder import RUNS
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.errors import UserError

if TYPE_CHECKING:
    from brorl.config.settings import TrainConfig
    from brorl.console.screen import Screen
    from brorl.runs.run_directory import RunDirectory
    from brorl.training.loop import TrainingRun


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "train",
        usage="brorl train [RECIPE] [--key value ...]",
        help="train a model from a recipe (default: the built-in `quickstart`)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", nargs="?", default="quickstart", metavar="RECIPE", help="YAML file or built-in recipe"
    )
    parser.set_defaults(execute=lambda parsed: train(parsed.recipe, overrides_of(parsed)))
    if chosen:
        add_settings(parser)


def train(recipe: str, overrides: dict[str, Any]) -> int:
    """Train by a recipe and return the exit code."""
    from brorl.config.reading import make_config, read_recipe
    from brorl.console.screen import Screen

    config = make_config(read_recipe(recipe), overrides, recipe)
    with Screen(f"brorl {brorl.__version__}") as screen:  # from here on there is something to see: torch takes a while
        directory = _run_directory(config, Path(recipe).stem)
        with directory.locked():  # from here on no other process finds the directory empty, or removes it
            refuse_used_folder(directory.path)
            try:
                return run_to_end(config, directory, screen, recipe)
            except UserError:
                if not directory.read_metrics():
                    _remove_unused(directory)
                raise


def run_to_end(config: TrainConfig, directory: RunDirectory, screen: Screen, recipe: str | None = None) -> int:
    """Train to the end, or to the next interruption, and return the exit code.

    Args:
        config: The run's settings.
        directory: The run's files; the caller holds its lock.
        screen: Where the run is shown.
        recipe: What a new run was made from; None for one that is resumed.
    """
    from brorl.assemble.run import build_run
    from brorl.assemble.settings import build_budget
    from brorl.config.resuming import fixed_settings
    from brorl.console.progress import Progress
    from brorl.runs.checkpoint import last_checkpoint
    from brorl.runs.run_directory import Record
    from brorl.trackers import open_trackers, require_package
    from brorl.training.loop import Ending
    from brorl.training.loop import train as train_run
    from brorl.training.monitor import is_due
    from brorl.training.stop_request import StopRequest

    screen.log_to(directory.path / "run.log")
    screen.under_way.evaluates_after = lambda step: is_due(step, config.evaluation.every) or step == config.steps
    progress = Progress(config.steps, build_budget(config), screen)
    stop = StopRequest(screen.answer_stop)

    def observe(activity: Activity) -> None:
        progress.observe(activity)
        stop.check()

    resume = f"brorl resume {directory.path}"
    tracking = config.tracking
    for tracker in tracking.to:
        require_package(tracker)
    try:
        if not directory.config_file.exists():  # from here on a kill leaves a run that can be resumed
            _write_config(config, directory)
        run, state = build_run(config, directory, progress.show, screen.say, observe)
        _write_config(config, directory)
        if not directory.begun_file.exists():
            directory.write_begun(fixed_settings(config), has_checkpoint=False)
        directory.write_environment(continued_from=_lineage(config))
        directory.write_held_out(run.benchmark.prompts if run.benchmark else [])
        progress.recall(directory.read_metrics())
        screen.under_way.start_from(state.step)
        _announce(screen, config, run, state.step)
        with closing(
            open_trackers(
                tracking.to,
                tracking.project,
                tracking.run_name or directory.path.name,
                config.model_dump(mode="json"),
                directory.path,
                screen.say,
                directory.read_metrics(),
            )
        ) as trackers:

            def report(record: Record) -> None:
                progress.show(record)
                trackers.log(record)

            ending, message = train_run(replace(run, report=report), state, stop)
    except KeyboardInterrupt:
        last = last_checkpoint(directory.checkpoints)
        where = f"resume from {last.name}" if last else "there is no checkpoint yet; start again from step 0"
        screen.say(f"\nstopped at once; what was not saved is discarded; {where} with: {resume}", True)
        return 130
    screen.observe(Phase("writing", "report"))
    again = f"{directory.config_file} --output_dir null"
    few_differ = recipe and isinstance(config.rollouts_per_prompt, int) and config.rollouts_per_prompt > 16
    hints = {
        Ending.FINISHED: [
            f"train longer: brorl resume {directory.path} {_twice_as_long(config)}",
            *([f"see what few rollouts give: brorl train {again} --rollouts_per_prompt 16"] if few_differ else []),
        ],
        Ending.INTERRUPTED: [f"go on with: {resume}"],
        Ending.NO_MIXED_GROUPS: [f"try again, with other draws: {resume}"],
        Ending.COLLAPSED: [f"go on all the same: {resume}"],
    }[ending]
    if config.report and ending is not Ending.INTERRUPTED:
        hints = [*_report(directory), *hints]
    progress.finish(directory.read_metrics(), directory.path, message, hints)
    if ending is Ending.NO_MIXED_GROUPS:
        for line in _examples(config, directory):
            screen.say(line, is_command=True)
    if ending is Ending.NO_MIXED_GROUPS and not any("update" in record for record in directory.read_metrics()):
        return 1  # not one step was made: most likely something is wrong
    return 130 if ending is Ending.INTERRUPTED else 0


def _examples(config: TrainConfig, directory: RunDirectory) -> list[str]:
    """Return what the model answered in the last step, if nothing of it was correct."""
    from brorl.report.samples import unsolved_examples

    last = directory.read_metrics()[-1]
    if config.store_rollouts_every:
        return unsolved_examples(directory.path, last["step"])
    if last["sampling"]["share_correct"]:
        return []
    return ["store_rollouts_every: 1 stores the rollouts, and `brorl samples` shows them"]


def _report(directory: RunDirectory) -> list[str]:
    """Write the run's report, and say where it is."""
    from brorl.report.page.file import write_report

    try:
        report = write_report([directory.path])
    except UserError as error:  # the run itself is complete
        return [f"no report: {error}"]
    return [f"charts and rollouts: open {report.path} in a browser"]


def _twice_as_long(config: TrainConfig) -> str:
    """Return the options of `brorl resume` that go on for as long again."""
    limit, steps = config.budget.limit, config.steps
    options = [] if limit is None else [f"--budget.limit {2 * limit:g}"]
    return " ".join([*options, *([] if steps is None else [f"--steps {2 * steps}"])])


def _write_config(config: TrainConfig, directory: RunDirectory) -> None:
    from brorl.config.reading import dump_yaml
    from brorl.storage import replace_file, storage_errors

    with storage_errors(directory.config_file):
        replace_file(directory.config_file, dump_yaml(config).encode())


def _announce(screen: Screen, config: TrainConfig, run: TrainingRun, step: int) -> None:
    """Say what is about to happen."""
    from brorl.assemble.settings import build_policy_loss

    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in run.model.parameters())
    of_all = "" if trained == parameters else f", {trained:,} of them trained"
    screen.say(
        f"brorl {brorl.__version__}: {config.model} ({parameters:,} parameters{of_all}) on {run.model.device}, "
        f"N = {_rollouts_per_prompt(config)} rollouts x {config.prompts_per_step} prompts a step, "
        f"{run.collector.stream.num_prompts:,} training prompts"
    )
    loss = build_policy_loss(config)
    screen.say(
        f"learning rate {_learning_rate(config)}, {config.optimizer.mini_batches} updates a step, "
        f"{loss.kind} clip {loss.clip_low:g}/{loss.clip_high:g}; run directory {run.directory.path}"
    )
    lineage = _lineage(config)
    if lineage:
        screen.say(_stage(lineage, config))
    if step:
        screen.say(f"resuming after step {step}")


def _learning_rate(config: TrainConfig) -> str:
    """Return the learning rate, and how it follows from the rule."""
    from brorl.assemble.settings import build_learning_rate

    optimizer, rate = config.optimizer, build_learning_rate(config)
    if not optimizer.reference_batch:
        return f"{rate:.2e}"
    return (
        f"{rate:.2e} = {optimizer.learning_rate:.2e} x sqrt({config.samples_per_step:,} / "
        f"{optimizer.reference_batch:,} samples a step)"
    )


def _lineage(config: TrainConfig) -> dict[str, Any] | None:
    """Return which run and step the model is a checkpoint of; None if it is none."""
    from brorl.config.reading import parse_yaml
    from brorl.runs.checkpoint import is_checkpoint, read_step

    checkpoint = Path(config.model)
    if not is_checkpoint(checkpoint):
        return None
    checkpoint = checkpoint.resolve()
    lineage: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_step(checkpoint)}
    parent = checkpoint.parent.parent / "config.yaml"
    settings = parse_yaml(parent.read_text("utf-8"), str(parent)) if parent.is_file() else {}
    known = ("rollouts_per_prompt", "prompts_per_step", "model")
    return lineage | {name: settings[name] for name in known if name in settings}


def _stage(lineage: dict[str, Any], config: TrainConfig) -> str:
    """Say what the run continues from."""
    before = ""
    if "rollouts_per_prompt" in lineage:
        before = f" of a run with N = {lineage['rollouts_per_prompt']} x {lineage['prompts_per_step']} prompts"
    optimizer = "with its optimizer's state" if config.optimizer.from_checkpoint else "with a new optimizer"
    return f"continuing from step {lineage['step']}{before}, {optimizer}"


def _rollouts_per_prompt(config: TrainConfig) -> str:
    adaptive = config.adaptive
    if config.rollouts_per_prompt != "adaptive":
        return str(config.rollouts_per_prompt)
    return (
        f"adaptive {adaptive.pilot_rollouts}..{adaptive.max_rollouts} "
        f"(on average at most {adaptive.samples_per_prompt})"
    )


def _run_directory(config: TrainConfig, recipe: str) -> RunDirectory:
    """Make the run's directory; without `output_dir` a new one under `runs`."""
    from brorl.runs.run_directory import RunDirectory

    try:
        if config.output_dir is None:
            return RunDirectory(_new_directory(RUNS / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"))
        path = Path(config.output_dir).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return RunDirectory(path)
    except FileExistsError as error:
        raise _used(path) from error
    except OSError as error:
        raise UserError(
            f"could not make output_dir {error.filename}: {error.strerror}; set output_dir to a writable folder"
        ) from error


def _new_directory(base: Path) -> Path:
    """Make a directory that no other process has, not even one that makes its own at this moment."""
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("numbers do not end")


def refuse_used_folder(path: Path) -> None:
    """Refuse an output_dir that is a file, or holds something."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _used(path)


def _used(path: Path) -> UserError:
    return UserError(
        f"output_dir {path} exists and is not empty; choose another, or resume the run in it: brorl resume {path}"
    )


def _remove_unused(directory: RunDirectory) -> None:
    """Remove the directory of a run that never began, so that the same command can be given again."""
    for name in ("config.yaml", "begun.json", "env.json", "held_out.json", "run.log", "metrics.jsonl", "trackers.json"):
        (directory.path / name).unlink(missing_ok=True)
    for tracker in ("tensorboard", "wandb", "trackio"):
        rmtree(directory.path / tracker, ignore_errors=True)
    if not any(directory.path.iterdir()):
        directory.path.rmdir()
