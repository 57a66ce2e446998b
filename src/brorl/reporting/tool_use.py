"""What rollouts called, over some steps: from the section `tools` of the metrics into texts for tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brorl.format import counted
from brorl.runs.run_directory import Record, number, total


@dataclass(frozen=True)
class ToolUse:
    """The calls of some rollouts, and the tokens that results gave them; see docs/reference/metrics.md."""

    turns: float  # mean number of turns of a rollout
    calls: int
    distinct_calls: int
    given_tokens: int
    failures: Mapping[str, int]  # failed calls by kind

    @classmethod
    def of(cls, records: Sequence[Record]) -> ToolUse | None:
        """Return the sums over the steps of a run; None without tools."""
        steps = [record for record in records if "tools" in record]
        if not steps:
            return None
        rollouts, failures = [number(record, "sampling", "samples") or 0 for record in steps], Counter[str]()
        for record in steps:
            failures.update(record["tools"]["failures"])
        turns = sum(record["tools"]["turns"] * count for record, count in zip(steps, rollouts, strict=True))
        calls, distinct, given = (int(total(steps, "tools", n)) for n in ("calls", "distinct_calls", "given_tokens"))
        return cls(turns / sum(rollouts) if sum(rollouts) else 1.0, calls, distinct, given, failures)

    @property
    def sharing(self) -> str:
        """The distinct calls, and how many rollouts share one: `15 distinct: 13.1x fewer`."""
        fewer = f": {self.calls / self.distinct_calls:.1f}x fewer" if self.distinct_calls else ""
        return f"{self.distinct_calls:,} distinct{fewer}"

    @property
    def failed(self) -> str:
        """The failed calls by kind, the most frequent kind first: `raised 7, timeout 5`."""
        by_count = sorted(self.failures.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {count:,}" for kind, count in by_count)

    def __str__(self) -> str:
        parts = [f"{self.turns:.2f} turns per rollout", counted(self.calls, "call")]
        if self.calls:
            parts[1] += f", {self.sharing}"
            parts.append(f"{counted(self.given_tokens, 'token')} given")
        if self.failures:
            parts.append(f"{counted(sum(self.failures.values()), 'call')} failed: {self.failed}")
        return "; ".join(parts)
