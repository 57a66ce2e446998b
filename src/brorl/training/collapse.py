"""Signs of collapse in a run's metrics, with advice.

In: the lines of `metrics.jsonl`, in order. Out: the signs that the last line shows for the first time, with their
numbers and advice, or None. Lines may lack numbers (no evaluation, no reference). Sharpening is not a collapse: pass@k
may fall while pass@1 still rises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median
from typing import Any

from brorl.runs.run_directory import Record
from brorl.training.settings import CollapseLimits

WINDOW = 10  # steps over which the first and the last level are medians: no single step gives a sign


@dataclass(frozen=True)
class Collapse:
    """Signs of collapse that a step shows for the first time.

    Attributes:
        step: The step.
        signs: Which: "entropy", "reference_kl", "coverage".
        findings: For each sign the measured values, as text.
        advice: One line of advice.
    """

    step: int
    signs: tuple[str, ...]
    findings: tuple[str, ...]
    advice: str

    @property
    def text(self) -> str:
        """One line for the console and the log."""
        return f"step {self.step}: the model may be collapsing: {'; '.join(self.findings)}. {self.advice}"


def find_collapse(records: Sequence[Record], limits: CollapseLimits, window: int = WINDOW) -> Collapse | None:
    """Return the signs of collapse that the last record shows and the record before it did not.

    A sign that disappears and returns is reported again. Signs are a function of the records only: a resumed run
    reports the same signs at the same steps.

    Args:
        records: Lines of the metrics, steps ascending.
        limits: The limits.
        window: Number of steps of a level.

    Returns:
        The new signs; None if there are none.
    """
    if not records:
        return None
    before = _signs(records[:-1], limits, window)
    new = {sign: finding for sign, finding in _signs(records, limits, window).items() if sign not in before}
    if not new:
        return None
    return Collapse(int(records[-1]["step"]), tuple(new), tuple(new.values()), _advice(tuple(new)))


def _signs(records: Sequence[Record], limits: CollapseLimits, window: int) -> dict[str, str]:
    """Return the signs after some records, each with its finding."""
    found = {
        "entropy": _entropy_sign(_updates(records, "entropy"), limits, window),
        "reference_kl": _reference_sign(_updates(records, "reference_kl"), limits, window),
        "coverage": _coverage_sign([r["evaluation"] for r in records if r.get("evaluation")], limits),
    }
    return {sign: finding for sign, finding in found.items() if finding}


def _updates(records: Sequence[Record], name: str) -> list[float]:
    """Return a number of the updates, of the steps that have it."""
    values = [(r.get("update") or {}).get(name) for r in records]
    return [float(v) for v in values if v is not None]


def _entropy_sign(entropies: Sequence[float], limits: CollapseLimits, window: int) -> str | None:
    if len(entropies) < 2 * window:
        return None
    first, last = median(entropies[:window]), median(entropies[-window:])
    if not last < limits.entropy_fraction * first:
        return None
    return (
        f"the entropy fell from {first:.3g} to {last:.3g} nats per token, "
        f"below {limits.entropy_fraction:.0%} of its start"
    )


def _reference_sign(kls: Sequence[float], limits: CollapseLimits, window: int) -> str | None:
    if limits.reference_kl is None or len(kls) < window:
        return None
    last = median(kl if isfinite(kl) else float("inf") for kl in kls[-window:])
    if not last > limits.reference_kl:
        return None
    return f"the KL to the reference is {last:.3g} nats per token, above {limits.reference_kl:g}"


def _coverage_sign(evaluations: Sequence[dict[str, Any]], limits: CollapseLimits) -> str | None:
    """Compare the last evaluations with the best, by the intervals over prompts.

    pass@k is lost in an evaluation whose interval lies wholly below that of the best so far. pass@1 still rises if
    its mean over the last `patience` evaluations is above its mean over as many before them.
    """
    num = limits.patience
    if not evaluations:
        return None
    largest = max((int(k) for k in evaluations[-1]["pass_at"]), default=1)
    covered, single = ([_estimate(e, k) for e in evaluations] for k in (largest, 1))
    recent = covered[-num:]
    known = [estimate for estimate in covered if estimate]
    if largest == 1 or not all(recent):
        return None
    best = max(known, key=lambda estimate: estimate["value"])
    if not all(estimate and estimate["high"] < best["low"] for estimate in recent):
        return None
    ones = [estimate["value"] for estimate in single if estimate]
    earlier = ones[-2 * num : -num]
    if not earlier or fmean(ones[-num:]) > fmean(earlier):
        return None
    last = known[-1]["value"]
    return (
        f"pass@{largest} fell from {best['value']:.3f} [{best['low']:.3f}, {best['high']:.3f}] to {last:.3f} over "
        f"{num} evaluations while pass@1 no longer rose"
    )


def _estimate(evaluation: dict[str, Any], k: int) -> Any:
    """Return the estimate of pass@k, whose key is a number in memory and text in a file; None if there is none."""
    estimates = evaluation["pass_at"]
    return estimates.get(k, estimates.get(str(k)))


def _advice(signs: Sequence[str]) -> str:
    """Return advice for some signs, the most important first."""
    change = {
        "coverage": "more rollouts_per_prompt or a KL penalty keep coverage",
        "entropy": "a higher loss.clip_high, a KL penalty or more rollouts_per_prompt keep entropy",
        "reference_kl": "a larger KL coefficient, or resetting the reference if validation still rises, bounds it",
    }
    steps = "; ".join(change[sign] for sign in change if sign in signs)
    return f"Go back to checkpoints/best and train on with a lower optimizer.learning_rate; {steps}"
