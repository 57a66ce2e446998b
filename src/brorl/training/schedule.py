"""The schedule of a run: when it ends, when it is evaluated, when it is saved."""

from __future__ import annotations

from dataclasses import dataclass

from brorl.cost import UNIT_WORDS, Budget, Cost
from brorl.training.reference_schedule import ReferenceSchedule


def is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0 is never due."""
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class Schedule:
    """When a run ends, is evaluated, and is saved.

    Attributes:
        budget: The cost at which the run ends, and the costs at which it is evaluated.
        steps: Most steps of the whole run; None if only the budget ends it.
        evaluate_every: Steps between regular evaluations; 0 for none. The start, the budget's evaluation points and the
            end are evaluated too.
        checkpoint_every: Steps between regular checkpoints; 0 for none. The end is saved too.
        store_rollouts_every: Steps between stored rollouts; 0 stores no responses, of evaluations either.
        reference: When the reference policy is reset.
    """

    budget: Budget
    steps: int | None
    evaluate_every: int
    checkpoint_every: int
    store_rollouts_every: int
    reference: ReferenceSchedule

    def is_over(self, step: int, spent: Cost) -> bool:
        """Return whether a run has reached its number of steps or its budget.

        Args:
            step: Steps done.
            spent: Their cost.
        """
        return (self.steps is not None and step >= self.steps) or self.budget.is_spent(spent)

    def fraction_spent(self, step: int, spent: Cost) -> float:
        """Return the fraction of the steps or of the budget that is spent, whichever is larger.

        Args:
            step: Steps done.
            spent: Their cost.
        """
        of_budget = spent.of(self.budget.unit) / self.budget.limit
        return of_budget if self.steps is None else max(step / self.steps, of_budget)

    def evaluates(self, step: int, before: Cost, spent: Cost) -> bool:
        """Return whether the model is evaluated after a step.

        Args:
            step: The step.
            before: Cost of the run before the step.
            spent: Cost of the run with the step.
        """
        return (
            is_due(step, self.evaluate_every)
            or self.is_over(step, spent)
            or self.budget.passes_eval_point(before, spent)
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
