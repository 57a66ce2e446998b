"""The tables (at most 80 columns) and lines at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from brorl.console.screen import PHASE_NAMES
from brorl.format import Estimate, interval
from brorl.reporting.tool_use import ToolUse
from brorl.runs.run_directory import Record, total
from brorl.table import Table

_LAST_STEPS = 25


def result_tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of a run, leaving out empty ones."""
    return [table for table in (outcome_table(records), coverage_table(records), cost_table(records)) if table.rows]


def outcome_table(records: Sequence[Record]) -> Table:
    """Return the held-out results before and after training, with 95% intervals; no rows without two evaluations."""
    evaluations, rows = _evaluations(records), []
    columns, notes = (
        ["", "before", "after", "change"],
        ["pass@k: probability that one of k responses is correct [95% interval]"],
    )
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        evaluated = max(r["step"] for r in records if "evaluation" in r)
        if evaluated < (done := max(r["step"] for r in records)):
            columns[2] = f"after step {evaluated}"
            notes.append(f"step {evaluated} of {done} is the last one with an evaluation")
        compared = [(f"pass@{k}", before, last["pass_at"][k]) for k, before in first["pass_at"].items()]
        for source, before_at in first["by_source"].items():
            ks = dict.fromkeys((min(before_at, key=int), max(before_at, key=int)))
            if source in last["by_source"]:  # missing if too few of the source's responses were verified
                compared += [(f"  {source} pass@{k}", before_at[k], last["by_source"][source][k]) for k in ks]
        averages = [r["ema_evaluation"]["pass_at"] for r in records if "ema_evaluation" in r]
        for k, after in averages[-1].items() if averages else ():
            compared.append((f"  averaged weights pass@{k}", first["pass_at"][k], after))
        rows = [
            (
                name,
                interval(Estimate(**before)),
                interval(Estimate(**after)),
                f"{after['value'] - before['value']:+.3f}",
            )
            for name, before, after in compared
        ]
        solved = f"{last['solved'] - first['solved']:+d}"
        rows.append((f"solved of {last['num_prompts']}", str(first["solved"]), str(last["solved"]), solved))
    return Table("Held-out prompts", tuple(columns), tuple(rows), tuple(notes))


def coverage_table(records: Sequence[Record]) -> Table:
    """Return a table that estimates, from the run's last rollouts, the mixed fraction and the coverage at other N.

    The table has no rows if no step has an estimate.
    """
    steps = [r for r in records if "coverage" in r][-_LAST_STEPS:]
    pooled = [r["coverage"]["pooled"] for r in steps]
    title = f"Other numbers of rollouts per prompt (last {len(steps)} steps)"
    mixed = [
        (r["sampling"]["groups"], p["informative_fraction_at"])
        for r, p in zip(steps, pooled, strict=True)
        if p["informative_fraction_at"]
    ]
    if not mixed:
        return Table(title, ("N =",), ())
    covered = [p for p in pooled if p["unsampled_correct_at"] and p["q_pos"] > 0]
    own = max(int(n) for n in mixed[-1][1])
    known = {int(n) for at in (mixed[-1][1], *(p["unsampled_correct_at"] for p in covered)) for n in at}
    numbers = sorted(known & {16, 64, 256, own, 4 * own})
    groups = sum(size for size, _ in mixed)
    fractions = [sum(size * at[str(n)] for size, at in mixed) / groups if n <= own else None for n in numbers]
    rows = [("mixed groups", *("-" if fraction is None else _percent(fraction) for fraction in fractions))]
    notes = ["mixed groups: groups with correct and incorrect rollouts"]
    if None in fractions:
        notes[0] += f"; -: not known beyond the {own} rollouts per prompt of the run"
    if covered:
        mass = sum(p["q_pos"] for p in covered)
        unsampled = [sum(p["unsampled_correct_at"][str(n)] for p in covered) for n in numbers]
        rows.append(("correct responses sampled", *(_percent(1 - missed / mass) for missed in unsampled)))
        notes.append("correct responses are weighted by their probability")
        if numbers[-1] > own:
            notes.append(f"* estimated from the same {own} rollouts per prompt")
    elif any(p["unsampled_correct_at"] for p in pooled):
        notes.append("no correct response was sampled in these steps")
    else:
        notes.append("all responses were unique; the fraction of unsampled responses cannot be estimated")
    return Table(title, ("N =", *(f"{n}*" if n > own else str(n) for n in numbers)), tuple(rows), tuple(notes))


def _num_updates(records: Sequence[Record]) -> int:
    """Count the steps with an update; an attempt without a mixed group makes none."""
    return sum("update" in record for record in records)


def cost_table(records: Sequence[Record]) -> Table:
    """Return a table of samples, tokens saved by the tree, and seconds per phase; no rows without a step."""
    steps = [r for r in records if "sampling" in r]
    if not steps:
        return Table("Cost", ("", "", ""), ())

    def sampling(name: str) -> float:
        return total(steps, "sampling", name)

    samples, tokens = sampling("samples"), sampling("sampled_tokens")
    distinct, unique = sampling("distinct_responses"), sampling("unique_tokens")
    kept = f"{total(steps, 'kept', 'groups'):,.0f} groups in updates, {sampling('groups'):,.0f} sampled"
    rows = [
        ("steps", f"{_num_updates(records):,}", kept),
        ("rollouts", f"{samples:,.0f}", f"{distinct:,.0f} verified: {samples / distinct:.1f}x fewer"),
        ("tokens", f"{tokens:,.0f}", f"{unique:,.0f} computed: {tokens / unique:.1f}x fewer"),
    ]
    if (use := ToolUse.of(steps)) is not None:
        rows[-1] = ("tokens", f"{tokens:,.0f}", f"{rows[-1][2]}; {use.given_tokens:,} given")
        rows.append(("calls", f"{use.calls:,}", f"{use.sharing}; {use.turns:.2f} turns per rollout"))
        if use.failures:
            rows.append(("failed", f"{sum(use.failures.values()):,}", f"calls: {use.failed}"))
    if dropped := sampling("samples_dropped"):
        computed = f"{dropped / samples:.0%}, {sampling('unique_tokens_dropped'):,.0f} tokens computed"
        rows.append(("dropped", f"{dropped:,.0f}", f"rollouts of groups that were not mixed: {computed}"))
    timeouts, failures = sampling("verifier_timeouts"), sampling("verifier_failures")
    if timeouts or failures:
        lost = f"without a verdict: {timeouts:,.0f} timed out, {failures:,.0f} failed"
        rows.append(("verifications", f"{timeouts + failures:,.0f}", lost))
    if unverified := sampling("samples_unverified"):
        lost = f"rollouts, infrastructure failures: {unverified / samples:.1%}"
        rows.append(("unverified", f"{unverified:,.0f}", lost))
    phases = ", ".join(f"{name} {total(steps, 'seconds', phase):.1f}" for phase, name in PHASE_NAMES.items())
    rows.append(("seconds", f"{total(steps, 'seconds', 'total'):.1f}", phases))
    return Table("Cost", ("", "", ""), tuple(rows), words=frozenset({0, 2}))


def held_out_check_lines(records: Sequence[Record]) -> list[str]:
    """Return a line on how the checked updates changed the probability of correct responses, if any was checked."""
    checks = [r["held_out_check"] for r in records if r.get("held_out_check", {}).get("change") is not None]
    if not checks:
        return []
    number = f"{len(checks)} of {_num_updates(records)} updates"
    change = fmean(c["change"] for c in checks)
    half = sqrt(sum((c["change_high"] - c["change"]) ** 2 for c in checks)) / len(checks)
    line = (
        f"held-out check of {number}: one update changed the probability of a correct response "
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


def pass_at_line(evaluation: Record) -> str:
    """Return all pass@k of an evaluation on one line."""
    parts = [f"pass@{k} {interval(Estimate(**estimate))}" for k, estimate in evaluation["pass_at"].items()]
    return f"{', '.join(parts)} ({evaluation['num_prompts']} prompts x {evaluation['num_samples']} samples)"


def _evaluations(records: Sequence[Record]) -> list[Record]:
    return [r["evaluation"] for r in records if "evaluation" in r]


def _percent(value: float) -> str:
    return f"{max(value, 0.0):.1%}"  # an estimate may be below 0
