"""What a person sees of a comparison: what is about to be done, runs as they end, and the result."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.text import Text

import brorl
from brorl.cli.arm_runs import ArmRun, RunProgress, progress_of
from brorl.cli.compare_plan import ComparisonPlan
from brorl.cost import UNIT_WORDS, amount
from brorl.format import duration, plain


def announce(console: Console, plan: ComparisonPlan, num_runs: int, machine: str, folder: Path) -> None:
    """Say what is about to happen."""
    names = (" against " if len(plan.arms) == 2 else ", ").join(arm.name for arm in plan.arms)
    lines = [
        f"brorl {brorl.__version__}: {names}, from {plan.arms[0].config.model}, {amount(plan.budget, plan.unit)} of "
        f"training each, {plan.seeds} seed{'s' if plan.seeds != 1 else ''}",
        f"{num_runs} run{'s' if num_runs != 1 else ''} in all; {machine}",
        f"evaluated at {', '.join(map(plain, plan.eval_points))} {UNIT_WORDS[plan.unit]}; folder {folder}",
    ]
    lines += [f"{arm.name}: {arm.title}" for arm in plan.arms if arm.title]
    if plan.unit == "seconds":
        lines.append(
            "evaluations and startup take extra time; keep the machine free of other work, because seconds are matched"
        )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


class View:
    """A line per run that has ended, and on a terminal what is under way.

    Args:
        console: Where to.
        jobs: All runs.
    """

    def __init__(self, console: Console, jobs: Sequence[ArmRun]) -> None:
        self._console, self._num_jobs = console, len(jobs)
        self.complete = frozenset(job for job in jobs if progress_of(job).ended)
        self._num_done = len(self.complete)
        self._width = max((len(job.arm) for job in jobs), default=0)
        self._started = perf_counter()
        self._under_way = 0.0
        unfinished = len(self.complete) < len(jobs)
        self._status = console.status("starting") if console.is_terminal and unfinished else None
        if self.complete:
            console.print(f"{len(self.complete)} of {len(jobs)} runs are complete already", markup=False)
        if self._status:
            self._status.start()

    def say(self, progress: RunProgress) -> None:
        """Print a run that has ended."""
        self._num_done += 1
        ends = _ends(progress.score)
        scores = "  ".join(f"pass@{k} {progress.first[k]:.3f} -> {progress.score[k]:.3f}" for k in ends)
        left = self._seconds_left(self._num_done - len(self.complete) + max(self._under_way - 1, 0))
        spent = f"{progress.spent.steps:,} steps, {progress.spent.seconds:,.0f} s"
        run = f"{progress.job.arm:<{self._width}}  seed {progress.job.seed}"
        self._console.print(
            f"{self._num_done:>4}/{self._num_jobs}  {run}  {scores}  {spent}  "
            f"{'' if not left else duration(left) + ' left'}",
            soft_wrap=True,
            markup=False,
        )

    def show(self, running: Sequence[RunProgress]) -> None:
        """Show the runs under way."""
        self._under_way = sum(progress.share for progress in running)
        if not self._status:
            return
        left = self._seconds_left(self._num_done - len(self.complete) + self._under_way)
        told = ", ".join(f"{p.job.arm} seed {p.job.seed} {p.share:.0%}" for p in running)
        self._status.update(Text(f"{told}{'' if not left else f'; about {duration(left)} left'}"))

    def stopping(self, num_runs: int) -> None:
        """Say that runs were asked to stop."""
        runs = "1 run finishes its step and saves" if num_runs == 1 else f"{num_runs} runs finish their steps and save"
        self._console.print(f"\nstopping: {runs}; Ctrl-C again discards the steps under way", soft_wrap=True)

    def _seconds_left(self, done: float) -> float | None:
        """Go by the share of the work of this call that is done."""
        all_of_it = self._num_jobs - len(self.complete)
        return (perf_counter() - self._started) * (all_of_it - done) / done if done > 0.02 else None

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._status:
            self._status.stop()


def stopped_words(folder: Path, jobs: Sequence[ArmRun]) -> str:
    """Say what is kept of a comparison that was stopped, and which command goes on."""
    from brorl.runs.checkpoint import last_checkpoint
    from brorl.runs.run_directory import RunDirectory

    complete = {job for job in jobs if progress_of(job).ended}
    saved = [job for job in jobs if job not in complete and last_checkpoint(RunDirectory(job.directory).checkpoints)]
    more = f", {len(saved)} more up to {'its' if len(saved) == 1 else 'their'} last checkpoint" if saved else ""
    return (
        f"stopped: {len(complete)} of {len(jobs)} runs are complete{more}; go on with: brorl compare "
        f"{shlex.quote(str(folder))}"
    )


def _ends(scores: Mapping[int, float]) -> list[int]:
    return list(dict.fromkeys((min(scores), max(scores)))) if scores else []


def present(console: Console, folder: Path) -> None:
    """Print what came of a comparison, and write it."""
    from brorl.comparison.figure import draw_comparison
    from brorl.comparison.frontier_figure import draw_frontier
    from brorl.comparison.reading import read_comparison
    from brorl.comparison.record import comparison_record
    from brorl.comparison.report import comparison_tables, comparison_text, markdown
    from brorl.storage import replace_file, storage_errors

    comparison = read_comparison(folder)
    written = ["comparison.json", "comparison.md", "comparison.png"]
    with storage_errors(folder):
        replace_file(folder / "comparison.json", json.dumps(comparison_record(comparison), indent=1).encode())
        replace_file(folder / "comparison.md", markdown(comparison).encode())
        draw_comparison(comparison, folder / "comparison.png")
        if len(comparison.arms) > 2:
            draw_frontier(comparison, folder / "frontier.png")
            written.append("frontier.png")
    found = comparison_text(comparison)
    console.print()
    for line in found.answer:
        console.print(line, soft_wrap=True, markup=False)
    for table in comparison_tables(comparison):
        console.print()
        console.print(table)
    console.print("\nWhat this rests on", style="bold")
    for line in found.remarks:
        console.print(f"- {line}", soft_wrap=True, markup=False)
    console.print(f"\nwritten to {folder}: {', '.join(written)}", soft_wrap=True, markup=False)
