"""The schedule of a run: its phases, its best evaluation, when it pauses and ends, and when the reference is reset.

All decisions are functions of the metrics since the start, so a resumed run makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from brorl.algorithms.advantages import advantage_estimator
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.arrays import FloatArray
from brorl.config.settings import TrainConfig
from brorl.cost import UNIT_WORDS, Cost, fraction_spent
from brorl.evaluation.settings import EvaluationSettings
from brorl.format import counted
from brorl.runs.step_record import ObjectiveRecord, StepRecord, is_due
from brorl.training.collapse import CollapseWatch
from brorl.training.settings import PhaseSettings, ReferenceSettings

SPIKE_STEPS = 5


@dataclass(frozen=True)
class Patience:
    """Counts consecutive evaluations without a new best score. A non-finite score is never a new best."""

    best: float | None = None  # the best score; None before the first one
    length: int = 0  # evaluations since the best score

    def after(self, score: float) -> Patience:
        """Return the state after one more evaluation."""
        is_best = isfinite(score) and (self.best is None or score > self.best)
        return Patience(score) if is_best else Patience(self.best, self.length + 1)


class Evaluations:
    """Tracks a run's best evaluation, and whether its scores are still rising.

    Only regular evaluations can end the run. An evaluation at an evaluation point of the budget, or at the step where a
    resumed run had ended, must not affect training.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        self._settings = settings
        self._best: tuple[float, int] | None = None
        self._stall = Patience()  # counts regular evaluations

    @property
    def best_step(self) -> int | None:
        """Step with the best evaluation (not step 0; the earliest in a tie); None if there is none to keep."""
        return self._best[1] if self._best and self._settings.keep_best else None

    def score(self, record: StepRecord) -> float | None:
        """Return the score of an evaluation: pass@k of `best_k`; None without an evaluation."""
        if not record.evaluation:
            return None
        pass_at = record.evaluation.pass_at
        estimate = pass_at.get(self._settings.best_k or min(pass_at))
        return estimate.value if estimate else None

    def regular_score(self, record: StepRecord) -> float | None:
        """Return the score of a regular evaluation; None without one."""
        return self.score(record) if record.is_regular(self._settings.every) else None

    def add(self, record: StepRecord) -> None:
        """Add the next line of the metrics."""
        score, step = self.score(record), record.weights_step
        if score is not None and step > 0 and (self._best is None or score > self._best[0]):
            self._best = (score, step)
        if (regular := self.regular_score(record)) is not None:
            self._stall = self._stall.after(regular)
        if record.end_reason is not None:  # a run resumed after its end continues until it stalls again
            self._stall = Patience(self._stall.best)

    def why_over(self) -> str | None:
        """Return why the run ends after the last record, or None if its evaluations are still improving."""
        patience = self._settings.patience
        if patience is None or self._stall.length < patience:
            return None
        k = self._settings.best_k or min(self._settings.ks)
        return (
            f"{self._stall.length} evaluations in a row without a pass@{k} above {self._stall.best:.3f} "
            f"(evaluation.patience = {patience})"
        )


class ReferenceSchedule:
    """Decides after which steps the reference is reset: at intervals, when the KL spikes, or when validation stalls.

    - Spike: the median of the last 5 measured KLs is above `reset_kl_above`, so no single value decides. Non-finite
      values count as being above it.
    - Cooldown: KL and validation never cause a reset within `cooldown` steps of the last reset or the start, when the
      policy is still close to its reference. Values from the cooldown still count afterwards.
    - Every reset, whatever its reason, clears the counters (steps, KLs, evaluations without a new best) and the best
      score, so later scores are compared only with each other.

    Source: ProRL (arXiv 2505.24864), section 3.2, resets manually when validation stalls or the KL spikes; ProRL v2
    resets every 200 to 500 steps. The rules for spike, stall and cooldown are ours.
    """

    def __init__(
        self, settings: ReferenceSettings, score: Callable[[StepRecord], float | None], cooldown: int = 20
    ) -> None:
        self._settings = settings
        self._score = score
        self._cooldown = cooldown
        self._start_again(0)

    def _start_again(self, step: int) -> None:
        self._last_reset = step
        self._stall = Patience()
        self._kls: list[float] = []

    def why_reset(self, record: StepRecord) -> str | None:
        """Return why the reference is reset after a record's step, or None for no reset."""
        settings = self._settings
        since = record.step - self._last_reset
        kls, stall = self._with(record)
        if settings.reset_every and since >= settings.reset_every:
            return f"{since} steps since the last reset (reference.reset_every = {settings.reset_every})"
        if since <= self._cooldown:
            return None
        limit, patience = settings.reset_kl_above, settings.reset_patience
        if limit is not None and len(kls) == SPIKE_STEPS and median(kls) > limit:
            return (
                f"the KL from the reference rose to {median(kls):.3g} nats per token, the median of {SPIKE_STEPS} "
                f"steps (reference.reset_kl_above = {limit:g})"
            )
        if patience is not None and stall.length >= patience:
            best = "no score" if stall.best is None else f"{stall.best:.4g}"
            return (
                f"{stall.length} evaluations in a row without a score above {best} "
                f"(reference.reset_patience = {patience})"
            )
        return None

    def add(self, record: StepRecord) -> None:
        """Add the next line of the metrics."""
        self._kls, self._stall = self._with(record)
        if record.reference_reset is not None:
            self._start_again(record.step)

    def _with(self, record: StepRecord) -> tuple[list[float], Patience]:
        """Return the last KLs and the stall count, updated with a record."""
        kl = record.update.reference_kl if record.update else None
        score = self._score(record)
        kls = self._kls if kl is None else [*self._kls, kl if isfinite(kl) else inf][-SPIKE_STEPS:]
        return kls, self._stall if score is None else self._stall.after(score)


class Schedule:
    """Decides when a run is evaluated, pauses and ends. Its members make all other decisions from the metrics."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._budget = config.total_budget
        self._unit = self._budget.unit
        self.has_begun = False  # whether the metrics have a line yet
        self.evaluations = Evaluations(config.evaluation)
        self.reference = ReferenceSchedule(config.reference, self.evaluations.regular_score)
        self.collapse = CollapseWatch(config.collapse, config.evaluation.every)
        self.objective = PhaseSchedule(config)

    def add(self, record: StepRecord) -> None:
        """Add the next line of the metrics, from this process or an earlier one."""
        self.has_begun = True
        for watcher in (self.evaluations, self.reference, self.collapse, self.objective):
            watcher.add(record)

    def pauses(self, before: Cost, spent: Cost) -> bool:
        """Return whether a run pauses after a step. `before` and `spent` are the costs before and after it."""
        at = self._config.budget.pause_at
        return at is not None and before.of(self._unit) < at <= spent.of(self._unit)

    def is_over(self, step: int, spent: Cost) -> bool:
        """Return whether a run has reached its number of steps or its budget."""
        return (self._config.steps is not None and step >= self._config.steps) or self._budget.is_spent(spent)

    def fraction_spent(self, step: int, spent: Cost) -> float:
        """Return the fraction of the steps or of the budget that is spent, whichever is larger."""
        return fraction_spent(self._config.steps, self._budget, step, spent)

    def evaluates(self, step: int, before: Cost, spent: Cost) -> bool:
        """Return whether the model is evaluated after a step. `before` and `spent` are as in `pauses`."""
        return (
            is_due(step, self._config.evaluation.every)
            or self.is_over(step, spent)
            or self._budget.passes_eval_point(before, spent)
            or self.pauses(before, spent)
        )

    def finish_line(self, spent: Cost) -> str:
        """Return one line about a finished run: its steps, and whether the budget or the number of steps ended it."""
        steps = self._config.steps
        limit = self._budget.limit
        done = f"finished {counted(spent.steps, 'step')}"
        if self._unit == "steps" and limit == steps:  # no other budget
            return done
        spent_text = f"{spent.of(self._unit):,.0f} of {limit:,.0f} {UNIT_WORDS[self._unit]} spent"
        if self._budget.is_spent(spent):
            return f"{done}, ended by the budget: {spent_text}"
        return f"{done}, ended by steps = {steps:,}: {spent_text}"


class PhaseSchedule:
    """Steps through the phases of a run (at least one), each with its own advantages and learning rate.

    Phases run in order and never repeat. If a resumed run has a larger budget, its current phase continues. Its
    progress is then computed from the spent fraction of the new budget, and is at least 0.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._phases = config.phases or (PhaseSettings(name="train", advantage=config.advantage),)
        self._index = 0
        self._began_at = 0.0
        self._fraction = 0.0
        self._recorded: int | None = None  # the last phase with a line in the metrics
        self._stall = Patience()  # counts evaluations in this phase

    @property
    def phase(self) -> PhaseSettings:
        """The current phase."""
        return self._phases[self._index]

    @property
    def progress(self) -> float:
        """Progress in the current phase, 0 to 1."""
        length = self.phase.until - self._began_at
        return min(max((self._fraction - self._began_at) / length, 0.0), 1.0) if length > 0 else 1.0

    @property
    def lr_scale(self) -> float:
        """Factor that multiplies the learning rate."""
        optimizer = self._config.optimizer
        phase_factor = (self.phase.learning_rate or optimizer.learning_rate) / optimizer.learning_rate
        return phase_factor * optimizer.decay(self._fraction)

    def estimate_advantages(self, groups: Sequence[Group]) -> list[FloatArray]:
        """Return the advantage of each distinct response of each group, shape [L]."""
        settings = annealed(self.phase.advantage, self.progress, self._config.rollouts_per_prompt)
        return advantage_estimator(settings)(groups)

    def begin_step(self, fraction: float) -> None:
        """Enter the next phase if the current one has ended. `fraction` of the budget is spent."""
        self._fraction = fraction
        while self._index + 1 < len(self._phases) and self._is_over:
            self._enter(self._index + 1, fraction)

    def record(self) -> ObjectiveRecord | None:
        """Return the record of the current phase, or None if the run has only one."""
        if len(self._phases) == 1:
            return None
        name = self.phase.name
        title = f"{name} (phase {self._index + 1} of {len(self._phases)}, {self.phase.title})"
        return ObjectiveRecord(
            phase=self._index + 1,
            name=name,
            began_at=self._began_at,
            progress=self.progress,
            begins=title if self._recorded != self._index else None,
        )

    def add(self, record: StepRecord) -> None:
        """Add the next line of the metrics: its phase and, for the phase's patience, any regular evaluation."""
        if objective := record.objective:
            if objective.phase != self._index + 1:
                self._enter(objective.phase - 1, objective.began_at)
            self._recorded = self._index
        if record.evaluation and record.is_regular(self._config.evaluation.every):
            pass_at = record.evaluation.pass_at
            self._stall = self._stall.after(pass_at[max(pass_at)].value)

    @property
    def _is_over(self) -> bool:
        patience = self.phase.until_coverage_stalls
        return self._fraction >= self.phase.until or (patience is not None and self._stall.length >= patience)

    def _enter(self, index: int, fraction: float) -> None:
        self._index = index
        self._began_at = fraction
        self._stall = Patience()


def annealed(settings: AdvantageSettings, progress: float, num_rollouts: int) -> AdvantageSettings:
    """Return the settings with MaxRL's order at a given progress, 0 to 1.

    The order falls geometrically from `order` (N - 1 if None) to `final_order`, which it reaches at `final_order_at`.
    From 16 to 1: 16 at the start, 4 halfway, 1 at the end.
    """
    if settings.final_order is None:
        return settings
    first = min(settings.order or num_rollouts - 1, num_rollouts - 1)
    fallen = min(progress / settings.final_order_at, 1.0)
    order = round(first ** (1 - fallen) * settings.final_order**fallen)
    return settings.model_copy(update={"order": order, "final_order": None, "final_order_at": 1.0})
