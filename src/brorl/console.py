"""What a person sees while a run trains: one line a step, and a table at the end.

In: lines of the metrics. Out: text on the console and in `run.log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from brorl.training.run_directory import Record

_HEADER = "  step  reward   held-out pass@1   groups kept  unique/sampled  samples/s   sample/verify/train s    ETA"


class Progress:
    """Prints a line a step to the console and to the run's log.

    Args:
        steps: Number of steps of the whole run.
        log_file: File that gets the same lines.
    """

    def __init__(self, steps: int, log_file: Path) -> None:
        self._steps = steps
        self._console = Console(highlight=False)
        self._log_file = log_file
        self._started: float | None = None
        self._first_step = 0
        self._lines = 0

    def say(self, text: str) -> None:
        """Print a line (rich markup is allowed)."""
        self._console.print(text, soft_wrap=True)
        self._log(Console(force_terminal=False, no_color=True).render_str(text).plain)

    def show(self, record: Record) -> None:
        """Print a line of the metrics."""
        if self._started is None:
            self._started, self._first_step = perf_counter(), record["step"]
        if record["step"] == 0:
            if "evaluation" in record:
                self.say(f"held out, before training: {pass_at_line(record['evaluation'])}")
            return
        if self._lines % 25 == 0:
            self.say(f"[dim]{_HEADER}[/dim]")
        self._lines += 1
        self.say(self._line(record))

    def _line(self, record: Record) -> str:
        sampling, kept, seconds = record["sampling"], record["kept"], record["seconds"]
        held_out = ""
        if "evaluation" in record:
            estimate = pass_at(record["evaluation"], 1)
            held_out = f"{estimate['value']:.3f} [{estimate['low']:.2f}, {estimate['high']:.2f}]" if estimate else ""
        share = sampling["unique_tokens"] / max(sampling["sampled_tokens"], 1)
        phases = "/".join(f"{seconds.get(p, 0.0):.2f}" for p in ("generation", "verification", "training"))
        groups = f"{kept['groups']}/{sampling['groups']}"
        rate = sampling["samples"] / seconds["total"]
        return (
            f"{record['step']:>6}  {sampling['reward']:>6.3f}   [bold green]{held_out:<18}[/bold green]"
            f"{groups:>11}  {share:>14.3f}  {rate:>9,.0f}   {phases:>21}  {self._eta(record['step']):>7}"
        )

    def _eta(self, step: int) -> str:
        assert self._started is not None
        done = step - self._first_step
        if done < 1:
            return ""
        return duration((perf_counter() - self._started) / done * (self._steps - step))

    def finish(self, records: Sequence[Record], run_path: Path, ending: str, hints: Sequence[str]) -> None:
        """Print what the run bought, from all its metrics."""
        table = summary_table(records)
        self._console.print()
        self._console.print(table)
        with self._log_file.open("a", encoding="utf-8") as file:
            Console(file=file, width=120, no_color=True).print(table)
        self.say(f"{ending}; run directory: [bold]{run_path}[/bold]")
        for hint in hints:
            self.say(hint)

    def _log(self, text: str) -> None:
        with self._log_file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def summary_table(records: Sequence[Record]) -> Table:
    """Make the table of the end: pass@k before and after, what was sampled, what sharing saved, where the time went."""
    table = Table(title="What this run did", title_justify="left", show_header=True, header_style="bold")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    evaluations = [r["evaluation"] for r in records if "evaluation" in r]
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        for k in first["pass_at"]:
            before, after = first["pass_at"][k], last["pass_at"][k]
            table.add_row(
                f"held-out pass@{k}",
                _interval(before),
                _interval(after),
                f"{after['value'] - before['value']:+.3f}",
            )
        table.add_row(
            f"prompts solved of {last['num_prompts']} (n={last['num_samples']})",
            str(first["solved"]), str(last["solved"]), f"{last['solved'] - first['solved']:+d}",
        )  # fmt: skip
        table.add_section()
    steps = [r for r in records if "sampling" in r]
    if steps:
        _add_costs(table, steps)
    return table


def _add_costs(table: Table, steps: Sequence[Record]) -> None:
    def total(section: str, name: str) -> float:
        return float(sum(r[section].get(name, 0) for r in steps))

    samples, sampled, unique = (total("sampling", n) for n in ("samples", "sampled_tokens", "unique_tokens"))
    table.add_row("steps", "", f"{len(steps):,}", "")
    table.add_row("samples (rollouts)", "", f"{samples:,.0f}", "")
    table.add_row(
        "groups kept of sampled",
        "",
        f"{total('kept', 'groups'):,.0f} of {total('sampling', 'groups'):,.0f}",
        "",
    )
    table.add_row("tokens sampled", "", f"{sampled:,.0f}", "")
    table.add_row("tokens computed (unique)", "", f"{unique:,.0f}", "")
    table.add_row("sharing saved", "", f"{1 - unique / sampled:.1%} of sampling", f"{sampled / unique:.1f}x fewer")
    distinct = total("sampling", "distinct_responses")
    table.add_row("responses verified", "", f"{distinct:,.0f}", f"{samples / distinct:.1f}x fewer")
    phases = ", ".join(f"{p} {total('seconds', p):.1f}" for p in ("generation", "verification", "training"))
    table.add_row("seconds", "", f"{total('seconds', 'total'):.1f}", "")
    table.add_row("  of which", "", phases, "")


def pass_at(evaluation: Record, k: int) -> Any:
    """Return the estimate of pass@k, whose key is a number in memory and text in a file; None if there is none."""
    estimates = evaluation["pass_at"]
    return estimates.get(k, estimates.get(str(k)))


def pass_at_line(evaluation: Record) -> str:
    """Return all pass@k of an evaluation on one line."""
    parts = [f"pass@{k} {_interval(estimate)}" for k, estimate in evaluation["pass_at"].items()]
    return f"{', '.join(parts)} ({evaluation['num_prompts']} prompts x {evaluation['num_samples']} samples)"


def duration(seconds: float) -> str:
    """Return seconds as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _interval(estimate: Record) -> str:
    return f"{estimate['value']:.3f} \\[{estimate['low']:.3f}, {estimate['high']:.3f}]"
