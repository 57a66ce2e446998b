"""The objective of a run: how advantages are estimated, and with which learning rate, at each step.

Phases follow one another and never return. All decisions depend on the metrics only; a resumed run rebuilds the state
from its file. If a resumed run has a larger budget, its current phase goes on, with the progress that its fraction of
the new budget has, and not below 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.runs.run_directory import Record
from brorl.training.schedule import is_regular
from brorl.training.settings import PhaseSettings


class Objective:
    """The phases of a run, or one of the whole run, and the current one."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._phases = config.phases or (PhaseSettings(name="train", advantage=config.advantage),)
        self._index, self._begun_at, self._fraction = 0, 0.0, 0.0
        self._recorded: int | None = None  # the last phase with a line in the metrics
        self._best: float | None = None
        self._stalled = 0

    @property
    def phase(self) -> PhaseSettings:
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
        optimizer = self._config.optimizer
        of_phase = (self.phase.learning_rate or optimizer.learning_rate) / optimizer.learning_rate
        return of_phase * optimizer.decay(self._fraction)

    def estimate_advantages(self, groups: Sequence[Group]) -> list[FloatArray]:
        """Return for each group the advantage of each distinct response, shape [L]."""
        number = self._config.rollouts_per_prompt
        return advantage_estimator(annealed(self.phase.advantage, self.progress, number))(groups)

    def begin_step(self, fraction: float) -> None:
        """Enter the next phase if the current one has ended; `fraction` of the budget is spent."""
        self._fraction = fraction
        while self._index + 1 < len(self._phases) and self._is_over:
            self._enter(self._index + 1, fraction)

    def record(self) -> Record:
        """Return the phase of this step for its metrics record; nothing if there is only one.

        `begins` is in the first line of each phase.
        """
        if len(self._phases) == 1:
            return {}
        record = {"phase": self._index + 1, "name": self.phase.name, "from": self._begun_at, "progress": self.progress}
        if self._recorded != self._index:
            record["begins"] = f"{self.phase.name} (phase {self._index + 1} of {len(self._phases)}, {self.phase.title})"
        self._recorded = self._index
        return {"objective": record}

    def recall(self, record: Record) -> None:
        """Rebuild the state from the next line of an existing metrics file."""
        if objective := record.get("objective"):
            if objective["phase"] != self._index + 1:
                self._enter(objective["phase"] - 1, objective["from"])
            self._recorded = self._index
        self.remember(record)

    def remember(self, record: Record) -> None:
        """Take a regular evaluation into account for the patience of the phase."""
        estimates = record.get("evaluation", {}).get("pass_at")
        if not estimates or not is_regular(record, self._config.evaluation.every):
            return
        coverage = float(estimates[max(estimates, key=int)]["value"])
        if self._best is None or coverage > self._best:
            self._best, self._stalled = coverage, 0
        else:
            self._stalled += 1

    @property
    def _is_over(self) -> bool:
        patience = self.phase.until_coverage_stalls
        return self._fraction >= self.phase.until or (patience is not None and self._stalled >= patience)

    def _enter(self, index: int, fraction: float) -> None:
        self._index, self._begun_at = index, fraction
        self._best, self._stalled = None, 0


def annealed(settings: AdvantageSettings, progress: float, num_rollouts: int) -> AdvantageSettings:
    """Return the settings with the order that MaxRL has at a progress from 0 to 1, between `order` and `final_order`.

    Without `order` it starts at N - 1. It is final from `final_order_at` on.
    """
    if settings.final_order is None:
        return settings
    first = min(settings.order or num_rollouts - 1, num_rollouts - 1)
    fallen = min(progress / settings.final_order_at, 1.0)
    order = round(first ** (1 - fallen) * settings.final_order**fallen)
    return settings.model_copy(update={"order": order, "final_order": None, "final_order_at": 1.0})
