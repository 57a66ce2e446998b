"""The console output of a comparison while it runs: the plan, runs as they end, and the command that continues.

In a file or pipe, the runs in progress are a line after every 30 seconds without output.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.text import Text

import brorl
from brorl.comparison.arms import ArmRun, RunProgress, progress_of
from brorl.comparison.plan import ComparisonPlan
from brorl.console.screen import QUIET_S
from brorl.cost import UNIT_WORDS, amount
from brorl.errors import option
from brorl.format import counted, duration, plain
from brorl.runs.checkpoint import last_checkpoint
from brorl.runs.run_directory import RunDirectory

_BUSY = 0.25  # of the cores that a comparison uses: more other work than that slows its steps


class ComparisonView:
    """One line for each run that has ended, and the runs in progress."""

    def __init__(self, console: Console, runs: Sequence[ArmRun]) -> None:
        self._console, self._runs, self._num_runs = console, runs, len(runs)
        self.complete = frozenset(run for run in runs if progress_of(run).ended)
        self._num_done = len(self.complete)
        self._width = max((len(run.arm) for run in runs), default=0)
        self._started = perf_counter()
        self._last_output = self._started
        self._in_progress = 0.0
        self._status = console.status("starting")

    def announce(self, plan: ComparisonPlan, folder: Path, num_cores: int) -> None:
        """Print the plan, and show runs in progress from here on; the runs use `num_cores` cores (0: GPUs)."""
        names = (" against " if len(plan.arms) == 2 else ", ").join(arm.name for arm in plan.arms)
        self._print(
            f"brorl {brorl.__version__}: {names}, from {plan.arms[0].config.model}, "
            f"{amount(plan.budget, plan.unit)} of training each, {counted(plan.seeds, 'seed')}"
        )
        self._print(f"{counted(self._num_runs, 'run')} in all; {plan.machine}")
        self._print(f"evaluated at {', '.join(map(plain, plan.eval_points))} {UNIT_WORDS[plan.unit]}; folder {folder}")
        for note in plan.notes:
            self._print(note)
        for arm in plan.arms:
            if arm.title:
                self._print(f"{arm.name}: {arm.title}")
        if plan.unit == "seconds":
            self._print(
                "evaluations and startup take extra time; keep the machine free of other work, because seconds are "
                "matched"
            )
            if plan.arms[0].config.engine.clock == "wall" and num_cores:
                self._warn_of_load(num_cores)
        if self.complete:
            self.print_complete()
        if self._console.is_terminal and len(self.complete) < self._num_runs:
            self._status.start()

    def print_complete(self) -> None:
        """Print the number of runs that are complete already."""
        self._print(f"{len(self.complete)} of {self._num_runs} runs are complete already")

    def run_ended(self, progress: RunProgress) -> None:
        """Print a run that has ended."""
        self._num_done += 1
        ks = dict.fromkeys((min(progress.score), max(progress.score))) if progress.score else {}
        scores = "  ".join(f"pass@{k} {progress.first[k]:.3f} -> {progress.score[k]:.3f}" for k in ks)
        left = self._seconds_left(self._num_done - len(self.complete) + max(self._in_progress - 1, 0))
        spent = f"{progress.spent.steps:,} steps, {progress.spent.seconds:,.0f} s"
        run = f"{progress.run.arm:<{self._width}}  seed {progress.run.seed}"
        remaining = "" if not left else f"{duration(left)} left"
        self._print(f"{self._num_done:>4}/{self._num_runs}  {run}  {scores}  {spent}  {remaining}")

    def runs_progressed(self, running: Sequence[RunProgress]) -> None:
        """Show the runs in progress: on a terminal always, elsewhere after some time without output."""
        self._in_progress = sum(progress.fraction for progress in running)
        left = self._seconds_left(self._num_done - len(self.complete) + self._in_progress)
        fractions = ", ".join(f"{p.run.arm} seed {p.run.seed} {p.fraction:.0%}" for p in running)
        line = f"{fractions}{'' if not left else f'; about {duration(left)} left'}"
        self._status.update(Text(line))
        if not self._console.is_terminal and running and perf_counter() - self._last_output >= QUIET_S:
            self._print(line)

    def stopping(self, num_runs: int) -> None:
        """Print that runs will stop."""
        runs = "1 run finishes its step and saves" if num_runs == 1 else f"{num_runs} runs finish their steps and save"
        self._print(f"\nstopping: {runs}; Ctrl-C again discards the steps in progress")

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """Restore the terminal after the block; if it is interrupted, print the command that continues the runs."""
        try:
            yield
        except KeyboardInterrupt:
            self._print_stopped(command)
            raise KeyboardInterrupt("stopped") from None
        finally:
            self._status.stop()

    def _print_stopped(self, command: str) -> None:
        """Print the number of complete and of saved runs, and the command that continues them."""
        left = [run for run in self._runs if not progress_of(run).ended]
        saved = [run for run in left if last_checkpoint(RunDirectory(run.directory).checkpoints)]
        more = f", {len(saved)} more up to {'its' if len(saved) == 1 else 'their'} last checkpoint" if saved else ""
        complete = f"{self._num_runs - len(left)} of {self._num_runs} runs are complete"
        self._print(f"\nstopped: {complete}{more}; continue with: {command}")

    def _warn_of_load(self, num_cores: int) -> None:
        """Recommend CPU time as the clock if other programs need cores that the runs will use."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        cores = os.cpu_count() or num_cores
        if load > cores - num_cores + max(_BUSY * num_cores, 0.5):
            self._print(
                f"warning: the machine is busy (load {load:.1f} on {counted(cores, 'core')}, and these runs use "
                f"{num_cores}), which changes how many steps fit into a second; stop the other programs, or match CPU "
                f"time: {option('engine.clock', 'cpu')} {option('engine.threads', 1)}"
            )

    def _print(self, line: str) -> None:
        self._last_output = perf_counter()
        self._console.print(line, soft_wrap=True, markup=False)

    def _seconds_left(self, done: float) -> float | None:
        """Estimate the remaining time from the fraction of this call's work that is done."""
        whole = self._num_runs - len(self.complete)
        return (perf_counter() - self._started) * (whole - done) / done if 0.02 < done < whole else None
