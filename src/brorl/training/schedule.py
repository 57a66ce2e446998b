"""The schedule of a run: when it ends, is evaluated, is saved, and when the reference of the KL penalty is reset.

The decisions are functions of all inputs since the start: a resumed run makes the same ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from brorl.config.settings import TrainConfig
from brorl.cost import UNIT_WORDS, Budget, Cost
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

    Args:
        settings: When the reference is reset, and whether a reset clears the optimizer's moments too (ProRL v1).
        cooldown: Steps after a reset in which KL and validation give no reason for another. Their values in these steps
            still count afterwards.

    Source: ProRL (arXiv 2505.24864), section 3.2, resets when validation stalls or the KL spikes, by hand; ProRL v2
    every 200 to 500 steps. The rules for spike, stall and cooldown are ours.
    """

    def __init__(self, settings: ReferenceSettings, cooldown: int = 20) -> None:
        self._every, self._kl_above = settings.reset_every, settings.reset_kl_above
        self._patience, self._cooldown = settings.reset_patience, cooldown
        self.clear_optimizer = settings.reset_optimizer
        self._start_again(0)

    def _start_again(self, step: int) -> None:
        self._last_reset = step
        self._kls: deque[float] = deque(maxlen=SPIKE_STEPS)
        self._best: float | None = None
        self._without_best = 0

    def after_step(self, step: int, reference_kl: float | None, score: float | None) -> str | None:
        """Record a step, and decide whether the reference is reset after it.

        Args:
            step: The step, ascending; 0 for an evaluation before the first.
            reference_kl: KL of the policy to the reference in this step, nats per token; None if not measured.
            score: Validation score after this step; None if there was no evaluation. Not a number is no new best.

        Returns:
            The reason for a reset, for the log; None for no reset.
        """
        if reference_kl is not None:
            self._kls.append(reference_kl if isfinite(reference_kl) else float("inf"))
        if score is not None:
            better = isfinite(score) and (self._best is None or score > self._best)
            self._best = score if better else self._best
            self._without_best = 0 if better else self._without_best + 1
        reason = self._reason(step)
        if reason:
            self._start_again(step)
        return reason

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of later decisions, as plain numbers."""
        return {
            "last_reset": self._last_reset,
            "kls": list(self._kls),
            "best": self._best,
            "without_best": self._without_best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; the settings may have changed since."""
        self._start_again(state["last_reset"])
        self._kls.extend(state["kls"])
        self._best, self._without_best = state["best"], state["without_best"]


@dataclass(frozen=True)
class Schedule:
    """When a run ends, is evaluated, and is saved."""

    budget: Budget  # the cost at which the run ends, and the costs at which it is evaluated
    steps: int | None  # most steps of the whole run; None if only the budget ends it
    # steps between regular evaluations; 0 for none. The start, the budget's evaluation points and the end are evaluated
    # too.
    evaluate_every: int
    checkpoint_every: int  # steps between regular checkpoints, at least 1; the end is saved too
    store_rollouts_every: int  # steps between stored rollouts; 0 stores no responses, of evaluations either
    reference: ReferenceSchedule  # when the reference policy is reset
    pause_at: float | None = None  # part of the budget at which the run pauses; None does not pause

    @classmethod
    def from_recipe(cls, config: TrainConfig) -> Schedule:
        """Make the schedule of a run."""
        return cls(
            budget=config.total_budget,
            steps=config.steps,
            evaluate_every=config.evaluation.every,
            checkpoint_every=config.checkpoint_every,
            store_rollouts_every=config.store_rollouts_every,
            reference=ReferenceSchedule(config.reference),
            pause_at=config.budget.pause_at,
        )

    def pauses(self, before: Cost, spent: Cost) -> bool:
        """Return whether a run pauses after a step, from the costs before and with it."""
        unit = self.budget.unit
        return self.pause_at is not None and before.of(unit) < self.pause_at <= spent.of(unit)

    def is_over(self, step: int, spent: Cost) -> bool:
        """Return whether a run has reached its number of steps or its budget."""
        return (self.steps is not None and step >= self.steps) or self.budget.is_spent(spent)

    def fraction_spent(self, step: int, spent: Cost) -> float:
        """Return the fraction of the steps or of the budget that is spent, whichever is larger."""
        of_budget = spent.of(self.budget.unit) / self.budget.limit
        return of_budget if self.steps is None else max(step / self.steps, of_budget)

    def evaluates(self, step: int, before: Cost, spent: Cost) -> bool:
        """Return whether the model is evaluated after a step, from the costs before and with it."""
        return (
            is_due(step, self.evaluate_every)
            or self.is_over(step, spent)
            or self.budget.passes_eval_point(before, spent)
            or self.pauses(before, spent)
        )

    def finish_line(self, spent: Cost) -> str:
        """Return one line for a finished run: its steps, and whether the budget or the number of steps ended it."""
        done = f"finished {spent.steps:,} step{'s' if spent.steps != 1 else ''}"
        unit = self.budget.unit
        if unit == "steps" and self.budget.limit == self.steps:  # no other budget
            return done
        of_budget = f"{spent.of(unit):,.0f} of {self.budget.limit:,.0f} {UNIT_WORDS[unit]} spent"
        if self.budget.is_spent(spent):
            return f"{done}, ended by the budget: {of_budget}"
        return f"{done}, ended by steps = {self.steps:,}: {of_budget}"
