"""What a person sees while a run trains: one line a step, and a table at the end.

In: lines of the metrics. Out: text on the console and in `run.log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from brorl.evaluation.compute_match import Budget, Cost, cost_of_step, total_cost
from brorl.storage import storing
from brorl.training.run_directory import Record
from brorl.words import duration

_PHASES = ("generation", "verification", "training", "diagnostics", "storing")
_LAST_STEPS = 25
_LARGE_STEP = 0.5  # nats per token; within the clip of PPO it is about 0.01
_HEADER = "  step  reward   held-out pass@1   kept/sampled  unique/sampled  samples/s   sample/verify/train s    ETA"


class Progress:
    """Prints a line a step to the console and to the run's log.

    Args:
        steps: Number of steps of the whole run, at most; None if the budget alone ends it.
        budget: What the whole run may cost.
        log_file: File that gets the same lines.
    """

    def __init__(self, steps: int | None, budget: Budget, log_file: Path) -> None:
        self._steps, self._budget = steps, budget
        self._console = Console(highlight=False)
        self._log_file = log_file
        self._started: float | None = None
        self._spent = Cost()
        self._share_before = 0.0
        self._lines = 0

    def recall(self, past: Sequence[Record]) -> None:
        """Take the lines that the metrics of a resumed run hold already."""
        self._spent = total_cost(past)

    def say(self, text: str | Text) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True, markup=False)
        with storing(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def show(self, record: Record) -> None:
        """Print a line of the metrics."""
        self._spent += cost_of_step(record)
        if self._started is None:
            self._started, self._share_before = perf_counter(), self._share_done()
        if "update" not in record:
            if "evaluation" in record:
                when = "at the end" if record["step"] else "before training"
                self.say(f"held out, {when}: {pass_at_line(record['evaluation'])}")
                for note in notes(record):
                    self.say(Text(note, style="yellow"))
            return
        if self._lines % 25 == 0:
            self.say(Text(_HEADER, style="dim"))
        self._lines += 1
        self.say(self._line(record))
        for note in notes(record):
            self.say(Text(f"{'':>6}  {note}", style="yellow"))

    def _line(self, record: Record) -> Text:
        sampling, kept, seconds = record["sampling"], record["kept"], record["seconds"]
        held_out = ""
        if "evaluation" in record:
            estimate = pass_at(record["evaluation"], 1)
            held_out = f"{estimate['value']:.3f} [{estimate['low']:.2f}, {estimate['high']:.2f}]" if estimate else ""
        share = sampling["unique_tokens"] / max(sampling["sampled_tokens"], 1)
        phases = "/".join(f"{seconds.get(p, 0.0):.2f}" for p in ("generation", "verification", "training"))
        groups = f"{kept['groups']}/{sampling['groups']}"
        rate = sampling["samples"] / seconds["total"]
        return Text.assemble(
            f"{record['step']:>6}  {sampling['reward']:>6.3f}  ",
            (held_out.ljust(18), "bold green"),
            f"{groups:>13}  {share:>14.3f}  {rate:>9,.0f}  {phases:>21}  {self._eta():>6}",
        )

    def _share_done(self) -> float:
        of_budget = self._spent.of(self._budget.unit) / self._budget.limit
        return of_budget if self._steps is None else max(self._spent.steps / self._steps, of_budget)

    def _eta(self) -> str:
        assert self._started is not None
        share = self._share_done()
        if share <= self._share_before:
            return ""
        return duration((perf_counter() - self._started) / (share - self._share_before) * max(1 - share, 0.0))

    def finish(self, records: Sequence[Record], run_path: Path, ending: str, hints: Sequence[str]) -> None:
        """Print what the run bought, from all its metrics."""
        tables = [outcome_table(records), coverage_table(records), cost_table(records)]
        with storing(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
            for console in (self._console, Console(file=file, width=100, no_color=True)):
                for table in tables:
                    if table.row_count:
                        console.print()
                        console.print(table)
        self.say(f"\n{ending}; run directory: {run_path}")
        for hint in [*certificate_lines(records), *coverage_hints(records), *hints]:
            self.say(hint)


def notes(record: Record) -> list[str]:
    """Say what was out of the ordinary in a step."""
    said = []
    for name, where in (("sampling", "their reasons are in rollouts/"), ("evaluation", "this was while evaluating")):
        lost, failed = (record.get(name, {}).get(f"verifier_{what}", 0) for what in ("timeouts", "failures"))
        if lost or failed:
            said.append(f"{lost} verifications timed out and {failed} failed; they count as incorrect, and {where}")
    update = record.get("update")
    if update and update["out_of_memory_retries"]:
        said.append(f"out of memory: from now on {update['nodes_per_pass']} nodes per forward pass, same gradients")
    if update and update["old_policy_kl"] > _LARGE_STEP:
        said.append(
            f"warning: the updates of this step moved the policy by {update['old_policy_kl']:.2g} nats per token; "
            "lower optimizer.learning_rate"
        )
    if "reference_reset" in record:
        said.append(f"reference policy reset: {record['reference_reset']}")
    if "collapse" in record:
        said.append(f"warning: {record['collapse']}")
    return said


def outcome_table(records: Sequence[Record]) -> Table:
    """Make the table of held-out results before and after, with 95% intervals over prompts."""
    table = Table(title="On prompts held out from training", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    evaluations = [r["evaluation"] for r in records if "evaluation" in r]
    if len(evaluations) < 2:
        return table
    first, last = evaluations[0], evaluations[-1]
    for k, before in first["pass_at"].items():
        after = last["pass_at"][k]
        table.add_row(f"pass@{k}", _interval(before), _interval(after), f"{after['value'] - before['value']:+.3f}")
    for source, before_at in first["by_source"].items():
        after_at = last["by_source"][source]
        for k in dict.fromkeys((min(before_at, key=int), max(before_at, key=int))):
            change = after_at[k]["value"] - before_at[k]["value"]
            row = (_interval(before_at[k]), _interval(after_at[k]), f"{change:+.3f}")
            table.add_row(f"  {escape(source)} pass@{k}", *row)
    solved = f"{last['solved'] - first['solved']:+d}"
    table.add_row(f"solved of {last['num_prompts']}", str(first["solved"]), str(last["solved"]), solved)
    return table


def coverage_table(records: Sequence[Record]) -> Table:
    """Make the table of what other numbers of rollouts would have seen in the last steps, from this run's rollouts."""
    steps = [r for r in records if "coverage" in r][-_LAST_STEPS:]
    table = Table(title=f"What N bought (last {len(steps)} steps)", title_justify="left", box=box.SIMPLE_HEAD)
    pooled = [r["coverage"]["pooled"] for r in steps]
    mixed = [(r["sampling"]["groups"], p["informative_share_at"]) for r, p in zip(steps, pooled, strict=True)]
    mixed = [(groups, share_at) for groups, share_at in mixed if share_at]
    seen = [p for p in pooled if p["unsampled_correct_at"] and p["q_pos"] > 0]
    if not mixed:
        return table
    own = max(int(n) for n in mixed[-1][1])
    known = {int(n) for p in (mixed[-1][1], *(s["unsampled_correct_at"] for s in seen)) for n in p}
    columns = sorted(known & {16, 64, 256, own, 4 * own})
    table.add_column("N =")
    for n in columns:
        table.add_column(f"{n}*" if n > own else str(n), justify="right", style="bold" if n == own else None)
    groups = sum(size for size, _ in mixed)
    shares = [sum(g * _at(at, n) for g, at in mixed) / groups if n <= own else None for n in columns]
    table.add_row("groups with correct and incorrect rollouts", *(_percent(value) for value in shares))
    if seen:
        mass = sum(p["q_pos"] for p in seen)
        rows = [1 - sum(_at(p["unsampled_correct_at"], n) for p in seen) / mass for n in columns]
        table.add_row("correct responses sampled, by their probability", *(_percent(value) for value in rows))
        if columns[-1] > own:
            table.caption = f"* estimated from the same {own} rollouts of each prompt"
    elif any(p["unsampled_correct_at"] for p in pooled):
        table.caption = "no correct response was sampled in these steps"
    else:
        table.caption = "every response was unique, so these rollouts cannot tell what was not sampled"
    return table


def certificate_lines(records: Sequence[Record]) -> list[str]:
    """Say what the certified updates did to the probability of correct responses."""
    certificates = [r["certificate"] for r in records if r.get("certificate", {}).get("change") is not None]
    if not certificates:
        return []
    number, steps = len(certificates), sum("sampling" in r for r in records)
    change = _mean([c["change"] for c in certificates])
    half = sqrt(sum((c["change_high"] - c["change"]) ** 2 for c in certificates)) / number
    line = (
        f"certificate on held-out rollouts of {number} of {steps} updates: one update changed the probability of a "
        f"correct response by {change:+.4f} [{change - half:+.4f}, {change + half:+.4f}]"
    )
    correct = sum(c["num_correct"] for c in certificates)
    if correct:
        risen = sum(c["share_improved"] * c["num_correct"] for c in certificates if c["num_correct"])
        drop = min(c["worst_drop"] for c in certificates if c["num_correct"])
        line += f"; {risen / correct:.0%} of the correct mass rose, "
        line += f"the largest fall of one response was {-drop:.2g}" if drop < 0 else "and no sampled response fell"
    return [line]


def cost_table(records: Sequence[Record]) -> Table:
    """Make the table of what was sampled, what sharing saved, and where the time went."""
    table = Table(title="What it cost", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    steps = [r for r in records if "sampling" in r]
    if not steps:
        return table

    def total(section: str, name: str) -> float:
        return float(sum(r[section].get(name, 0) for r in steps))

    samples, sampled, unique = (total("sampling", n) for n in ("samples", "sampled_tokens", "unique_tokens"))
    distinct = total("sampling", "distinct_responses")
    kept, groups = total("kept", "groups"), total("sampling", "groups")
    phases = ", ".join(f"{p} {total('seconds', p):.1f}" for p in _PHASES)
    table.add_row("steps", f"{len(steps):,}", f"{kept:,.0f} groups kept of {groups:,.0f}")
    table.add_row("samples", f"{samples:,.0f}", f"{distinct:,.0f} verified: {samples / distinct:.1f}x fewer")
    table.add_row("tokens", f"{sampled:,.0f}", f"{unique:,.0f} computed: {sampled / unique:.1f}x fewer")
    lost, failed = total("sampling", "verifier_timeouts"), total("sampling", "verifier_failures")
    if lost or failed:
        table.add_row("verifications", f"{lost + failed:,.0f}", f"lost: {lost:,.0f} timed out, {failed:,.0f} failed")
    table.add_row("seconds", f"{total('seconds', 'total'):.1f}", phases)
    return table


def coverage_hints(records: Sequence[Record]) -> list[str]:
    """Say so where training sharpened the model at the price of coverage, beyond the intervals."""
    evaluations = [r["evaluation"] for r in records if "evaluation" in r]
    if len(evaluations) < 2:
        return []
    k = max(evaluations[0]["pass_at"], key=int)
    before, after = evaluations[0]["pass_at"][k], evaluations[-1]["pass_at"][k]
    if int(k) == 1 or after["high"] >= before["low"]:
        return []
    return [
        f"coverage fell: pass@{k} went from {before['value']:.3f} to {after['value']:.3f}; "
        "a lower optimizer.learning_rate or fewer steps keep more of it"
    ]


def pass_at(evaluation: Record, k: int) -> Any:
    """Return the estimate of pass@k, whose key is a number in memory and text in a file; None if there is none."""
    estimates = evaluation["pass_at"]
    return estimates.get(k, estimates.get(str(k)))


def pass_at_line(evaluation: Record) -> str:
    """Return all pass@k of an evaluation on one line."""
    parts = [f"pass@{k} {_interval(estimate)}" for k, estimate in evaluation["pass_at"].items()]
    return f"{', '.join(parts)} ({evaluation['num_prompts']} prompts x {evaluation['num_samples']} samples)"


def _at(by_number: Any, n: int) -> float:
    """Look up a number of rollouts, which is a number in memory and text in a file."""
    return float(by_number[n] if n in by_number else by_number[str(n)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{max(value, 0.0):.1%}"  # an estimate may come out below 0


def _interval(estimate: Record) -> str:
    return escape(f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]")
