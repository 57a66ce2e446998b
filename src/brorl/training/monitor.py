"""The monitor of a run: the best evaluation, and signs of collapse.

In: the lines of the metrics, in order. Out: the step of the best evaluation, and signs of collapse as text. The state
depends on the metrics only; a resumed run rebuilds it from its file.
"""

from __future__ import annotations

from collections.abc import Iterable

from brorl.runs.run_directory import Record
from brorl.training.collapse import find_collapse
from brorl.training.schedule import is_due
from brorl.training.settings import CollapseLimits

_KEPT = ("step", "update", "evaluation")


class Monitor:
    """Keeps the part of a run's metrics that the best evaluation and the signs of collapse depend on.

    Args:
        limits: When a model counts as collapsing, and whether the run then ends.
        keep_best: Whether the best checkpoint is kept.
        evaluate_every: Steps between the evaluations that count for a collapse. Others, at evaluation points of the
            budget or where a resumed run had ended, must not change the training.
    """

    def __init__(self, limits: CollapseLimits, keep_best: bool, evaluate_every: int) -> None:
        self.stop = limits.stop
        self._evaluate_every = evaluate_every
        self._limits = limits
        self._keep_best = keep_best
        self._records: list[Record] = []
        self._best: tuple[float, int] | None = None

    def recall(self, past: Iterable[Record]) -> None:
        """Add the lines of an existing metrics file."""
        for record in past:
            self.remember(record)

    @property
    def seen(self) -> int:
        """Number of lines seen."""
        return len(self._records)

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation after an update, the earliest of equals; None if there is none to keep."""
        return self._best[1] if self._best and self._keep_best else None

    def score(self, record: Record) -> float | None:
        """Return the score of an evaluation: pass@k of the smallest k; None without an evaluation."""
        estimates = record.get("evaluation", {}).get("pass_at")
        return float(estimates[min(estimates, key=int)]["value"]) if estimates else None

    def collapse(self, record: Record) -> str | None:
        """Return a sign of collapse that is new with a line of the metrics, if there is one."""
        sign = find_collapse([*self._records, self._counting(record)], self._limits)
        return None if sign is None else sign.text

    def remember(self, record: Record) -> None:
        """Add a line of the metrics."""
        self._records.append(self._counting(record))
        score = self.score(record)
        step = record["step"] if "update" in record else record["step"] - 1  # the step whose weights were evaluated
        if score is not None and step > 0 and (self._best is None or score > self._best[0]):
            self._best = (score, step)

    def _counting(self, record: Record) -> Record:
        """Return the part of a line that counts for a collapse."""
        counts = is_due(record["step"], self._evaluate_every)
        return {name: record[name] for name in _KEPT if name in record and (counts or name != "evaluation")}
