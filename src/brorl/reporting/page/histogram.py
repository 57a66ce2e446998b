"""Histogram of the pass rates of training prompts.

In: runs. Out: the heights of bars for each step. Nothing if the metrics hold no counts of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brorl.runs.run_record import Record, RunRecord

_FEW_ROLLOUTS = 32  # up to this N, each number of correct rollouts has its own bar


def success_histogram(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Count the prompts of each step by their number or fraction of correct rollouts.

    Returns:
        `labels` of the B bars, and for each run `steps` and `counts`, shape [steps, B]; None if nothing was measured.
    """
    counted = [[(r["step"], _counts(r)) for r in run.steps if _counts(r)] for run in runs]
    sizes = {n for run in counted for _, pairs in run for _, n in pairs}
    if not sizes:
        return None
    single = len(sizes) == 1 and max(sizes) <= _FEW_ROLLOUTS
    fractions = ["0", *(f"≤{10 * i}" for i in range(1, 10)), "<100", "100"]
    labels = [f"{k}" for k in range(max(sizes) + 1)] if single else fractions
    result = []
    for run in counted:
        counts = [[0] * len(labels) for _ in run]
        for bars, (_, pairs) in zip(counts, run, strict=True):
            for k, n in pairs:
                bars[k if single else _fraction_bin(k, n)] += 1
        result.append({"steps": [step for step, _ in run], "counts": counts})
    unit = f"correct rollouts of {max(sizes)}" if single else "fraction of correct rollouts, %"
    return {"labels": labels, "unit": unit, "runs": result}


def _counts(record: Record) -> list[tuple[int, int]]:
    prompts = record.get("coverage", {}).get("prompts")
    return list(zip(prompts["num_correct"], prompts["num_rollouts"], strict=True)) if prompts else []


def _fraction_bin(num_correct: int, num_rollouts: int) -> int:
    """Return the bar of a fraction: 0 for none, 11 for all, else the tenth, which includes its upper end."""
    if num_correct in (0, num_rollouts):
        return 11 if num_correct else 0
    return -(-10 * num_correct // num_rollouts)
