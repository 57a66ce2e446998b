"""What stands above the charts of several runs: a row of numbers for each; and of every run, what was unusual.

In: runs. Out: text and numbers, no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from brorl.cost import total_cost
from brorl.runs.run_record import Record, RunRecord, number

HEADINGS = (
    "run", "steps", "prompts x N", "held-out pass@1", "at the largest k", "rollouts", "dropped", "tokens sampled",
    "computed", "time",
)  # fmt: skip


@dataclass(frozen=True)
class Dropped:
    """What dynamic sampling dropped: rollouts of groups with one outcome, in the steps whose metrics count them.

    Attributes:
        samples: Rollouts dropped.
        all_samples: Rollouts sampled in these steps.
        unique_tokens: Tokens computed for the dropped ones.
        all_unique_tokens: Tokens computed in these steps.
    """

    samples: int
    all_samples: int
    unique_tokens: int
    all_unique_tokens: int


def summary_row(run: RunRecord) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `HEADINGS`."""
    cost, lost = total_cost(run.records), dropped(run)
    return (
        run.name,
        steps_done(run),
        batch(run),
        _before_after(run, min),
        _before_after(run, max),
        f"{cost.samples:,}",
        f"{lost.samples:,} ({share(lost.samples, lost.all_samples)})" if lost else "not counted",
        f"{cost.sampled_tokens:,}",
        share(cost.unique_tokens, cost.sampled_tokens),
        duration(cost.seconds),
    )


def notes(run: RunRecord) -> list[str]:
    """Return what was unusual in a run, a sentence each."""
    said = [f"Sign of collapse at {r['collapse']}" for r in run.records if "collapse" in r]
    said += [_ended(run, r) for r in run.records if "ended" in r]
    resets = [r["step"] for r in run.records if "reference_reset" in r]
    if resets:
        times = "once" if len(resets) == 1 else f"{len(resets)} times"
        said.append(f"The reference policy was reset {times}, after {_listed(resets)}.")
    for what, name in (("timed out", "verifier_timeouts"), ("failed", "verifier_failures")):
        lost = int(sum(number(r, "sampling", name) or 0 for r in run.steps))
        while_evaluating = int(sum(number(r, "evaluation", name) or 0 for r in run.evaluations))
        if lost or while_evaluating:
            said.append(
                f"{lost:,} verifications of training and {while_evaluating:,} of evaluation {what}; they count as "
                "incorrect."
            )
    retries = int(sum(number(r, "update", "out_of_memory_retries") or 0 for r in run.steps))
    if retries:
        said.append(f"Memory ran out {retries} times; smaller passes with the same gradients followed.")
    return said + _coverage_note(run)


def dropped(run: RunRecord) -> Dropped | None:
    """Return what dynamic sampling dropped over the run; None if its metrics do not count it."""
    names = ("samples_dropped", "samples", "unique_tokens_dropped", "unique_tokens")
    rows = [[number(r, "sampling", name) for name in names] for r in run.steps]
    known = [[int(value) for value in row if value is not None] for row in rows if None not in row]
    return Dropped(*map(sum, zip(*known, strict=True))) if known else None


def share(part: float, whole: float) -> str:
    """Return a share in percent; a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "–"  # noqa: RUF001


def spread(low: float, high: float) -> str:
    """Return an interval, with a space that does not break."""
    return f"[{low:.3f},\u00a0{high:.3f}]"


def duration(seconds: float) -> str:
    """Return seconds as `45 s`, `3 min 05 s` or `2 h 07 min`, with spaces that do not break."""
    whole = round(seconds)
    if whole < 60:
        text = f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    elif whole < 3600:
        text = f"{whole // 60} min {whole % 60:02d} s"
    else:
        text = f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return text.replace(" ", "\u00a0")


def steps_done(run: RunRecord) -> str:
    """Return how many steps a run has made, and of how many or of which budget."""
    last, planned = (run.updates or run.records[:1])[-1]["step"], run.settings.get("steps")
    limit = run.settings.get("budget.limit")
    if limit not in (None, "null"):
        return f"{last:,}, budget {float(limit):,.6g} {run.settings.get('budget.unit', '').replace('_', ' ')}"
    return f"{last:,}" if planned in (None, str(last)) else f"{last:,} of {planned}"


def batch(run: RunRecord) -> str:
    """Return prompts of a step times rollouts of a prompt."""
    prompts, rollouts = (run.settings.get(n) for n in ("prompts_per_step", "rollouts_per_prompt"))
    adaptive = any(r["sampling"].get("adaptive") for r in run.steps)
    return f"{prompts or '?'} x {'adaptive' if adaptive else rollouts or '?'}"


def _before_after(run: RunRecord, which: Any) -> str:
    """Return pass@k of the smallest or largest k at the first and the last evaluation."""
    ends = _ends(run, which)
    if not ends:
        return "not evaluated"
    k, first, last = ends
    label = "" if which is min else f"pass@{k}:\u00a0"
    return f"{label}{_interval(first)} → {_interval(last)}" if first is not last else label + _interval(first)


def _ends(run: RunRecord, which: Any) -> tuple[int, Record, Record] | None:
    estimates = [r["evaluation"]["pass_at"] for r in run.evaluations]
    if not estimates:
        return None
    k = which(estimates[0], key=int)
    first, last = estimates[0], estimates[-1]
    return (int(k), first[k], last[k]) if k in last else None


def _coverage_note(run: RunRecord) -> list[str]:
    ends = _ends(run, max)
    if not ends or ends[0] == 1 or ends[2]["high"] >= ends[1]["low"]:
        return []
    k, before, after = ends
    return [
        f"Coverage fell: held-out pass@{k} went from {before['value']:.3f} to {after['value']:.3f}, beyond the "
        "intervals. A lower optimizer.learning_rate or fewer steps keep more of it."
    ]


def _interval(estimate: Record) -> str:
    # Spaces that do not break, so that a narrow table breaks at the arrow.
    return f"{estimate['value']:.3f}\u00a0{spread(estimate['low'], estimate['high'])}"


def _ended(run: RunRecord, record: Record) -> str:
    """Return why a run ended early; one that has later lines was resumed."""
    when = "after" if "update" in record else "at"
    resumed = "" if record is run.records[-1] else " and was resumed later"
    return f"The run ended early {when} step {record['step']}{resumed}: {record['ended']}"


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in (steps if len(steps) <= 8 else [*steps[:3], "...", *steps[-3:]])]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"
