"""Run a comparison in parallel child processes and print their progress.

Each run has a slot with its own cores or GPU. Unfinished runs are resumed; complete runs are left alone.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import ModuleType

import torch

from brorl.comparison.arm_recipes import ArmRecipe, run_config
from brorl.comparison.scores import PlannedRun, RunProgress, progress_of
from brorl.comparison.spec import TRIAL, ComparisonRequest, ComparisonSpec, arm_folders, fit_budget
from brorl.config.reading import dump_yaml, with_settings
from brorl.console.screen import Screen
from brorl.cost import Budget
from brorl.errors import UserError, option
from brorl.format import counted, duration, shell_command
from brorl.model.load import choose_device
from brorl.runs.checkpoint import last_checkpoint
from brorl.runs.run_directory import RunDirectory, processor_name
from brorl.storage import output_folder, replace_file, storage_errors
from brorl.training.stop_request import on_stop, stop_signals


class ComparisonView:
    """Prints a line for each run that ends; the screen's status line shows the runs in progress."""

    def __init__(self, screen: Screen, runs: Sequence[PlannedRun]) -> None:
        self._screen, self._runs = screen, runs
        self.complete = frozenset(run for run in runs if progress_of(run).ended)  # before this call
        self._num_ended = 0  # runs that this call has completed
        self._in_progress: Sequence[RunProgress] = ()
        self._started = perf_counter()
        screen.describe = self.line

    def print_complete(self) -> None:
        """Print the number of runs that are already complete."""
        self._screen.echo(f"{len(self.complete)} of {len(self._runs)} runs are already complete")

    def runs_progressed(self, running: Sequence[RunProgress]) -> None:
        """Update the runs in progress."""
        self._in_progress = running

    def line(self, width: int | None = None) -> str:
        """Return the status line: how far each run in progress is, and the time left."""
        fractions = [f"{p.run.arm} seed {p.run.seed} {p.fraction:.0%}" for p in self._in_progress]
        left = self._time_left(sum(progress.fraction for progress in self._in_progress))
        now = ", ".join(fractions) or ("writing the answer" if self._num_ended else "starting")
        return f"{now}{left and f'; about {left}'}"[:width]

    def run_ended(self, progress: RunProgress) -> None:
        """Print the line for a run that has ended."""
        self._num_ended += 1
        ks = dict.fromkeys((min(progress.score), max(progress.score))) if progress.score else {}
        scores = "  ".join(f"pass@{k} {progress.first[k]:.3f} -> {progress.score[k]:.3f}" for k in ks)
        in_progress = sum(other.fraction for other in self._in_progress if not other.ended)
        spent = f"{counted(progress.spent.steps, 'step')}, {progress.spent.seconds:,.0f} s"
        run = f"{progress.run.arm:<{max(len(run.arm) for run in self._runs)}}  seed {progress.run.seed}"
        position = f"{len(self.complete) + self._num_ended:>4}/{len(self._runs)}"
        self._screen.echo(f"{position}  {run}  {scores}  {spent}  {self._time_left(in_progress)}".rstrip())

    def stopping(self, num_runs: int) -> None:
        """Announce that runs are stopping."""
        what = "1 run finishes its step and saves" if num_runs == 1 else f"{num_runs} runs finish their steps and save"
        self._screen.echo(f"\nstopping: {what}; Ctrl-C again discards the steps in progress")

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """If the block is interrupted, print what is complete or saved, and the command to resume with."""
        try:
            yield
        except KeyboardInterrupt:
            left = [run for run in self._runs if not progress_of(run).ended]
            saved = sum(last_checkpoint(RunDirectory(run.directory).checkpoints) is not None for run in left)
            more = f", {saved} more up to {'its' if saved == 1 else 'their'} last checkpoint" if saved else ""
            complete = f"{len(self._runs) - len(left)} of {len(self._runs)} runs are complete"
            self._screen.echo(f"\nstopped: {complete}{more}; continue with: {command}", is_command=True)
            raise KeyboardInterrupt("stopped") from None

    def _time_left(self, in_progress: float) -> str:
        """Estimate the time left from this call's ended runs and those in progress; empty without an estimate."""
        done = self._num_ended + in_progress
        total = len(self._runs) - len(self.complete)
        if not 0.02 < done < total:
            return ""
        return f"{duration((perf_counter() - self._started) * (total - done) / done)} left"


@dataclass(frozen=True)
class Slot:
    """The part of the machine that one run may use."""

    cores: frozenset[int] = frozenset()  # empty: all
    device: str | None = None  # the only accelerator that the run may use; None: all


def slots_for(jobs: int | None, arms: Sequence[ArmRecipe]) -> list[Slot]:
    """Return one slot for each run that can be in progress at the same time; raise a UserError if no run can start."""
    if current_process().daemon:
        raise UserError(
            "each run is a process, which a daemonic multiprocessing process cannot start; start the process that "
            "compares or tunes with daemon=False"
        )
    if jobs is not None and jobs < 1:
        raise UserError(f"{option('jobs')}: expected at least 1, got {jobs}")
    device = arms[0].config.device
    if _num_machines(arms):
        _reject_more(jobs, 1, "the arms train on a cluster, and each run needs the whole cluster")
        return cpu_slots(1, 0) if choose_device(device).type == "cpu" else [Slot()]
    if choose_device(device).type == "cpu":
        return cpu_slots(jobs, max(arm.config.engine.threads for arm in arms))
    if ":" not in device:
        return gpu_slots(jobs)
    _reject_more(jobs, 1, f"device = {device} is one GPU, and runs cannot share one")
    return [Slot()]


def _reject_more(jobs: int | None, most: int, why: str) -> None:
    if jobs is not None and jobs > most:
        raise UserError(f"{option('jobs', jobs)}: {why}; use {option('jobs', most)}")


def _num_machines(arms: Sequence[ArmRecipe]) -> int:
    """Return the number of machines in the largest cluster that any arm uses; 0 if none uses a cluster."""
    return max(arm.config.cluster.nodes for arm in arms)


def machine_of(slots: Sequence[Slot], arms: Sequence[ArmRecipe]) -> str:
    """Return the description of the processor or accelerator and of the slots that `compare.json` stores."""
    if not slots[0].cores and torch.cuda.is_available():
        place, name = "a GPU of its own", torch.cuda.get_device_name()
    else:
        place, name = f"{counted(len(slots[0].cores) or 1, 'core')} of its own", processor_name()
    if machines := _num_machines(arms):
        place = f"a cluster of {counted(machines, 'machine')}"
    seconds = ", in CPU seconds" if arms[0].config.engine.clock == "cpu" else ""
    return f"{name}, {counted(len(slots), 'run')} at a time, each on {place}{seconds}"


def gpu_slots(num: int | None) -> list[Slot]:
    """Return one slot per GPU visible to this process, at most `num`."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = visible or [str(i) for i in range(torch.cuda.device_count())]
    _reject_more(num, len(devices), f"this process may use {counted(len(devices), 'GPU')}, and runs cannot share one")
    return [Slot(device=device) for device in devices[:num]]


def cpu_slots(num: int | None, threads: int) -> list[Slot]:
    """Divide this process's cores among `num` runs (None: as many as fit with `threads` cores each; 0 means all)."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    num = num or max(1, len(cores) // (threads or len(cores)))
    _reject_more(num, len(cores), f"this process may use {counted(len(cores), 'core')}, and runs cannot share one")
    share = len(cores) // num
    if num > 1 and threads > share:
        raise UserError(
            f"{option('jobs', num)}: each run would get {share} of {len(cores)} cores, and engine.threads = {threads}; "
            f"use {option('jobs', max(len(cores) // threads, 1))}, or {option('engine.threads', share)}"
        )
    return [Slot(frozenset(cores[i * share : (i + 1) * share])) for i in range(num)]


_POLL_S = 0.5
_DISCARDED_BY, _KILLED_BY = 2, 3  # the second signal discards the steps in progress, the third kills the runs
_STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PRELOADED = [  # by the process that forks all runs, so they start quickly
    "brorl.api.training_session", "brorl.console.progress", "brorl.trackers", "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip


def run_comparison(
    folder: Path,
    spec: ComparisonSpec,
    slots: Sequence[Slot],
    screen: Screen,
    again: str | None = None,
    deadline: float | None = None,
) -> bool:
    """Call `finish_runs` for the runs of a spec with its folder locked; `again` is the command to resume with."""
    view = ComparisonView(screen, spec.runs_in(folder))
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder).locked():
        spec.write(folder)
        for line in spec.announcement(folder):
            screen.echo(line)
        if view.complete:
            view.print_complete()
        with view.running(again or shell_command("compare", folder)):
            left = [run for run in spec.runs_in(folder) if run not in view.complete]
            return finish_runs(left, slots, view, deadline)


def finish_runs(
    runs: Sequence[PlannedRun], slots: Sequence[Slot], view: ComparisonView, deadline: float | None = None
) -> bool:
    """Train all runs, one per slot at a time, and return whether all are complete.

    At the deadline, a `time.perf_counter` time, the runs are stopped and steps in progress are discarded.

    Raises:
        UserError: If a run failed. The others stop after the current step, and all of them can be resumed.
        KeyboardInterrupt: On Ctrl-C, SIGTERM or SIGHUP, once every run has saved its state. A second signal discards
            the steps in progress, and a third kills the runs.
    """
    waiting = list(runs)
    running: dict[Slot, tuple[RunProgress, ForkServerProcess]] = {}
    stops: list[int] = []
    with on_stop(stops.append, stop_signals()):
        try:
            while waiting or running:
                for slot in slots:
                    if waiting and slot not in running:
                        run = waiting.pop(0)
                        running[slot] = (RunProgress(run), _start(run, slot))
                time.sleep(_POLL_S)
                if stops:
                    view.stopping(len(running))
                    raise KeyboardInterrupt
                if deadline is not None and time.perf_counter() >= deadline:
                    stops += [signal.SIGINT] * _DISCARDED_BY
                    return False
                codes = {slot: process.exitcode for slot, (_, process) in running.items()}
                for progress, _ in running.values():
                    progress.update()
                for slot, code in codes.items():
                    progress = running[slot][0]
                    if code is not None:
                        del running[slot]
                        _check_end(progress.run, code)
                        view.run_ended(progress)
                view.runs_progressed([progress for progress, _ in running.values()])
        finally:
            _stop([process for _, process in running.values()], stops)
    return True


def _start(run: PlannedRun, slot: Slot) -> ForkServerProcess:
    """Start a run, or resume it."""
    begun = (run.directory / "config.yaml").is_file()
    if not begun:  # clean up after a run that was killed before it wrote its settings
        shutil.rmtree(run.directory, ignore_errors=True)
    command = ["resume", str(run.directory), *run.resume_with] if begun else ["train", str(run.recipe)]
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_work, args=(command, slot, str(_errors_of(run))))
    # The process that forks the runs inherits the mask. A signal to all processes of a job must not kill it, because
    # the runs' exit codes would be lost. The resource tracker undoes the mask when it starts, so start it first.
    resource_tracker.ensure_running()
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # otherwise the child would rerun the caller's script
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _work(command: list[str], slot: Slot, errors: str) -> None:
    """Run a `brorl` command in the child process.

    SIGINT from the comparison stops it. SIGTERM stays blocked: a scheduler sends it to every process of a job, and a
    run that received both would discard its step at the second signal.
    """
    os.setsid()  # Ctrl-C reaches the comparison, which passes it on
    for path, descriptor in ((os.devnull, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    parent = parent_process()
    assert parent is not None

    def end_with_the_comparison() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)  # stops this process after the current step

    threading.Thread(target=end_with_the_comparison, daemon=True).start()
    if slot.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.device
    if slot.cores:
        import torch

        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, slot.cores)
        torch.set_num_threads(len(slot.cores))
    sys.argv = ["brorl", *command]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore SIGINT
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    runpy.run_module("brorl", run_name="__main__")


def _errors_of(run: PlannedRun) -> Path:
    return run.directory.with_name(f"{run.directory.name}.err")


def _check_end(run: PlannedRun, code: int) -> None:
    """Raise a UserError with the last line of the run's error output if the run is not complete."""
    errors = _errors_of(run)
    end = progress_of(run)
    if end.ended_early or (end.ended and code == 0):
        errors.unlink(missing_ok=True)
        return
    if code == -signal.SIGKILL and not end.ended:
        raise UserError(
            f"the run {run.arm}, seed {run.seed}, was killed, as happens when memory runs out; free memory or "
            f"lower {option('jobs')}, and rerun the command to continue"
        )
    lines = errors.read_text("utf-8", "replace").strip().splitlines() if errors.is_file() else []
    last = lines[-1].removeprefix("brorl: ") if lines else "no error was printed"
    raise UserError(
        f"the run {run.arm}, seed {run.seed}, failed (exit code {code}): {last} (its errors are in {errors}); fix this "
        "and rerun the command"
    )


def _stop(processes: Sequence[ForkServerProcess], stops: Sequence[int]) -> None:
    """Stop runs after the current step; a second signal discards the step, and a third kills the runs."""
    passed_on = 0
    while any(process.exitcode is None for process in processes):
        while passed_on < max(len(stops), 1):  # at least once, because a run may have failed
            passed_on += 1
            stop_signal = signal.SIGINT if passed_on < _KILLED_BY else signal.SIGKILL
            for process in processes:
                if process.pid is not None and process.exitcode is None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, stop_signal)
        wait([process.sentinel for process in processes if process.exitcode is None], _POLL_S)


_STEPS = 3  # take the median cost of these steps, because the first includes startup
_QUICK = {"evaluation.num_prompts": 1, "tracking.to": []}


def fitted(
    spec: ComparisonSpec, arguments: ComparisonRequest, folder: Path, slots: Sequence[Slot], screen: Screen
) -> ComparisonSpec:
    """Return the spec with a budget large enough for the step cost, measured on a few steps of every arm."""
    if spec.unit == "steps":  # any budget fits
        return spec
    screen.echo(f"{_STEPS} steps of each arm first, to measure the cost of a step")
    folders = arm_folders(spec.arms)
    runs = []
    with output_folder(folder), RunDirectory(folder).locked(), TemporaryDirectory(prefix=TRIAL, dir=folder) as scratch:
        for arm in spec.arms:
            directory = Path(scratch) / folders[arm.name]
            run = PlannedRun(
                arm.name, 0, directory.with_name(f"{directory.name}.yaml"), directory, Budget("steps", _STEPS)
            )
            config = with_settings(run_config(arm, 0, directory, run.budget), _QUICK)
            with storage_errors(folder):
                directory.parent.mkdir(parents=True, exist_ok=True)
                replace_file(run.recipe, dump_yaml(config).encode())
            runs.append(run)
        view = ComparisonView(Screen(silent=True), runs)
        screen.describe = view.line  # show only the status line, not the lines of ended runs
        finish_runs(runs, slots, view)
        costs = {run.arm: progress_of(run).costs_of_steps(spec.unit) for run in runs}
        cost_of = {arm: median(arm_costs) for arm, arm_costs in costs.items() if arm_costs}
        return fit_budget(spec, arguments, cost_of) if cost_of else spec  # on an error, no new folder remains
