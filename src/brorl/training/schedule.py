"""The schedule of a run: when it pauses and ends, and when the reference of the KL penalty is reset.

The decisions are functions of all inputs since the start: a resumed run makes the same ones.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median

from brorl.config.settings import TrainConfig
from brorl.cost import UNIT_WORDS, Cost
from brorl.runs.run_directory import Record
from brorl.training.settings import ReferenceSettings

SPIKE_STEPS = 5


def is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0 is never due."""
    return every > 0 and step % every == 0


def is_regular(record: Record, every: int) -> bool:
    """Return whether an evaluation in a metrics record is regular; no other evaluation may change the training.

    An attempt at a step that found no group is repeated, so its evaluation is not regular.
    """
    return "attempt" not in record and is_due(record["step"], every)


class ReferenceSchedule:
    """Decides after which steps the reference is reset: at intervals, when the KL spikes, when validation stalls.

    A spike is not one noisy step: the median of the last 5 measurements of the KL must be above `reset_kl_above`. No
    single value decides, however large. Values that are not finite count as above. There is no reset by KL or
    validation within `cooldown` steps of the last one; the first steps of a run are a cooldown too, since the policy
    has just been its reference. All counters start again with every reset, whatever its reason: steps, measured KLs,
    evaluations without a new best. The best score is forgotten too: after a reset the policy is compared with its
    scores from then on.

    Values within the cooldown still count afterwards.

    Source: ProRL (arXiv 2505.24864), section 3.2, resets when validation stalls or the KL spikes, by hand; ProRL v2
    every 200 to 500 steps. The rules for spike, stall and cooldown are ours.
    """

    def __init__(self, settings: ReferenceSettings, cooldown: int = 20) -> None:
        self._every, self._kl_above = settings.reset_every, settings.reset_kl_above
        self._patience, self._cooldown = settings.reset_patience, cooldown
        self._start_again(0)

    def _start_again(self, step: int) -> None:
        self._last_reset = step
        self._kls: deque[float] = deque(maxlen=SPIKE_STEPS)
        self._best: float | None = None
        self._without_best = 0

    def after_step(self, step: int, reference_kl: float | None, score: float | None) -> str | None:
        """Return why the reference is reset after a step, for the log; None for no reset.

        `reference_kl` is in nats per token, None if it was not measured. A score that is not a number is no new best.
        """
        self._add(reference_kl, score)
        reason = self._reason(step)
        if reason:
            self._start_again(step)
        return reason

    def recall(self, record: Record, score: float | None) -> None:
        """Rebuild the state from the next line of an existing metrics file; the settings may have changed since."""
        self._add(record.get("update", {}).get("reference_kl"), score)
        if "reference_reset" in record:
            self._start_again(record["step"])

    def _add(self, reference_kl: float | None, score: float | None) -> None:
        if reference_kl is not None:
            self._kls.append(reference_kl if isfinite(reference_kl) else float("inf"))
        if score is not None:
            better = isfinite(score) and (self._best is None or score > self._best)
            self._best = score if better else self._best
            self._without_best = 0 if better else self._without_best + 1

    def _reason(self, step: int) -> str | None:
        since = step - self._last_reset
        if self._every and since >= self._every:
            return f"{since} steps since the last reset (reference.reset_every = {self._every})"
        if since <= self._cooldown:
            return None
        if self._kl_above is not None and len(self._kls) == SPIKE_STEPS and median(self._kls) > self._kl_above:
            return (
                f"the KL to the reference rose to {median(self._kls):.3g} nats per token, the median of {SPIKE_STEPS} "
                f"steps (reference.reset_kl_above = {self._kl_above:g})"
            )
        if self._patience is not None and self._without_best >= self._patience:
            best = "no score" if self._best is None else f"{self._best:.4g}"
            return (
                f"{self._without_best} evaluations in a row without a score above {best} "
                f"(reference.reset_patience = {self._patience})"
            )
        return None


class Schedule:
    """When a run pauses and ends, and when its reference is reset."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._budget, self._unit = config, config.total_budget, config.total_budget.unit
        self.reference = ReferenceSchedule(config.reference)

    def pauses(self, before: Cost, spent: Cost) -> bool:
        """Return whether a run pauses after a step, from the costs before and with it."""
        at = self._config.budget.pause_at
        return at is not None and before.of(self._unit) < at <= spent.of(self._unit)

    def is_over(self, step: int, spent: Cost) -> bool:
        """Return whether a run has reached its number of steps or its budget."""
        return (self._config.steps is not None and step >= self._config.steps) or self._budget.is_spent(spent)

    def fraction_spent(self, step: int, spent: Cost) -> float:
        """Return the fraction of the steps or of the budget that is spent, whichever is larger."""
        of_budget = spent.of(self._unit) / self._budget.limit
        return of_budget if self._config.steps is None else max(step / self._config.steps, of_budget)

    def evaluates(self, step: int, before: Cost, spent: Cost) -> bool:
        """Return whether the model is evaluated after a step, from the costs before and with it."""
        return (
            is_due(step, self._config.evaluation.every)
            or self.is_over(step, spent)
            or self._budget.passes_eval_point(before, spent)
            or self.pauses(before, spent)
        )

    def finish_line(self, spent: Cost) -> str:
        """Return one line for a finished run: its steps, and whether the budget or the number of steps ended it."""
        steps, limit = self._config.steps, self._budget.limit
        done = f"finished {spent.steps:,} step{'s' if spent.steps != 1 else ''}"
        if self._unit == "steps" and limit == steps:  # no other budget
            return done
        of_budget = f"{spent.of(self._unit):,.0f} of {limit:,.0f} {UNIT_WORDS[self._unit]} spent"
        if self._budget.is_spent(spent):
            return f"{done}, ended by the budget: {of_budget}"
        return f"{done}, ended by steps = {steps:,}: {of_budget}"
