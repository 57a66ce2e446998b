"""The objective of a run: how advantages are estimated, and with which learning rate, in each of its phases.

In: the fraction of the budget that is spent, and the lines of the metrics. Out: the advantages of a batch, and a factor
of the learning rate. Phases follow one another and never return. All decisions depend on the metrics only; a resumed
run rebuilds the state from its file. If a resumed run has a larger budget, its current phase goes on, with the progress
that its fraction of the new budget has, and not below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from brorl.algorithms.advantages import EstimateAdvantages, FloatArray
from brorl.algorithms.groups import Group
from brorl.runs.run_directory import Record
from brorl.training.schedule import is_due


@dataclass(frozen=True)
class ObjectivePhase:
    """A part of a run with one objective.

    Attributes:
        name: Its name.
        title: Its objective in a few words, such as "maxrl, order 511 to 1".
        estimator_at: From the progress in the phase, 0 to 1, to the advantage estimator.
        until: Fraction of the budget at which it ends; 1 for the last phase.
        patience: It also ends after this many regular evaluations without a new best pass@k of the largest k; None for
            never.
        lr_scale: Factor of the learning rate.
    """

    name: str
    title: str
    estimator_at: Callable[[float], EstimateAdvantages]
    until: float = 1.0
    patience: int | None = None
    lr_scale: float = 1.0


class Objective:
    """The phases of a run, and the current one.

    Args:
        phases: The phases, in order; `until` rises to 1.
        evaluate_every: Steps between the regular evaluations. Others must not change the training.

    Raises:
        ValueError: If there is no phase, or the phases do not follow one another up to 1.
    """

    def __init__(self, phases: Sequence[ObjectivePhase], evaluate_every: int = 0) -> None:
        ends = [phase.until for phase in phases]
        if not ends or ends[-1] != 1 or ends != sorted({*ends}) or ends[0] <= 0:
            raise ValueError(f"the phases must end at rising fractions of the budget, the last at 1, got {ends}")
        self._phases = tuple(phases)
        self._evaluate_every = evaluate_every
        self._index, self._begun_at, self._fraction = 0, 0.0, 0.0
        self._recorded: int | None = None  # the last phase with a line in the metrics
        self._best: float | None = None
        self._stalled = 0

    @property
    def phase(self) -> ObjectivePhase:
        """The current phase."""
        return self._phases[self._index]

    @property
    def progress(self) -> float:
        """Progress in the current phase, 0 to 1."""
        length = self.phase.until - self._begun_at
        return min(max((self._fraction - self._begun_at) / length, 0.0), 1.0) if length > 0 else 1.0

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate."""
        return self.phase.lr_scale

    def estimate_advantages(self, groups: Sequence[Group]) -> list[FloatArray]:
        """Return for each group the advantage of each distinct response, shape [L]."""
        return self.phase.estimator_at(self.progress)(groups)

    def begin_step(self, fraction: float) -> None:
        """Enter the next phase if the current one has ended.

        Args:
            fraction: Fraction of the budget that is spent.
        """
        self._fraction = fraction
        while self._index + 1 < len(self._phases) and self._is_over:
            self._enter(self._index + 1, fraction)

    def record(self) -> Record:
        """Return the phase of this step for its line of the metrics; nothing if there is only one.

        `begins` is in the first line of each phase.
        """
        if len(self._phases) == 1:
            return {}
        record = {"phase": self._index + 1, "name": self.phase.name, "from": self._begun_at, "progress": self.progress}
        if self._recorded != self._index:
            record["begins"] = f"{self.phase.name} (phase {self._index + 1} of {len(self._phases)}, {self.phase.title})"
        self._recorded = self._index
        return {"objective": record}

    def recall(self, past: Iterable[Record]) -> None:
        """Rebuild the state from the lines of an existing metrics file."""
        for record in past:
            objective = record.get("objective")
            if objective:
                if objective["phase"] != self._index + 1:
                    self._enter(objective["phase"] - 1, objective["from"])
                self._recorded = self._index
            self.remember(record)

    def remember(self, record: Record) -> None:
        """Take a regular evaluation into account for the patience of the phase."""
        estimates = record.get("evaluation", {}).get("pass_at")
        if not estimates or "attempt" in record or not is_due(record["step"], self._evaluate_every):
            return
        coverage = float(estimates[max(estimates, key=int)]["value"])
        if self._best is None or coverage > self._best:
            self._best, self._stalled = coverage, 0
        else:
            self._stalled += 1

    @property
    def _is_over(self) -> bool:
        patience = self.phase.patience
        return self._fraction >= self.phase.until or (patience is not None and self._stalled >= patience)

    def _enter(self, index: int, fraction: float) -> None:
        self._index, self._begun_at = index, fraction
        self._best, self._stalled = None, 0
