"""The change of a run's held-out scores from its first to its last evaluation.

In: a run. Out: for each k the two scores and their difference with its direction. Both evaluations have the same
prompts, so the interval of the difference is narrower than those of the two scores.
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
        k: Number of attempts.
        before: Score of the first evaluation, with its 95% interval.
        after: Score of the last evaluation.
        difference: After minus before, with a 95% interval over prompts; None if the metrics hold no counts of prompts.
        direction: "rose" or "fell" if the interval of the difference excludes 0. Without a difference, if the intervals
            of the two scores do not overlap.
    """

    k: int
    before: Estimate
    after: Estimate
    difference: Estimate | None
    direction: Direction


def score_changes(run: RunRecord) -> list[ScoreChange]:
    """Return the change of each pass@k that both evaluations have, k ascending; nothing without two evaluations."""
    if len(run.evaluations) < 2:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    return [_change(first, last, k) for k in ks_of(first) if k in ks_of(last)]


def best_evaluation(run: RunRecord) -> Record | None:
    """Return the line of the best evaluation after an update, by the smallest k; the earliest of equal ones."""
    trained = [r for r in run.evaluations if r["step"] > 0]
    return max(trained, key=lambda record: score(record, ks_of(record)[0]).value, default=None)


def ks_of(record: Record) -> list[int]:
    """Return the k of an evaluation, ascending."""
    return sorted(map(int, record["evaluation"]["pass_at"]))


def score(record: Record, k: int) -> Estimate:
    """Return pass@k of an evaluation, with its interval."""
    estimate = record["evaluation"]["pass_at"][str(k)]
    return Estimate(*(float(estimate[name]) for name in ("value", "low", "high")))


def _complete_counts(ends: Sequence[Record]) -> list[list[int]]:
    """Return the correct responses to each held-out prompt at some evaluations.

    A prompt with responses that could not be verified at one of them is left out of all. Empty lists where the metrics
    do not store the counts, or not of the same prompts.
    """
    counts = [(end.get("prompts") or {}).get("num_correct") or [] for end in ends]
    if len({len(count) for count in counts}) != 1:
        return [[] for _ in ends]
    lost = [end["prompts"]["num_unverified"] for end in ends if "num_unverified" in (end.get("prompts") or {})]
    kept = [i for i in range(len(counts[0])) if not any(each[i] for each in lost)]
    return [[count[i] for i in kept] for count in counts]


def _change(first: Record, last: Record, k: int) -> ScoreChange:
    before, after, difference = score(first, k), score(last, k), _difference(first, last, k)
    bounds = Estimate(after.value - before.value, after.low - before.high, after.high - before.low)
    return ScoreChange(k, before, after, difference, _DIRECTIONS[conclusion_of(difference or bounds)])


def _difference(first: Record, last: Record, k: int) -> Estimate | None:
    ends = [record["evaluation"] for record in (first, last)]
    counts = _complete_counts(ends)
    if not counts[0]:
        return None
    a, b = (pass_at_k(c, end["num_samples"], k)[None] for c, end in zip(counts, ends, strict=True))
    return difference_interval(a, b, seeds_paired=True)
