"""The tool calls of rollouts: turn the `tools` section of the metrics into text for tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from brorl.format import counted
from brorl.runs.step_record import StepRecord, ToolUse


def total_tool_use(records: Sequence[StepRecord]) -> ToolUse | None:
    """Return the totals over a run's steps; None without tools."""
    steps = [(record.tools, record.sampling.samples if record.sampling else 0) for record in records if record.tools]
    if not steps:
        return None
    rollouts = sum(samples for _, samples in steps)
    failures = Counter[str]()
    for use, _ in steps:
        failures.update(use.failures)
    return ToolUse(
        turns=sum(use.turns * samples for use, samples in steps) / rollouts if rollouts else 1.0,
        calls=sum(use.calls for use, _ in steps),
        distinct_calls=sum(use.distinct_calls for use, _ in steps),
        given_tokens=sum(use.given_tokens for use, _ in steps),
        failures=failures,
    )


def sharing(use: ToolUse) -> str:
    """Return the number of distinct calls and how many rollouts share one, on average: `15 distinct: 13.1x fewer`."""
    fewer = f": {use.calls / use.distinct_calls:.1f}x fewer" if use.distinct_calls else ""
    return f"{use.distinct_calls:,} distinct{fewer}"


def failed_calls(use: ToolUse) -> str:
    """Return the failed calls by kind, the most frequent kind first: `raised 7, timeout 5`."""
    by_count = sorted(use.failures.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {count:,}" for kind, count in by_count)


def tool_use_line(use: ToolUse) -> str:
    """Return turns, calls, given tokens and failures on one line."""
    parts = [f"{use.turns:.2f} turns per rollout", counted(use.calls, "call")]
    if use.calls:
        parts[1] += f", {sharing(use)}"
        parts.append(f"{counted(use.given_tokens, 'token')} given")
    if use.failures:
        parts.append(f"{counted(sum(use.failures.values()), 'call')} failed: {failed_calls(use)}")
    return "; ".join(parts)
