"""The tables and sentences at the end of a run.

In: lines of the metrics. Out: rich tables that fit 80 columns, and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from brorl.runs.run_directory import Record

_PHASES = {  # as they are named in the metrics, and for people
    "generation": "sampling",
    "verification": "verifying",
    "training": "learning",
    "diagnostics": "measuring",
    "storing": "saving",
}
_LAST_STEPS = 25


def result_tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of a run, less those without rows."""
    tables = (outcome_table(records), coverage_table(records), cost_table(records))
    return [table for table in tables if table.row_count]


def outcome_table(records: Sequence[Record]) -> Table:
    """Make the table of held-out results before and after, with 95% intervals over prompts."""
    table = _table("On prompts held out from training")
    table.caption = escape("pass@k: chance that one of k attempts is correct [95% interval]")
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
    table = _table(f"What N rollouts per prompt bought (last {len(steps)} steps)")
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
    table.add_row("groups with both outcomes", *(_percent(value) for value in shares))
    notes = ["only groups with both outcomes (correct and incorrect) teach"]
    if seen:
        mass = sum(p["q_pos"] for p in seen)
        rows = [1 - sum(_at(p["unsampled_correct_at"], n) for p in seen) / mass for n in columns]
        table.add_row("correct responses seen", *(_percent(value) for value in rows))
        notes.append("correct responses count by their probability")
        if columns[-1] > own:
            notes.append(f"* estimated from the same {own} rollouts of each prompt")
    elif any(p["unsampled_correct_at"] for p in pooled):
        notes.append("no correct response was sampled in these steps")
    else:
        notes.append("every response was unique, so these rollouts cannot tell what was not sampled")
    table.caption = "\n".join(notes)
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
    table = _table("What it cost", has_header=False)
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
    phases = ", ".join(f"{word} {total('seconds', phase):.1f}" for phase, word in _PHASES.items())
    table.add_row("steps", f"{len(steps):,}", f"learned from {kept:,.0f} groups; {groups:,.0f} were sampled")
    table.add_row("rollouts", f"{samples:,.0f}", f"{distinct:,.0f} verified: {samples / distinct:.1f}x fewer")
    table.add_row("tokens", f"{sampled:,.0f}", f"{unique:,.0f} computed: {sampled / unique:.1f}x fewer")
    dropped, dropped_tokens = total("sampling", "samples_dropped"), total("sampling", "unique_tokens_dropped")
    if dropped:
        what = f"in groups with one outcome ({dropped / samples:.0%}); {dropped_tokens:,.0f} tokens computed"
        table.add_row("thrown away", f"{dropped:,.0f}", what)
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


def _table(title: str, has_header: bool = True) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD if has_header else box.SIMPLE,
        show_header=has_header,
    )


def _at(by_number: Any, n: int) -> float:
    """Look up a number of rollouts, which is a number in memory and text in a file."""
    return float(by_number[n] if n in by_number else by_number[str(n)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{max(value, 0.0):.1%}"  # an estimate may come out below 0


def _interval(estimate: Record) -> str:
    return escape(f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]")
