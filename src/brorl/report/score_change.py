"""How the held-out scores of one run changed from its first to its last evaluation.

In: a run. Out: for each k the two scores and their difference, with what it shows. Both evaluations ask the same
prompts, so the difference has an interval over prompts of its own, which is narrower than those of the two scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from brorl.comparison.paired import Conclusion, conclusion_of, difference_interval
from brorl.evaluation.pass_at_k import Estimate, pass_at_k
from brorl.runs.run_record import Record, RunRecord

Direction = Literal["rose", "fell", "unclear"]
_DIRECTIONS: dict[Conclusion, Direction] = {"B leads": "rose", "A leads": "fell", "no difference shown": "unclear"}


@dataclass(frozen=True)
class ScoreChange:
    """pass@k at the first and at the last evaluation of a run.

    Attributes:
        k: Attempts.
        before: Score of the first evaluation, with its 95% interval.
        after: Score of the last.
        difference: After less before, with a 95% interval over prompts; None where the metrics hold no counts of
            prompts.
        direction: What is shown. It rose or fell if the interval of the difference excludes 0, or, without one, if the
            intervals of the two scores do not overlap.
    """

    k: int
    before: Estimate
    after: Estimate
    difference: Estimate | None
    direction: Direction


def score_changes(run: RunRecord) -> list[ScoreChange]:
    """Return how each pass@k that both evaluations have changed, k ascending; nothing without two evaluations."""
    if len(run.evaluations) < 2:
        return []
    first, last = (run.evaluations[place]["evaluation"] for place in (0, -1))
    ks = sorted(int(k) for k in first["pass_at"].keys() & last["pass_at"].keys())
    return [_change(first, last, k) for k in ks]


def best_evaluation(run: RunRecord) -> Record | None:
    """Return the line of the best evaluation after an update, by the smallest k, the earliest of equals."""
    trained = [r for r in run.evaluations if r["step"] > 0]
    return max(trained, key=smallest_k_score, default=None)


def smallest_k_score(record: Record) -> float:
    """Return what evaluations are compared by: pass@k of the smallest k, mostly 1."""
    estimates = record["evaluation"]["pass_at"]
    return float(estimates[min(estimates, key=int)]["value"])


def num_correct(evaluation: Record) -> Sequence[int]:
    """Return how many responses to each prompt were correct; empty where the metrics do not hold it."""
    counts: Sequence[int] = (evaluation.get("prompts") or {}).get("num_correct") or ()
    return counts


def _change(first: Record, last: Record, k: int) -> ScoreChange:
    before, after = (
        Estimate(**{name: e["pass_at"][str(k)][name] for name in ("value", "low", "high")}) for e in (first, last)
    )
    difference = _difference(first, last, k)
    shown = conclusion_of(
        difference or Estimate(after.value - before.value, after.low - before.high, after.high - before.low)
    )
    return ScoreChange(k, before, after, difference, _DIRECTIONS[shown])


def _difference(first: Record, last: Record, k: int) -> Estimate | None:
    counts = num_correct(first), num_correct(last)
    if not counts[0] or len(counts[0]) != len(counts[1]):
        return None
    a, b = (pass_at_k(c, e["num_samples"], k)[None] for c, e in zip(counts, (first, last), strict=True))
    return difference_interval(a, b, seeds_paired=True)
