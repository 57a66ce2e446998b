"""The monitor of a run: the best evaluation, and signs of collapse, with advice.

Records may lack numbers (no evaluation, no reference). Sharpening is not a collapse: pass@k may fall while pass@1 still
rises. The state depends on the metrics only; a resumed run rebuilds it from its file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any

from brorl.evaluation.settings import EvaluationSettings
from brorl.runs.run_directory import Record
from brorl.training.schedule import Stall, is_regular
from brorl.training.settings import CollapseLimits

_KEPT = ("step", "update", "evaluation")
WINDOW = 10  # steps over which the first and the last level are medians: no single step gives a sign


def new_signs(records: Sequence[Record], limits: CollapseLimits, window: int = WINDOW) -> dict[str, str]:
    """Return the signs of collapse that the last record shows and the record before it did not, with their findings.

    A sign that disappears and returns is reported again. Signs are a function of the records only: a resumed run
    reports the same signs at the same steps. `window` is the number of steps of a level.
    """
    before, now = (_signs(some, limits, window) for some in (records[:-1], records))
    return {sign: finding for sign, finding in now.items() if finding and not before[sign]}


def _signs(records: Sequence[Record], limits: CollapseLimits, window: int) -> dict[str, str | None]:
    """Return for each sign the measured values as text, or None if the records do not show it."""
    return {
        "entropy": _entropy_sign(_update_values(records, "entropy"), limits, window),
        "reference_kl": _reference_sign(_update_values(records, "reference_kl"), limits, window),
        "coverage": _coverage_sign([r["evaluation"] for r in records if r.get("evaluation")], limits),
    }


def _update_values(records: Sequence[Record], name: str) -> list[float]:
    """Return the values of a metric of the updates, from the records that have it."""
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

    pass@k is lost in an evaluation whose interval lies wholly below the interval of the best so far. pass@1 still rises
    if its mean over the last `patience` evaluations is above its mean over as many before them.
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


def advice(signs: Collection[str]) -> str:
    """Return one line of advice for some signs, the most important first."""
    change = {
        "coverage": "more rollouts_per_prompt or a KL penalty keep coverage",
        "entropy": "a higher loss.clip_high, a KL penalty or more rollouts_per_prompt keep entropy",
        "reference_kl": "a larger KL coefficient, or resetting the reference if validation still rises, bounds it",
    }
    steps = "; ".join(change[sign] for sign in change if sign in signs)
    return f"Go back to checkpoints/best and train on with a lower optimizer.learning_rate; {steps}"


class Monitor:
    """Keeps the part of a run's metrics that the best evaluation and the signs of collapse depend on.

    Args:
        limits: When a model counts as collapsing, and whether the run then ends.
        evaluation: Which evaluation is the best, and how many without a new best end the run. Only regular evaluations
            count for that and for a collapse: those at evaluation points of the budget, or where a resumed run had
            ended, must not change the training.
    """

    def __init__(self, limits: CollapseLimits, evaluation: EvaluationSettings) -> None:
        self._limits, self._evaluation = limits, evaluation
        self._records: list[Record] = []
        self._best: tuple[float, int] | None = None
        self._stall = Stall()  # of the regular evaluations

    @property
    def seen(self) -> int:
        """Number of lines seen."""
        return len(self._records)

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation after an update, the earliest of equals; None if there is none to keep."""
        return self._best[1] if self._best and self._evaluation.keep_best else None

    def score(self, record: Record) -> float | None:
        """Return the score of an evaluation: pass@k of `best_k`; None without an evaluation."""
        evaluation = record.get("evaluation")
        if not evaluation:
            return None
        estimate = _estimate(evaluation, self._evaluation.best_k or min(map(int, evaluation["pass_at"])))
        return float(estimate["value"]) if estimate else None

    def regular_score(self, record: Record) -> float | None:
        """Return the score of a regular evaluation; None without one. No other evaluation may change the training."""
        return self.score(record) if is_regular(record, self._evaluation.every) else None

    def collapse(self, record: Record) -> str | None:
        """Return one line about the signs of collapse that are new with a metrics record, if there are any."""
        signs = new_signs([*self._records, self._counting(record)], self._limits)
        if not signs:
            return None
        return f"step {record['step']}: the model may be collapsing: {'; '.join(signs.values())}. {advice(signs)}"

    def add(self, record: Record) -> None:
        """Take the next line of the metrics."""
        self._records.append(self._counting(record))
        score = self.score(record)
        step = record["step"] if "update" in record else record["step"] - 1  # the step whose weights were evaluated
        if score is not None and step > 0 and (self._best is None or score > self._best[0]):
            self._best = (score, step)
        if (regular := self.regular_score(record)) is not None:
            self._stall = self._stall.after(regular)
        if "ended" in record:  # a run that is resumed after its end goes on until it stalls again
            self._stall = Stall(self._stall.best)

    def stall(self) -> str | None:
        """Return why the run ends after the last record, if its evaluations have stopped rising."""
        patience = self._evaluation.patience
        if patience is None or self._stall.length < patience:
            return None
        k = self._evaluation.best_k or min(self._evaluation.ks)
        return (
            f"{self._stall.length} evaluations in a row without a pass@{k} above {self._stall.best:.3f} "
            f"(evaluation.patience = {patience})"
        )

    def _counting(self, record: Record) -> Record:
        """Return the part of a line that counts for a collapse."""
        counts = is_regular(record, self._evaluation.every)
        return {name: record[name] for name in _KEPT if name in record and (counts or name != "evaluation")}
