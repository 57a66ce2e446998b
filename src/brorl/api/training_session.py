"""Train a run in this process, given its settings and directory, and return its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import brorl
from brorl.activity import Activity, Stage
from brorl.assemble import build_run
from brorl.config.reading import dump_yaml, fixed_settings, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.console.progress import TrainingProgress
from brorl.console.screen import Screen, in_notebook
from brorl.console.tables import held_out_check_lines, result_tables
from brorl.cost import Cost
from brorl.distributed.settings import ClusterSettings
from brorl.errors import STOPPED, EngineLostError, LearnerLostError, UserError
from brorl.evaluation.evaluator import coverage_note
from brorl.format import Estimate, counted, shell_command
from brorl.model.settings import shipped_folder
from brorl.model.source import commit_of, find_model
from brorl.runs.checkpoint import (
    TrainerState,
    best_checkpoint,
    complete_checkpoints,
    is_checkpoint,
    last_checkpoint,
    read_step,
)
from brorl.runs.model_card import upload_command
from brorl.runs.run_directory import REPORT_FILE, RunDirectory
from brorl.runs.step_record import StepRecord, total_cost
from brorl.storage import replace_file, storage_errors
from brorl.table import Result, Table
from brorl.trackers import open_trackers, require_package
from brorl.training.inputs import learner_device
from brorl.training.loop import Ending, train_run
from brorl.training.run import TrainingRun
from brorl.training.source_files import fingerprints
from brorl.training.stop_request import StopRequest

if TYPE_CHECKING:
    from brorl.distributed.cluster import RayCluster
    from brorl.reporting.figure import ResultFigure

_FEW = 16  # rollouts per prompt suggested by the hint at the end


@dataclass(frozen=True, eq=False, repr=False)
class TrainingResult(Result):
    """A run that ended, or one that was interrupted and can be resumed."""

    path: Path  # the run directory
    ending: Ending  # why the run ended
    message: str  # one sentence: why the run ended, and after how many steps
    metrics: tuple[StepRecord, ...]  # the lines of metrics.jsonl; step 0 is the evaluation before training
    checkpoints: tuple[Path, ...]  # complete checkpoints, oldest first; each loads with transformers
    best_checkpoint: Path | None  # best held-out pass@k; None if no checkpoint was kept
    report: Path | None  # HTML file; None if the run has no report
    hints: tuple[str, ...] = ()  # the location of the charts, and commands for resuming or extending the run

    @property
    def cost(self) -> Cost:
        """Cost of all steps, in every unit."""
        return total_cost(self.metrics)

    @property
    def first_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k at the first evaluation, k -> value with a 95% interval; empty without an evaluation."""
        return next(iter(self._pass_at()), {})

    @property
    def last_evaluation(self) -> dict[int, Estimate]:
        """Held-out pass@k at the last evaluation, k -> value with a 95% interval; empty without an evaluation."""
        return next(reversed(self._pass_at()), {})

    def _pass_at(self) -> list[dict[int, Estimate]]:
        return [dict(record.evaluation.pass_at) for record in self.metrics if record.evaluation]

    def figure(self) -> ResultFigure:
        """Return a matplotlib figure: the mean reward, held-out pass@k, and the fraction of mixed groups, by step."""
        from brorl.reporting.figure import run_figure  # imports matplotlib

        return run_figure(self.metrics)

    def __repr__(self) -> str:
        return f"TrainingResult({self.message}; run directory: {self.path})"

    def parts(self) -> Iterator[Any]:
        """Yield the run's tables, why it ended, and what to do next, with commands to copy."""
        yield from result_tables(self.metrics)
        yield f"\n{self.message}; run directory: {self.path}"
        evaluations = [record.evaluation for record in self.metrics if record.evaluation]
        yield from (*held_out_check_lines(self.metrics), *coverage_note(evaluations), *self.hints)

    def show_on(self, screen: Screen) -> None:
        """Print the parts without wrapping commands; in a notebook, which displays the result itself, only log them."""
        screen.ending = f"{self.message}; run directory: {self.path}"
        for part in self.parts():
            if in_notebook():
                screen.log(*([""] if isinstance(part, Table) else []), part)
            elif isinstance(part, Table):
                screen.show(part)
            else:
                screen.echo(part, is_command=part in self.hints)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, 130 if the run was stopped, 1 if it ended because no group was mixed."""
        return {"NO_MIXED_GROUPS": 1, "UNVERIFIED": 1, "INTERRUPTED": STOPPED}.get(self.ending.name, 0)


@dataclass(frozen=True)
class TrainingSession:
    """Trains a run in this process; the caller holds the lock on its directory."""

    config: TrainConfig
    directory: RunDirectory
    screen: Screen
    is_new: bool

    def run_to_end(self) -> TrainingResult:
        """Train to the end or to the next interruption. A second Ctrl-C raises KeyboardInterrupt."""
        config = self.config
        screen = self.screen
        screen.log_to(self.directory.path / "run.log")
        for tracker in config.tracking.to:
            require_package(tracker)
        progress = TrainingProgress(config.steps, config.total_budget, screen)
        stop = StopRequest(screen.answer_stop)
        try:
            ending, message = self._run(progress, stop)
        except KeyboardInterrupt:
            last = last_checkpoint(self.directory.checkpoints)
            where = f"resume from {last.name}" if last else "there is no checkpoint yet; start again from step 0"
            screen.echo(f"\nstopped immediately; unsaved work is lost; {where} with: {self._resume}", is_command=True)
            raise KeyboardInterrupt("stopped immediately") from None
        return self._finish(ending, message)

    @property
    def _resume(self) -> str:
        return shell_command("resume", self.directory.path)

    @property
    def _last(self) -> str:
        last = last_checkpoint(self.directory.checkpoints)
        return f"from {last.name}" if last else "from the start"

    def _run(self, progress: TrainingProgress, stop: StopRequest) -> tuple[Ending, str]:
        """Train. If a remote learner is lost, resume from the last checkpoint with new processes."""
        limit = self.config.cluster.max_restarts
        advice = f"Continue from the last checkpoint with: {self._resume}"
        cluster = None
        if self.config.cluster.enabled:
            from brorl.distributed.remote_parts import build_cluster

            cluster = build_cluster(self.config, self.screen.echo, note=self.screen.log, advice=advice)
        with ExitStack() as parts:
            if cluster is not None:
                parts.enter_context(closing(cluster))
            for restarts in count(1):
                try:
                    run, state = self._begin(progress, stop, cluster, parts)
                    return self._train(run, state, progress, stop)
                except EngineLostError as error:
                    raise EngineLostError(f"{error}. Continue {self._last} with: {self._resume}") from error
                except LearnerLostError as error:
                    if cluster is None or restarts > limit:
                        raise LearnerLostError(
                            f"{error}; cluster.max_restarts = {limit} allows no more restarts; fix the cause, then: "
                            f"{self._resume}"
                        ) from error
                    self.screen.echo(f"{error}; continuing {self._last} (restart {restarts} of at most {limit})")
                    cluster.release()
        raise AssertionError("the loop returns or raises")

    def _begin(
        self, progress: TrainingProgress, stop: StopRequest, cluster: RayCluster | None, parts: ExitStack
    ) -> tuple[TrainingRun, TrainerState]:
        """Build the parts of the run, write the files that describe it, and announce it."""
        config = self.config
        directory = self.directory

        def observe(activity: Activity) -> None:
            progress.observe(activity)
            stop.check()

        if not directory.config_file.exists():  # from here on, a killed run can be resumed
            self._write_config()
        run, state = build_run(config, directory, progress.show, self.screen.echo, observe, cluster, parts.callback)
        self._write_config(torch.get_num_threads())
        if last_checkpoint(directory.checkpoints) is None:
            directory.write_begun(fixed_settings(config), False, fingerprints(config, config.model))
        arithmetic_line = directory.arithmetic_line(config.device)
        commit = None if state.step else commit_of(find_model(config.model))  # a resumed run's model folder may be gone
        directory.write_environment(config.device, _lineage(config.model), commit)
        directory.write_held_out(run.held_out.prompts if run.held_out else [])
        progress.recall(directory.read_metrics())
        self.screen.status.start_training(state.step)
        places = [_placement_line(config.cluster, cluster.num_machines)] if cluster else []
        for line in [*_announcement(config, run, state.step), *places, *([arithmetic_line] if arithmetic_line else [])]:
            self.screen.echo(line)
        return run, state

    def _write_config(self, threads: int | None = None) -> None:
        """Write the settings; `threads` is added once chosen, because it affects rounding in sums."""
        config = self.config
        if threads is not None and not config.cluster.enabled:
            config = config.model_copy(update={"engine": config.engine.model_copy(update={"threads": threads})})
        with storage_errors(self.directory.config_file):
            replace_file(self.directory.config_file, dump_yaml(config).encode())

    def _train(
        self, run: TrainingRun, state: TrainerState, progress: TrainingProgress, stop: StopRequest
    ) -> tuple[Ending, str]:
        """Train, and send every metrics record to the screen and the trackers."""
        tracking = self.config.tracking
        path = self.directory.path
        name = tracking.run_name or path.name
        settings = self.config.model_dump(mode="json")
        past = self.directory.read_metrics()
        with closing(
            open_trackers(tracking.to, tracking.project, name, settings, path, self.screen.echo, past)
        ) as trackers:

            def report(record: StepRecord) -> None:
                progress.show(record)
                trackers.log(record)

            return train_run(replace(run, report=report), state, stop)

    def _finish(self, ending: Ending, message: str) -> TrainingResult:
        """Write the report, print the tables and the next commands, and return the result."""
        self.screen.observe(Stage("writing", "report"))
        hints = self._hints(ending)
        if self.config.report and ending not in (Ending.INTERRUPTED, Ending.PAUSED):
            hints = [self._write_report(), *hints]
        directory = self.directory
        report = self.directory.path / REPORT_FILE
        result = TrainingResult(
            path=directory.path,
            ending=ending,
            message=message,
            metrics=tuple(directory.read_metrics()),
            checkpoints=tuple(complete_checkpoints(directory.checkpoints)),
            best_checkpoint=best_checkpoint(directory.checkpoints),
            report=report if report.is_file() else None,
            hints=tuple(hints),
        )
        result.show_on(self.screen)
        if ending is Ending.NO_MIXED_GROUPS:
            for line in self._examples(result.metrics[-1]):
                self.screen.echo(line, is_command=True)
        return result

    def _hints(self, ending: Ending) -> list[str]:
        """Suggest what to do next, as commands."""
        advice = {
            Ending.INTERRUPTED: "continue with", Ending.PAUSED: "continue with", Ending.COLLAPSED: "continue anyway",
            Ending.STALLED: "continue anyway", Ending.NO_MIXED_GROUPS: "try again with new samples",
            Ending.UNVERIFIED: "continue when the machine works again",
        }  # fmt: skip
        if ending in advice:
            return [f"{advice[ending]}: {self._resume}"]
        limit = self.config.budget.limit
        steps = self.config.steps
        longer = [] if limit is None else [f"--budget.limit {2 * limit:g}"]
        longer += [] if steps is None else [f"--steps {2 * steps}"]
        hints = [f"train longer: {self._resume} {' '.join(longer)}"]
        for_many = any(a.estimator == "pass_at_k" and a.k >= _FEW for a in self.config.advantages)
        if self.is_new and self.config.rollouts_per_prompt > _FEW and not for_many:
            options = ("--output_dir", "null", "--rollouts_per_prompt", _FEW)
            hints.append(f"compare with few rollouts: {shell_command('train', self.directory.config_file, *options)}")
        folder = self.directory.checkpoints
        best = best_checkpoint(folder)
        checkpoint = folder / "best" if best and (folder / "best").is_dir() else best or last_checkpoint(folder)
        if checkpoint is not None and not shipped_folder(self.config.model):
            hints.append(f"upload with its model card: {upload_command(checkpoint)}")
        return hints

    def _write_report(self) -> str:
        from brorl.reporting.page import write_report  # only for a run with a report

        try:
            report = write_report([self.directory.path])
        except UserError as error:  # the run itself is complete
            return f"no report: {error}"
        return f"charts and rollouts: open {report.path} in a browser"

    def _examples(self, last: StepRecord) -> list[str]:
        """Return example responses from the last step if none of its responses was correct."""
        if self.config.store_rollouts_every:
            from brorl.reporting.samples import unsolved_examples  # only for a run without a correct response

            return unsolved_examples(self.directory.path, last.step)
        if last.sampling and last.sampling.accuracy:
            return []
        return ["store_rollouts_every: 1 stores the rollouts, and `brorl samples` shows them"]


def _announcement(config: TrainConfig, run: TrainingRun, step: int) -> list[str]:
    """Return the lines before the first step: model, batch, learning rate, and the step of a resumed run."""
    optimizer = config.optimizer
    clip = config.loss.clip
    parameters = run.learner.num_parameters()
    trained = run.learner.num_parameters(only_trainable=True)
    trained_note = "" if trained == parameters else f", {trained:,} of them trained"
    lineage = _lineage(config.model)
    rate = f"{config.scaled_learning_rate:.2e}"
    if batch := optimizer.reference_batch:
        rate += f" = {optimizer.learning_rate:.2e} x sqrt({config.samples_per_step:,} / {batch:,} samples a step)"
    if optimizer.schedule != "constant":
        rate += f", {optimizer.schedule} to {optimizer.decay(1.0) * config.scaled_learning_rate:.2e}"
    lines = [
        f"brorl {brorl.__version__}: {config.model} ({parameters:,} parameters{trained_note}) "
        f"on {learner_device(config)}, N = {config.rollouts_per_prompt} rollouts x {config.prompts_per_step} prompts "
        "a step, "
        f"{run.collector.stream.num_prompts:,} training prompts",
        f"learning rate {rate}, {optimizer.mini_batches} updates a step, "
        f"{config.loss.kind} clip {clip.low:g}/{clip.high:g}; run directory {run.directory.path}",
    ]
    if lineage:
        before = " of a run with N = {rollouts_per_prompt} x {prompts_per_step} prompts"
        before = before.format(**lineage) if "rollouts_per_prompt" in lineage else ""
        state = "with its optimizer state" if optimizer.from_checkpoint else "with a new optimizer"
        lines.append(f"continuing from step {lineage['step']}{before}, {state}")
    return [*lines, f"resuming after step {step}"] if step else lines


def _placement_line(settings: ClusterSettings, num_machines: int) -> str:
    """Return a line about the run's processes on its cluster."""
    threads = counted(settings.cpus_per_worker, "CPU thread")
    processes = []
    for num_processes, kind, gpus in (
        (settings.rollout_workers, "rollout worker", settings.gpus_per_rollout_worker),
        (settings.learner_ranks, "learner rank", settings.gpus_per_learner_rank),
        (settings.verifier_workers, "verifier worker", 0),
    ):
        cards = f", {counted(gpus, 'GPU')}" if gpus else ""
        processes += [f"{counted(num_processes, kind)} ({threads}{cards} each)"] if num_processes else []
    shared = "; rollout workers and learner ranks share GPUs" if settings.placement == "colocated" else ""
    return f"cluster of {counted(num_machines, 'machine')}: {', '.join(processes)}{shared}"


def _lineage(model: str) -> dict[str, Any] | None:
    """Return the run and the step that saved a model; None if the model is not a checkpoint."""
    checkpoint = Path(model)
    if not is_checkpoint(checkpoint):
        return None
    checkpoint = checkpoint.resolve()
    lineage: dict[str, Any] = {"checkpoint": str(checkpoint), "step": read_step(checkpoint)}
    parent = checkpoint.parent.parent / "config.yaml"
    settings = parse_yaml(parent.read_text("utf-8"), str(parent)) if parent.is_file() else {}
    known = ("rollouts_per_prompt", "prompts_per_step", "model")
    return lineage | {name: settings[name] for name in known if name in settings}
