"""Detect signs of model collapse in a run's metrics, and suggest remedies.

Records may lack numbers (no evaluation, no reference). Sharpening is not collapse: pass@k may fall while pass@1 still
rises. The signs depend only on the metrics, so a resumed run sees the same signs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite, isnan
from statistics import fmean, median

from brorl.runs.step_record import EvaluationRecord, StepRecord
from brorl.training.settings import CollapseLimits

WINDOW = 10  # the first and last levels are medians over this many steps, so no single step triggers a sign


def new_signs(records: Sequence[StepRecord], limits: CollapseLimits, window: int = WINDOW) -> dict[str, str]:
    """Return the signs of collapse that first appear with the last record: name -> measured values as text.

    A sign that disappears and returns is reported again. Levels are medians over `window` steps.
    """
    before, now = _signs(records[:-1], limits, window), _signs(records, limits, window)
    return {sign: finding for sign, finding in now.items() if finding and not before[sign]}


def _signs(records: Sequence[StepRecord], limits: CollapseLimits, window: int) -> dict[str, str | None]:
    """Return the measured values of each sign as text, or None if the records do not show it."""
    updates = [record.update for record in records if record.update]
    return {
        "entropy": _entropy_sign([u.entropy for u in updates if not isnan(u.entropy)], limits, window),
        "reference_kl": _reference_sign(
            [u.reference_kl for u in updates if u.reference_kl is not None], limits, window
        ),
        "coverage": _coverage_sign([r.evaluation for r in records if r.evaluation], limits),
    }


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
    return f"the KL from the reference is {last:.3g} nats per token, above {limits.reference_kl:g}"


def _coverage_sign(evaluations: Sequence[EvaluationRecord], limits: CollapseLimits) -> str | None:
    """Detect whether pass@k was down in each of the last `patience` evaluations while pass@1 was not rising.

    pass@k is down if its interval over prompts is entirely below that of the best evaluation. pass@1 is rising if its
    mean over the last `patience` evaluations is above its mean over the same number before them.
    """
    patience = limits.patience
    if not evaluations:
        return None
    largest = max(evaluations[-1].pass_at, default=1)
    pass_at_largest, pass_at_1 = ([evaluation.pass_at.get(k) for evaluation in evaluations] for k in (largest, 1))
    recent = pass_at_largest[-patience:]
    measured = [estimate for estimate in pass_at_largest if estimate]
    if largest == 1 or not all(recent):
        return None
    best = max(measured, key=lambda estimate: estimate.value)
    if not all(estimate and estimate.high < best.low for estimate in recent):
        return None
    pass_at_1_values = [estimate.value for estimate in pass_at_1 if estimate]
    earlier = pass_at_1_values[-2 * patience : -patience]
    if not earlier or fmean(pass_at_1_values[-patience:]) > fmean(earlier):
        return None
    last = measured[-1].value
    return (
        f"pass@{largest} fell from {best.value:.3f} [{best.low:.3f}, {best.high:.3f}] to {last:.3f} over "
        f"{patience} evaluations while pass@1 no longer rose"
    )


def remedy_for(signs: Collection[str]) -> str:
    """Return one line of advice for the given signs, the most important first."""
    change = {
        "coverage": "more rollouts_per_prompt or a KL penalty preserve coverage",
        "entropy": "a higher loss.clip_high, a KL penalty or more rollouts_per_prompt preserve entropy",
        "reference_kl": "a larger KL coefficient, or resetting the reference if validation still rises, bounds the KL",
    }
    steps = "; ".join(change[sign] for sign in change if sign in signs)
    return f"Go back to checkpoints/best and continue training with a lower optimizer.learning_rate; {steps}"


class CollapseWatch:
    """Watches a run's metrics for signs of collapse.

    Only regular evaluations count. An evaluation at an evaluation point of the budget, or at the step where a resumed
    run had ended, must not affect training.

    Args:
        limits: Thresholds for collapse.
        evaluate_every: Steps between regular evaluations.
    """

    def __init__(self, limits: CollapseLimits, evaluate_every: int) -> None:
        self._limits = limits
        self._every = evaluate_every
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Add the next line of the metrics."""
        self._records.append(self._counting(record))

    def line(self, record: StepRecord) -> str | None:
        """Return one line about the signs that first appear with this record, or None if there are none."""
        signs = new_signs([*self._records, self._counting(record)], self._limits)
        if not signs:
            return None
        return f"step {record.step}: the model may be collapsing: {'; '.join(signs.values())}. {remedy_for(signs)}"

    def _counting(self, record: StepRecord) -> StepRecord:
        """Return the parts of a record that the signs depend on."""
        evaluation = record.evaluation if record.is_regular(self._every) else None
        return StepRecord(step=record.step, update=record.update, evaluation=evaluation)
