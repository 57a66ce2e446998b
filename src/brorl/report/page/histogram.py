"""How many prompts of a step had how many correct rollouts.

In: runs. Out: the heights of bars, one row a step. Nothing where the metrics hold no counts of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brorl.runs.run_record import Record, RunRecord

_FEW_ROLLOUTS = 32  # up to here each number of correct rollouts is a bar of its own


def success_histogram(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return how many prompts had how many correct rollouts, at each step of each run.

    Returns:
        `labels` of the B bars, and for each run `steps` and `counts`, shape [steps, B]; None if nothing was measured.
    """
    counted = [[_success_counts(r) for r in run.steps] for run in runs]
    sizes = {n for run in counted for pairs in run if pairs for _, n in pairs}
    if not sizes:
        return None
    single = len(sizes) == 1 and max(sizes) <= _FEW_ROLLOUTS
    labels = [f"{k}" for k in range(max(sizes) + 1)] if single else _share_labels()
    result = []
    for run, per_step in zip(runs, counted, strict=True):
        steps, counts = [], []
        for record, pairs in zip(run.steps, per_step, strict=True):
            if pairs:
                bars = [0] * len(labels)
                for k, n in pairs:
                    bars[k if single else _share_bin(k, n)] += 1
                steps.append(record["step"])
                counts.append(bars)
        result.append({"steps": steps, "counts": counts})
    unit = f"correct rollouts of {max(sizes)}" if single else "share of correct rollouts, %"
    return {"labels": labels, "unit": unit, "runs": result}


def _success_counts(record: Record) -> list[tuple[int, int]] | None:
    prompts = record.get("coverage", {}).get("prompts")
    return list(zip(prompts["num_correct"], prompts["num_rollouts"], strict=True)) if prompts else None


def _share_labels() -> list[str]:
    return ["0", *(f"≤{10 * i}" for i in range(1, 10)), "<100", "100"]


def _share_bin(num_correct: int, num_rollouts: int) -> int:
    """Return the bar of a share: 0 for none, 11 for all, between them the tenths, their upper ends included."""
    if num_correct in (0, num_rollouts):
        return 11 if num_correct else 0
    return -(-10 * num_correct // num_rollouts)
