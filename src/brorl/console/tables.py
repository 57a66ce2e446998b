"""The tables and lines at the end of a run.

In: lines of the metrics. Out: rich tables of at most 80 columns, and lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from brorl.console.status_line import PHASE_NAMES
from brorl.runs.run_directory import Record

_LAST_STEPS = 25


def result_tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of a run, less those without rows."""
    tables = (outcome_table(records), coverage_table(records), cost_table(records))
    return [table for table in tables if table.row_count]


def outcome_table(records: Sequence[Record]) -> Table:
    """Return the held-out results before and after training, with 95% intervals; no rows without two evaluations."""
    table = _table("Held-out prompts")
    table.caption = escape("pass@k: probability that one of k responses is correct [95% interval]")
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    evaluations = _evaluations(records)
    if len(evaluations) < 2:
        return table
    first, last = evaluations[0], evaluations[-1]
    evaluated = max(r["step"] for r in records if "evaluation" in r)
    if evaluated < (done := max(r["step"] for r in records)):
        table.columns[2].header = f"after step {evaluated}"
        table.caption = f"{table.caption}\nstep {evaluated} of {done} is the last one with an evaluation"

    def add(name: str, before: Record, after: Record) -> None:
        table.add_row(name, _interval(before), _interval(after), f"{after['value'] - before['value']:+.3f}")

    for k, before in first["pass_at"].items():
        add(f"pass@{k}", before, last["pass_at"][k])
    for source, before_at in first["by_source"].items():
        for k in dict.fromkeys((min(before_at, key=int), max(before_at, key=int))):
            add(f"  {escape(source)} pass@{k}", before_at[k], last["by_source"][source][k])
    solved = f"{last['solved'] - first['solved']:+d}"
    table.add_row(f"solved of {last['num_prompts']}", str(first["solved"]), str(last["solved"]), solved)
    return table


def coverage_table(records: Sequence[Record]) -> Table:
    """Return the mixed fraction and the coverage of the last steps at other N, from the rollouts of the run.

    The table has no rows if no step has an estimate.
    """
    steps = [r for r in records if "coverage" in r][-_LAST_STEPS:]
    pooled = [r["coverage"]["pooled"] for r in steps]
    table = _table(f"Other numbers of rollouts per prompt (last {len(steps)} steps)")
    mixed = [
        (r["sampling"]["groups"], p["informative_fraction_at"])
        for r, p in zip(steps, pooled, strict=True)
        if p["informative_fraction_at"]
    ]
    if not mixed:
        return table
    covered = [p for p in pooled if p["unsampled_correct_at"] and p["q_pos"] > 0]
    own = max(int(n) for n in mixed[-1][1])
    known = {int(n) for at in (mixed[-1][1], *(p["unsampled_correct_at"] for p in covered)) for n in at}
    columns = sorted(known & {16, 64, 256, own, 4 * own})
    table.add_column("N =")
    for n in columns:
        table.add_column(f"{n}*" if n > own else str(n), justify="right", style="bold" if n == own else None)
    groups = sum(size for size, _ in mixed)
    fractions = [sum(size * _at(at, n) for size, at in mixed) / groups for n in columns if n <= own]
    table.add_row("mixed groups", *map(_percent, fractions))
    notes = ["mixed groups: groups with correct and incorrect rollouts"]
    if covered:
        mass = sum(p["q_pos"] for p in covered)
        unsampled = [sum(_at(p["unsampled_correct_at"], n) for p in covered) for n in columns]
        table.add_row("correct responses sampled", *(_percent(1 - one / mass) for one in unsampled))
        notes.append("correct responses are weighted by their probability")
        if columns[-1] > own:
            notes.append(f"* estimated from the same {own} rollouts per prompt")
    elif any(p["unsampled_correct_at"] for p in pooled):
        notes.append("no correct response was sampled in these steps")
    else:
        notes.append("all responses were unique; the fraction of unsampled responses cannot be estimated")
    table.caption = "\n".join(notes)
    return table


def cost_table(records: Sequence[Record]) -> Table:
    """Return the number of samples, the savings of the tree, and the seconds per phase; no rows without a step."""
    table = _table("Cost", has_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    steps = [r for r in records if "sampling" in r]
    if not steps:
        return table

    def total(section: str, name: str) -> float:
        return float(sum(r[section].get(name, 0) for r in steps))

    def sampling(name: str) -> float:
        return total("sampling", name)

    samples, tokens = sampling("samples"), sampling("sampled_tokens")
    distinct, unique = sampling("distinct_responses"), sampling("unique_tokens")
    kept = f"{total('kept', 'groups'):,.0f} groups in updates, {sampling('groups'):,.0f} sampled"
    table.add_row("steps", f"{len(steps):,}", kept)
    table.add_row("rollouts", f"{samples:,.0f}", f"{distinct:,.0f} verified: {samples / distinct:.1f}x fewer")
    table.add_row("tokens", f"{tokens:,.0f}", f"{unique:,.0f} computed: {tokens / unique:.1f}x fewer")
    dropped = sampling("samples_dropped")
    if dropped:
        computed = f"{dropped / samples:.0%}, {sampling('unique_tokens_dropped'):,.0f} tokens computed"
        table.add_row("dropped", f"{dropped:,.0f}", f"rollouts of groups that were not mixed: {computed}")
    timeouts, failures = sampling("verifier_timeouts"), sampling("verifier_failures")
    if timeouts or failures:
        lost = f"without a verdict: {timeouts:,.0f} timed out, {failures:,.0f} failed"
        table.add_row("verifications", f"{timeouts + failures:,.0f}", lost)
    if unverified := sampling("samples_unverified"):
        lost = f"rollouts, because of the machine: {unverified / samples:.1%}"
        table.add_row("unverified", f"{unverified:,.0f}", lost)
    phases = ", ".join(f"{name} {total('seconds', phase):.1f}" for phase, name in PHASE_NAMES.items())
    table.add_row("seconds", f"{total('seconds', 'total'):.1f}", phases)
    return table


def held_out_check_lines(records: Sequence[Record]) -> list[str]:
    """Return the mean effect of the checked updates on the probability of correct responses; no line without one."""
    checks = [r["held_out_check"] for r in records if r.get("held_out_check", {}).get("change") is not None]
    if not checks:
        return []
    steps = sum("sampling" in r for r in records)
    change = fmean(c["change"] for c in checks)
    half = sqrt(sum((c["change_high"] - c["change"]) ** 2 for c in checks)) / len(checks)
    line = (
        f"held-out check of {len(checks)} of {steps} updates: one update changed the probability of a correct response "
        f"by {change:+.4f} [{change - half:+.4f}, {change + half:+.4f}]"
    )
    with_correct = [c for c in checks if c["num_correct"]]
    if with_correct:
        correct = sum(c["num_correct"] for c in with_correct)
        risen = sum(c["fraction_improved"] * c["num_correct"] for c in with_correct)
        drop = min(c["worst_drop"] for c in with_correct)
        largest = f"the largest drop of one response was {-drop:.2g}" if drop < 0 else "no sampled response dropped"
        line += f"; {risen / correct:.0%} of the correct mass rose; {largest}"
    return [line]


def coverage_hints(records: Sequence[Record]) -> list[str]:
    """Return a line if coverage fell during training and the intervals before and after do not overlap."""
    evaluations = _evaluations(records)
    if len(evaluations) < 2:
        return []
    k = max(evaluations[0]["pass_at"], key=int)
    before, after = evaluations[0]["pass_at"][k], evaluations[-1]["pass_at"][k]
    if int(k) == 1 or after["high"] >= before["low"]:
        return []
    return [
        f"coverage fell: pass@{k} went from {before['value']:.3f} to {after['value']:.3f}; "
        "to keep more of it, lower optimizer.learning_rate, train for fewer steps, or count rare successes more "
        "(docs/how-to/broaden.md)"
    ]


def pass_at_line(evaluation: Record) -> str:
    """Return all pass@k of an evaluation on one line."""
    parts = [f"pass@{k} {_interval(estimate)}" for k, estimate in evaluation["pass_at"].items()]
    return f"{', '.join(parts)} ({evaluation['num_prompts']} prompts x {evaluation['num_samples']} samples)"


def _evaluations(records: Sequence[Record]) -> list[Record]:
    return [r["evaluation"] for r in records if "evaluation" in r]


def _table(title: str, has_header: bool = True) -> Table:
    style = box.SIMPLE_HEAD if has_header else box.SIMPLE
    return Table(title=title, title_justify="left", caption_justify="left", box=style, show_header=has_header)


def _at(by_number: Mapping[Any, float], n: int) -> float:
    """Return the value at N; the key is a number in memory and text in a file."""
    return float(by_number[n] if n in by_number else by_number[str(n)])


def _percent(value: float) -> str:
    return f"{max(value, 0.0):.1%}"  # an estimate may be below 0


def _interval(estimate: Record) -> str:
    return escape(f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]")
