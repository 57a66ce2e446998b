"""The runs of a comparison as child processes: several in parallel, each on its own cores or GPU.

An unfinished run is resumed and a complete one is left alone.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from brorl.cost import Budget, Cost, Unit, cost_of_step
from brorl.errors import UserError
from brorl.training.stop_request import on_stop, stop_signals

if TYPE_CHECKING:
    from brorl.api.comparison_view import ComparisonView

_POLL_S = 0.5
_DISCARDED_BY, _KILLED_BY = 2, 3  # signals sent to the comparison: the steps in progress, and the runs
_STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PRELOADED = (  # in the process that all runs are forked from: a run starts at once
    "brorl.api.training_session",
    "brorl.console.progress",
    "brorl.trackers",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm."""

    arm: str
    seed: int
    recipe: Path  # with all its settings
    directory: Path
    budget: Budget
    resume_with: tuple[str, ...] = ()  # options of the command that resumes it


@dataclass(frozen=True)
class Slot:
    """The resources of one run: the cores that it may use (empty: no limit), and the only accelerator (None: all)."""

    cores: frozenset[int] = frozenset()
    device: str | None = None


@dataclass
class RunProgress:
    """The progress of a run, read from its metrics as they grow."""

    run: ArmRun
    spent: Cost = field(default_factory=Cost)
    score: dict[int, float] = field(default_factory=dict)  # pass@k by k of the last evaluation
    first: dict[int, float] = field(default_factory=dict)  # pass@k by k of the first evaluation
    ended: bool = False
    ended_early: bool = False  # before the budget was spent
    steps: list[Cost] = field(default_factory=list)
    _offset: int = 0
    _file: int = 0

    @property
    def fraction(self) -> float:
        """Fraction of the budget that is spent, at most 1."""
        budget = self.run.budget
        return 1.0 if self.ended else min(self.spent.of(budget.unit) / budget.limit, 1.0)

    def costs_of_steps(self, unit: Unit) -> list[float]:
        """Return the cost of each step in a unit."""
        return [cost.of(unit) for cost in self.steps]

    def update(self) -> None:
        """Read the new metrics records."""
        metrics = self.run.directory / "metrics.jsonl"
        if not metrics.is_file():
            return
        with metrics.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._file or now.st_size < self._offset:  # a resumed run begins with a new, shorter file
                self._offset, self._file = 0, now.st_ino
                self.spent, self.score, self.first, self.steps = Cost(), {}, {}, []
                self.ended = self.ended_early = False
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        cost = cost_of_step(record)
        self.spent += cost
        if cost.samples:
            self.steps.append(cost)
        if "evaluation" in record:
            self.score = {int(k): e["value"] for k, e in record["evaluation"]["pass_at"].items()}
            self.first = self.first or self.score
        self.ended_early = "ended" in record
        self.ended = self.ended_early or self.run.budget.is_spent(self.spent)


def progress_of(run: ArmRun) -> RunProgress:
    """Read the progress of a run."""
    progress = RunProgress(run)
    progress.update()
    return progress


def gpu_slots(num: int | None) -> list[Slot]:
    """Return one slot per GPU that this process may see, at most `num`."""
    import torch

    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = visible or [str(i) for i in range(torch.cuda.device_count())]
    if num is not None and num > len(devices):
        raise UserError(
            f"--jobs {num}: there are {len(devices)} GPUs, and runs cannot share one; use --jobs {len(devices)}"
        )
    return [Slot(device=device) for device in devices[:num]]


def cpu_slots(num: int | None, threads: int) -> list[Slot]:
    """Divide the cores of this process among `num` runs; None for as many as have `threads` cores each (0: all)."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    num = num or max(1, len(cores) // (threads or len(cores)))
    if num > len(cores):
        raise UserError(
            f"--jobs {num}: there are {len(cores)} cores, and runs cannot share one; use --jobs {len(cores)}"
        )
    each = len(cores) // num
    if num > 1 and threads > each:
        raise UserError(
            f"--jobs {num}: each run would get {each} of {len(cores)} cores, and engine.threads = {threads}; use "
            f"--jobs {max(len(cores) // threads, 1)}, or --engine.threads {each}"
        )
    return [Slot(frozenset(cores[i * each : (i + 1) * each])) for i in range(num)]


def finish_runs(
    runs: Sequence[ArmRun], slots: Sequence[Slot], view: ComparisonView, deadline: float | None = None
) -> bool:
    """Run all runs to completion, and return whether they are complete.

    Args:
        runs: The runs.
        slots: The place of each run that is in progress at the same time.
        view: Shows the progress.
        deadline: When the runs are stopped, on the clock of `time.perf_counter`; steps in progress are discarded.

    Raises:
        UserError: If a run failed. The others stop after their step, and all of them can be continued.
        KeyboardInterrupt: On Ctrl-C, SIGTERM or SIGHUP, once every run has saved its state. The second one discards
            the steps in progress, the third kills the runs.
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


def _start(run: ArmRun, slot: Slot) -> ForkServerProcess:
    """Start a run, or resume it."""
    begun = (run.directory / "config.yaml").is_file()
    if not begun:  # remove the remains of a kill that came before the run's first file
        shutil.rmtree(run.directory, ignore_errors=True)
    command = ["resume", str(run.directory), *run.resume_with] if begun else ["train", str(run.recipe)]
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    process = context.Process(target=_work, args=(command, slot, str(_errors_of(run))))
    # The process that forks the runs inherits the mask. A signal to all processes of a job must not end it, because the
    # exit codes of the runs would be lost. The resource tracker undoes the mask when it starts, so it starts before.
    resource_tracker.ensure_running()
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # else the child would run the caller's script again
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _work(command: list[str], slot: Slot, errors: str) -> None:
    """Run a command of `brorl` in the child process.

    SIGINT from the comparison stops it. SIGTERM stays blocked: a scheduler sends it to every process of a job, and a
    run that got both signals would discard its step on the second one.
    """
    os.setsid()  # Ctrl-C reaches the comparison, which passes it on
    for path, descriptor in ((os.devnull, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if slot.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.device
    if slot.cores:
        import torch

        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, slot.cores)
        torch.set_num_threads(len(slot.cores))
    sys.argv = ["brorl", *command]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts a job in the background ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    runpy.run_module("brorl", run_name="__main__")


def _end_with(sentinel: int) -> None:
    """Stop this process after its step when the comparison has ended."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)


def _errors_of(run: ArmRun) -> Path:
    return run.directory.with_name(f"{run.directory.name}.err")


def _check_end(run: ArmRun, code: int) -> None:
    """Raise a UserError with the last line of the run's errors if the run is not complete."""
    errors, end = _errors_of(run), progress_of(run)
    if end.ended_early or (end.ended and code == 0):
        errors.unlink(missing_ok=True)
        return
    lines = errors.read_text("utf-8", "replace").strip().splitlines() if errors.is_file() else []
    last = lines[-1].removeprefix("brorl: ") if lines else "no error was printed"
    raise UserError(
        f"the run {run.arm}, seed {run.seed}, failed (exit code {code}): {last} (its errors are in {errors}); fix this "
        "and rerun the command"
    )


def _stop(processes: Sequence[ForkServerProcess], stops: Sequence[int]) -> None:
    """Stop runs after their step; the second signal discards their steps, the third kills them."""
    passed_on = 0
    while any(process.exitcode is None for process in processes):
        while passed_on < max(len(stops), 1):  # at least once, because a run may have failed
            passed_on += 1
            for process in processes:
                _pass_on(process, signal.SIGINT if passed_on < _KILLED_BY else signal.SIGKILL)
        wait([process.sentinel for process in processes if process.exitcode is None], _POLL_S)


def _pass_on(process: ForkServerProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
