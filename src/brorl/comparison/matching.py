"""Whether runs are compute-matched: equal on the unit of the budget, up to the length of a step.

In: runs with their costs. Out: the cost of each run at an evaluation point, and whether that is close enough. An
overshoot beyond the tolerance is never called matched. Evaluations are not part of any cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brorl.comparison.arms import Arm, RunScores
from brorl.comparison.scores import score_at
from brorl.cost import Cost, Unit, amount

TOLERANCE = 0.05  # a run is matched if it spent at most this fraction more than the evaluation point


@dataclass(frozen=True)
class Spread:
    """A number of each run of an arm: the mean over runs, and the range.

    Attributes:
        mean: Mean over runs.
        least: The smallest.
        most: The largest.
    """

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if not values:
            raise ValueError("a spread needs the value of at least one run")
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class RunMatch:
    """The cost of one run at an evaluation point.

    Attributes:
        arm: Its arm's name.
        seed: Its seed.
        spent: Its cost when it was evaluated.
        ended_early: Why it ended before the evaluation point; None if it did not.
        matched: Whether it spent at most `TOLERANCE` more than the evaluation point.
        words: A sentence if the run overshot (with the fix) or ended early; else None.
    """

    arm: str
    seed: int
    spent: Cost
    ended_early: str | None
    matched: bool
    words: str | None


@dataclass(frozen=True)
class ArmCosts:
    """The costs of an arm's runs at an evaluation point, in every unit.

    Attributes:
        arm: The arm's name.
        steps: Steps.
        seconds: Time without evaluations.
        samples: Rollouts sampled.
        sampled_tokens: Their tokens.
        unique_tokens: Tokens computed.
    """

    arm: str
    steps: Spread
    seconds: Spread
    samples: Spread
    sampled_tokens: Spread
    unique_tokens: Spread

    def of(self, unit: Unit) -> Spread:
        """Return the cost in one unit."""
        spread: Spread = getattr(self, unit)
        return spread


def match_at(arms: Sequence[Arm], unit: Unit, eval_point: float) -> tuple[RunMatch, ...]:
    """Return for every run whether it is matched at an evaluation point, in the order of arms and runs.

    A run that ended early spent less than the others and counts as matched, because it could not have spent more.

    Args:
        arms: The arms.
        unit: Unit of the evaluation point.
        eval_point: The amount.

    Raises:
        ValueError: If a run was not evaluated there and did not end early.
    """
    return tuple(_match(arm, run, unit, eval_point) for arm in arms for run in arm.runs)


def unmatched_runs(matches: Sequence[RunMatch]) -> tuple[str, ...]:
    """Return a sentence for each run that overshot by more than `TOLERANCE`; none if all runs are matched."""
    return tuple(run.words for run in matches if not run.matched and run.words)


def costs_at(arm: Arm, unit: Unit, eval_point: float) -> ArmCosts:
    """Return the costs of an arm's runs at an evaluation point, in every unit.

    Args:
        arm: The arm, with at least one run.
        unit: Unit of the evaluation point.
        eval_point: The amount.

    Raises:
        ValueError: If a run was not evaluated there and did not end early.
    """
    costs = [score_at(run, unit, eval_point).cost for run in arm.runs]
    units = ("steps", "seconds", "samples", "sampled_tokens", "unique_tokens")
    return ArmCosts(arm.name, *(Spread.of([getattr(cost, name) for cost in costs]) for name in units))


def _match(arm: Arm, run: RunScores, unit: Unit, eval_point: float) -> RunMatch:
    spent = score_at(run, unit, eval_point).cost
    used, budget = amount(spent.of(unit), unit), amount(eval_point, unit)
    over = spent.of(unit) / eval_point - 1
    if over < 0:
        words = (
            f"{arm.name}, seed {run.seed}, ended early at {used} of {budget} ({run.ended_early}); its last score "
            "counts, because it could not spend more"
        )
        return RunMatch(arm.name, run.seed, spent, run.ended_early, True, words)
    if spent.of(unit) <= eval_point * (1 + TOLERANCE):
        return RunMatch(arm.name, run.seed, spent, None, True, None)
    words = (
        f"arm {arm.name}, seed {run.seed}: not matched at {budget}; the step that reached it ended at {used}, "
        f"{over:.0%} more (at most {TOLERANCE:.0%} counts as matched): raise the budget, or lower the arm's "
        "prompts_per_step to make its steps smaller"
    )
    return RunMatch(arm.name, run.seed, spent, None, False, words)
