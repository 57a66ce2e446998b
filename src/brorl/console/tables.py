"""The tables (at most 80 columns) and lines shown at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from brorl.console.screen import STAGE_NAMES
from brorl.format import interval
from brorl.reporting.tool_use import failed_calls, sharing, total_tool_use
from brorl.runs.step_record import EvaluationRecord, PooledCoverage, StepRecord, total_cost
from brorl.table import Table

_LAST_STEPS = 25


def result_tables(records: Sequence[StepRecord]) -> list[Table]:
    """Make a run's tables, leaving out empty ones."""
    return [table for table in (outcome_table(records), coverage_table(records), cost_table(records)) if table.rows]


def outcome_table(records: Sequence[StepRecord]) -> Table:
    """Return the held-out results before and after training, with 95% intervals; empty without two evaluations."""
    evaluations = [record.evaluation for record in records if record.evaluation]
    rows = []
    columns = ["", "before", "after", "change"]
    notes = ["pass@k: probability that one of k responses is correct [95% interval]"]
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        evaluated = max(record.step for record in records if record.evaluation)
        if evaluated < (done := max(record.step for record in records)):
            columns[2] = f"after step {evaluated}"
            notes.append(f"step {evaluated} of {done} is the last one with an evaluation")
        compared = [(f"pass@{k}", before, last.pass_at[k]) for k, before in first.pass_at.items()]
        for source, before_at in first.by_source.items():
            ks = dict.fromkeys((min(before_at), max(before_at)))
            if source in last.by_source:  # absent if too few of the source's responses were verified
                compared += [(f"  {source} pass@{k}", before_at[k], last.by_source[source][k]) for k in ks]
        averages = [record.ema_evaluation.pass_at for record in records if record.ema_evaluation]
        for k, after in averages[-1].items() if averages else ():
            compared.append((f"  averaged weights pass@{k}", first.pass_at[k], after))
        rows = [
            (name, interval(before), interval(after), f"{after.value - before.value:+.3f}")
            for name, before, after in compared
        ]
        solved = f"{last.solved - first.solved:+d}"
        rows.append((f"solved of {last.num_prompts}", str(first.solved), str(last.solved), solved))
    return Table("Held-out prompts", tuple(columns), tuple(rows), tuple(notes))


def coverage_table(records: Sequence[StepRecord]) -> Table:
    """Return a table that estimates the mixed fraction and the coverage at other N from the run's last rollouts.

    The table is empty if no step has an estimate.
    """
    steps = [(r.sampling.groups, r.coverage.pooled) for r in records if r.sampling and r.coverage][-_LAST_STEPS:]
    title = f"Other numbers of rollouts per prompt (last {len(steps)} steps)"
    own, by_n = _coverage_by_n(steps)
    if not by_n:
        return Table(title, ("N =",), ())
    rows = [("mixed groups", *("-" if mixed is None else _percent(mixed) for mixed, _ in by_n.values()))]
    notes = ["mixed groups: groups with correct and incorrect rollouts"]
    if max(by_n) > own:
        notes[0] += f"; -: not known beyond the {own} rollouts per prompt of the run"
    sampled = [fraction for _, fraction in by_n.values() if fraction is not None]
    if sampled:
        rows.append(("correct responses sampled", *map(_percent, sampled)))
        notes.append("correct responses are weighted by their probability")
        if max(by_n) > own:
            notes.append(f"* estimated from the same {own} rollouts per prompt")
    elif any(pooled.unsampled_correct_at for _, pooled in steps):
        notes.append("no correct response was sampled in these steps")
    else:
        notes.append("all responses were unique; the fraction of unsampled responses cannot be estimated")
    return Table(title, ("N =", *(f"{n}*" if n > own else str(n) for n in by_n)), tuple(rows), tuple(notes))


def _coverage_by_n(
    steps: Sequence[tuple[int, PooledCoverage]],
) -> tuple[int, dict[int, tuple[float | None, float | None]]]:
    """Return the run's N, and N -> (fraction of mixed groups, fraction of the correct mass that is sampled).

    `steps` has (groups, pooled coverage) pairs. Mixed fractions are None above the run's N. Sampled fractions are None
    if no step has an estimate. The dictionary is empty if no step has a mixed fraction.
    """
    mixed_steps = [(groups, pooled.mixed_fraction_at) for groups, pooled in steps if pooled.mixed_fraction_at]
    if not mixed_steps:
        return 0, {}
    sampled_steps = [(p.q_pos, p.unsampled_correct_at) for _, p in steps if p.unsampled_correct_at and p.q_pos]
    last_mixed_at = mixed_steps[-1][1]
    own = max(last_mixed_at)
    known = {*last_mixed_at, *(n for _, unsampled_at in sampled_steps for n in unsampled_at)}
    num_groups = sum(groups for groups, _ in mixed_steps)
    correct_mass = sum(q_pos for q_pos, _ in sampled_steps)
    by_n = {}
    for n in sorted(known & {16, 64, 256, own, 4 * own}):
        mixed = sum(groups * mixed_at[n] for groups, mixed_at in mixed_steps) / num_groups if n <= own else None
        unsampled = sum(unsampled_at[n] for _, unsampled_at in sampled_steps)
        by_n[n] = mixed, 1 - unsampled / correct_mass if sampled_steps else None
    return own, by_n


def _num_updates(records: Sequence[StepRecord]) -> int:
    """Count the steps that made an update; a step without mixed groups makes none."""
    return sum(record.update is not None for record in records)


def cost_table(records: Sequence[StepRecord]) -> Table:
    """Return a table of samples, tokens saved by the tree, and seconds per stage; empty without a step."""
    steps = [record.sampling for record in records if record.sampling]
    if not steps:
        return Table("Cost", ("", "", ""), ())
    cost = total_cost(records)
    distinct = sum(step.distinct_responses for step in steps)
    learned = sum(record.kept.groups for record in records if record.kept)
    rows = [
        ("steps", f"{cost.steps:,}", f"{learned:,} groups in updates, {sum(s.groups for s in steps):,} sampled"),
        ("rollouts", f"{cost.samples:,}", f"{distinct:,} verified: {cost.samples / distinct:.1f}x fewer"),
        (
            "tokens",
            f"{cost.sampled_tokens:,}",
            f"{cost.unique_tokens:,} computed: {cost.sampled_tokens / cost.unique_tokens:.1f}x fewer",
        ),
    ]
    if (use := total_tool_use(records)) is not None:
        rows[-1] = (*rows[-1][:2], f"{rows[-1][2]}; {use.given_tokens:,} given")
        rows.append(("calls", f"{use.calls:,}", f"{sharing(use)}; {use.turns:.2f} turns per rollout"))
        if use.failures:
            rows.append(("failed", f"{sum(use.failures.values()):,}", f"calls: {failed_calls(use)}"))
    if dropped := sum(step.samples_dropped for step in steps):
        tokens = sum(step.unique_tokens_dropped for step in steps)
        share = f"{dropped / cost.samples:.0%}, {tokens:,} tokens computed"
        rows.append(("dropped", f"{dropped:,}", f"rollouts of groups that were not kept: {share}"))
    timeouts = sum(step.verifier_timeouts for step in steps)
    failures = sum(step.verifier_failures for step in steps)
    if timeouts or failures:
        lost = f"without a verdict: {timeouts:,} timed out, {failures:,} failed"
        rows.append(("verifications", f"{timeouts + failures:,}", lost))
    if unverified := sum(step.samples_unverified or 0 for step in steps):
        lost = f"rollouts, infrastructure failures: {unverified / cost.samples:.1%}"
        rows.append(("unverified", f"{unverified:,}", lost))
    times = [record.seconds for record in records if record.sampling and record.seconds]
    stages = (f"{word} {sum(getattr(t, name) or 0.0 for t in times):.1f}" for name, word in STAGE_NAMES.items())
    rows.append(("seconds", f"{cost.seconds:.1f}", ", ".join(stages)))
    return Table("Cost", ("", "", ""), tuple(rows), words=frozenset({0, 2}))


def held_out_check_lines(records: Sequence[StepRecord]) -> list[str]:
    """Return a line on how the checked updates changed the probability of correct responses, if any were checked."""
    checks = [check for record in records if (check := record.held_out_check) and check.change is not None]
    if not checks:
        return []
    checked = f"{len(checks)} of {_num_updates(records)} updates"
    change = fmean(check.change or 0.0 for check in checks)
    half_widths = [(check.change_high or 0.0) - (check.change or 0.0) for check in checks]
    half = sqrt(sum(width**2 for width in half_widths)) / len(checks)
    line = (
        f"held-out check of {checked}: one update changed the probability of a correct response "
        f"by {change:+.4f} [{change - half:+.4f}, {change + half:+.4f}]"
    )
    if correct := sum(check.num_correct for check in checks):
        risen = sum((check.fraction_improved or 0.0) * check.num_correct for check in checks)
        drop = min(check.worst_drop or 0.0 for check in checks)
        largest = f"the largest drop of one response was {-drop:.2g}" if drop < 0 else "no sampled response dropped"
        line += f"; {risen / correct:.0%} of the correct mass rose; {largest}"
    return [line]


def pass_at_line(evaluation: EvaluationRecord) -> str:
    """Return every pass@k of an evaluation on one line."""
    parts = [f"pass@{k} {interval(estimate)}" for k, estimate in evaluation.pass_at.items()]
    return f"{', '.join(parts)} ({evaluation.num_prompts} prompts x {evaluation.num_samples} samples)"


def _percent(value: float) -> str:
    return f"{max(value, 0.0):.1%}"  # an estimate may be below 0
