"""Costs of training steps in several units, and budgets. Costs never include evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Literal, get_args

from brorl.format import short, short_time

Unit = Literal["steps", "seconds", "samples", "unique_tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
UNIT_WORDS: dict[Unit, str] = {unit: unit.replace("_", " ") for unit in UNITS}


@dataclass(frozen=True)
class Cost:
    """The cost of one or more steps."""

    steps: int = 0  # steps with an update
    seconds: float = 0.0  # wall time without evaluations
    samples: int = 0  # rollouts, including those that dynamic sampling dropped
    sampled_tokens: int = 0  # tokens of all rollouts, a shared prefix counted once per rollout
    unique_tokens: int = 0  # sampled tree nodes: tokens that were computed, a shared prefix counted once

    def __add__(self, other: Cost) -> Cost:
        """Return the sum of two costs."""
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def of(self, unit: Unit) -> float:
        """Return the cost in one unit."""
        return float(getattr(self, unit))


def check_within_limit(name: str, amounts: Iterable[float], limit: float | None) -> None:
    """Check that a setting's amounts are above 0 and at most a budget's limit; None allows no amounts."""
    wrong = next((amount for amount in amounts if limit is None or not 0 < amount <= limit), None)
    if wrong is not None:
        raise ValueError(f"{name} must be above 0 and at most budget.limit = {limit}, got {wrong:g}; remove it")


@dataclass(frozen=True)
class Budget:
    """A run's budget, and the amounts at which it is evaluated."""

    unit: Unit
    limit: float  # the run ends with the step that reaches this amount
    eval_points: tuple[float, ...] = ()  # amounts at which the run is evaluated, after the first step that reaches each

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"a budget must be above 0, got {self.limit} {self.unit}")
        check_within_limit("budget.eval_points", self.eval_points, self.limit)

    def is_spent(self, spent: Cost) -> bool:
        """Return whether a run that has spent this much has reached the limit."""
        return spent.of(self.unit) >= self.limit

    def passes_eval_point(self, before: Cost, after: Cost) -> bool:
        """Return whether a step that began at one cost and ended at the other reached an evaluation point."""
        return any(before.of(self.unit) < eval_point <= after.of(self.unit) for eval_point in self.eval_points)


def fraction_spent(steps: int | None, budget: Budget, spent_steps: int, spent: Cost) -> float:
    """Return the fraction spent of a step limit (None: no limit) or of a budget, whichever is larger."""
    fraction = spent.of(budget.unit) / budget.limit
    return fraction if steps is None else max(spent_steps / steps, fraction)


def amount(value: float, unit: Unit) -> str:
    """Return an amount with its unit spelled out: 40 seconds, 12.5 minutes, 150 steps, 1,200,000 unique tokens."""
    if unit != "seconds":
        words = UNIT_WORDS[unit]
        return f"{value:,.0f} {words.removesuffix('s') if value == 1 else words}"
    size, word = (1, "seconds") if value < 599.95 else (60, "minutes") if value < 7197 else (3600, "hours")
    rounded = f"{value / size:,.1f}".removesuffix(".0")
    return f"{rounded} {word.removesuffix('s') if rounded == '1' else word}"


def short_amount(value: float, unit: Unit) -> str:
    """Return an amount for a table or an axis, without the unit unless it is a time: 40 s, 150, 1.2M."""
    if unit == "steps":
        return f"{value:,.0f}"
    text = short_time(value) if unit == "seconds" else short(value)
    return re.sub(r"\.0*(?=\D*$)|(?<=[1-9])0+(?=\D*$)", "", text) if "." in text else text
