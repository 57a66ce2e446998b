"""The runs of a comparison as child processes: several at a time, each on cores of its own.

In: jobs, each a recipe, a run directory and what it may spend. Out: finished run directories. A run that was begun
is resumed, one that is complete is left alone, and none is started on cores that another one uses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from brorl.cli.stop_signals import STOP_SIGNALS, StopCount, counted_stops
from brorl.cost import Budget, Cost, cost_of_step
from brorl.errors import UserError

_POLL_S = 0.5
_KILLED_BY = 3  # signals that the comparison was sent
_PRELOADED = (  # by the process that all runs are forked from, so that a run starts at once
    "brorl.assemble.run",
    "brorl.console.progress",
    "brorl.trackers",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class ArmRun:
    """One run.

    Attributes:
        arm: Name of its arm.
        seed: Its seed.
        recipe: File with all its settings.
        directory: Its run directory.
        budget: What it may spend.
    """

    arm: str
    seed: int
    recipe: Path
    directory: Path
    budget: Budget


@dataclass(frozen=True)
class Slot:
    """Where one run at a time may work.

    Attributes:
        cores: The cores that it may use; none where the system does not tell.
        device: Which accelerator it may see; None for all.
    """

    cores: frozenset[int] = frozenset()
    device: str | None = None


@dataclass
class RunProgress:
    """How far a run is, read from its metrics as they grow.

    Attributes:
        job: The run.
        spent: What its steps have cost.
        share: How much of its budget that is, at most 1.
        score: The last evaluation's pass@k by k; empty before the first.
        first: The first evaluation's.
        ended: Whether nothing is left to do.
        ended_early: Whether that is because the run ended by itself before its budget was spent.
    """

    job: ArmRun
    spent: Cost = field(default_factory=Cost)
    score: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: bool = False
    ended_early: bool = False
    _offset: int = 0
    _file: int = 0

    @property
    def share(self) -> float:
        """How much of the budget is spent, at most 1."""
        budget = self.job.budget
        return 1.0 if self.ended else min(self.spent.of(budget.unit) / budget.limit, 1.0)

    def update(self) -> None:
        """Read what the metrics have gained."""
        metrics = self.job.directory / "metrics.jsonl"
        if not metrics.is_file():
            return
        with metrics.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._file or now.st_size < self._offset:  # a resumed run begins with a new, shorter file
                self._offset, self._file = 0, now.st_ino
                self.spent, self.score, self.first = Cost(), {}, {}
                self.ended = self.ended_early = False
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        self.spent += cost_of_step(record)
        if "evaluation" in record:
            self.score = {int(k): e["value"] for k, e in record["evaluation"]["pass_at"].items()}
            self.first = self.first or self.score
        self.ended_early = "ended" in record
        self.ended = self.ended_early or self.job.budget.is_spent(self.spent)


def progress_of(job: ArmRun) -> RunProgress:
    """Read how far a run is."""
    progress = RunProgress(job)
    progress.update()
    return progress


def gpu_slots(num: int | None) -> list[Slot]:
    """Return one slot per GPU that this process may see.

    Args:
        num: Runs at a time; None for as many as there are GPUs.

    Raises:
        UserError: If there are more runs than GPUs.
    """
    import torch

    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = visible or [str(i) for i in range(torch.cuda.device_count())]
    if num is not None and num > len(devices):
        raise UserError(f"--jobs {num}: there are {len(devices)} GPUs, and runs must not share one; lower it")
    return [Slot(device=device) for device in devices[:num]]


def cpu_slots(num: int | None, threads: int) -> list[Slot]:
    """Share this process's cores out among runs.

    Args:
        num: Runs at a time; None for as many as have `threads` cores each, and at least one.
        threads: Threads of a run; 0 if it takes all that there are.

    Returns:
        One slot per run, with disjoint sets of cores.

    Raises:
        UserError: If there are more runs than cores, or not the threads for each.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    num = num or max(1, len(cores) // (threads or len(cores)))
    if num > len(cores):
        raise UserError(f"--jobs {num}: there are {len(cores)} cores, and runs must not share one; lower it")
    each = len(cores) // num
    if num > 1 and threads > each:
        raise UserError(
            f"--jobs {num}: of {len(cores)} cores each run would get {each}, and engine.threads = {threads}; lower it"
        )
    return [Slot(frozenset(cores[i * each : (i + 1) * each])) for i in range(num)]


def run_jobs(
    jobs: Sequence[ArmRun],
    slots: Sequence[Slot],
    say: Callable[[RunProgress], None],
    show: Callable[[Sequence[RunProgress]], None],
    stopping: Callable[[int], None],
) -> None:
    """Bring every run to its end.

    Args:
        jobs: The runs, in the order in which they are started.
        slots: Where runs may work at the same time.
        say: Called with each run that has ended.
        show: Called with all runs under way, now and then.
        stopping: Called with the number of runs that are asked to stop after their step.

    Raises:
        UserError: If a run failed; the others are stopped after their step, and all of them can be gone on with.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, once every run has saved its state. The second one discards the steps
            under way, the third kills the runs.
    """
    waiting = list(jobs)
    running: dict[Slot, tuple[RunProgress, ForkServerProcess]] = {}
    with counted_stops() as stops:
        try:
            while waiting or running:
                for slot in slots:
                    if waiting and slot not in running:
                        job = waiting.pop(0)
                        running[slot] = (RunProgress(job), _start(job, slot))
                time.sleep(_POLL_S)
                if stops.count:
                    stopping(len(running))
                    raise KeyboardInterrupt
                for slot, (progress, process) in list(running.items()):
                    code = process.exitcode
                    progress.update()
                    if code is not None:
                        del running[slot]
                        _check_end(progress, code)
                        say(progress)
                show([progress for progress, _ in running.values()])
        finally:
            _stop([process for _, process in running.values()], stops)


def _start(job: ArmRun, slot: Slot) -> ForkServerProcess:
    """Start a run, or go on with it."""
    begun = (job.directory / "config.yaml").is_file()
    if not begun:  # what a kill left that came before the run's first file
        shutil.rmtree(job.directory, ignore_errors=True)
    command = ["resume", str(job.directory)] if begun else ["train", str(job.recipe)]
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    process = context.Process(target=_work, args=(command, slot, str(_errors_of(job))))
    # The process that forks the runs inherits the mask: a signal to all processes of a job must not end it, or how the
    # runs end would never be known here. What tracks resources undoes the mask when it starts, so it starts before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _work(command: list[str], slot: Slot, errors: str) -> None:
    """Be a run: what the child does.

    SIGINT stops it, which the comparison sends. SIGTERM stays blocked: a scheduler sends it to every process of a job,
    and a run that got both would take the second one for a request to discard its step.
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

    from brorl.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts a job in the background ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.exit(main(command))


def _end_with(sentinel: int) -> None:
    """Ask this process to end after its step when the comparison is gone."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)


def _errors_of(job: ArmRun) -> Path:
    return job.directory.with_name(f"{job.directory.name}.err")


def _check_end(progress: RunProgress, code: int) -> None:
    """Refuse a run that has not come to its end.

    Raises:
        UserError: With the last line of the run's errors.
    """
    errors = _errors_of(progress.job)
    end = progress_of(progress.job)
    if end.ended_early or (end.ended and code == 0):
        errors.unlink(missing_ok=True)
        return
    said = errors.read_text("utf-8", "replace").strip().splitlines() if errors.is_file() else []
    job = progress.job
    raise UserError(
        f"the run {job.arm}, seed {job.seed}, failed (exit code {code}): "
        f"{said[-1].removeprefix('brorl: ') if said else 'no error was printed'} (its errors are in {errors}); fix "
        "this and give the same command again"
    )


def _stop(processes: Sequence[ForkServerProcess], stops: StopCount) -> None:
    """Have runs end after their step; the second signal discards their steps, the third kills them."""
    passed_on = 0
    while any(process.exitcode is None for process in processes):
        while passed_on < max(stops.count, 1):  # at least once: another run may have failed
            passed_on += 1
            for process in processes:
                _pass_on(process, signal.SIGINT if passed_on < _KILLED_BY else signal.SIGKILL)
        wait([process.sentinel for process in processes if process.exitcode is None], _POLL_S)


def _pass_on(process: ForkServerProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
