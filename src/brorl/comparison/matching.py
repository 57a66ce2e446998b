"""Compute-matched: equal on one named unit of cost, and refused that name where it is not.

In: what the steps of runs cost, and what the runs scored on the way. Out: where a run stood when it had spent a given
amount, and whether runs are matched there. Evaluations are not part of any cost. It refuses marks that a run did not
reach, unless the run ended by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brorl.comparison.arms import Arm, Score, Trajectory
from brorl.cost import Cost, Unit, amount

TOLERANCE = 0.05  # runs count as matched if none spent more than this beyond the mark


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
        """Return the spread of some values, at least one."""
        if not values:
            raise ValueError("a spread needs the value of at least one run")
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class RunMatch:
    """Where one run stood at a mark.

    Attributes:
        arm: Its arm's name.
        seed: Its seed.
        spent: What it had spent when it was evaluated for the mark.
        ended_early: Why it ended before the mark; None if it did not.
        matched: Whether it spent at most `TOLERANCE` more than the mark.
        words: What a reader must know: by how much it overshot and how to mend that, or that it ended early; else None.
    """

    arm: str
    seed: int
    spent: Cost
    ended_early: str | None
    matched: bool
    words: str | None


@dataclass(frozen=True)
class ArmCosts:
    """What the runs of an arm had spent at a mark, in every unit.

    Attributes:
        arm: The arm's name.
        steps: Steps.
        seconds: Wall time without evaluations.
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


def score_at(trajectory: Trajectory, unit: Unit, mark: float) -> Score:
    """Return the first evaluation of a run at which it had spent a given amount.

    A run that ended early by itself keeps its last score at all later marks: it could not use more.

    Args:
        trajectory: The run.
        unit: What is counted.
        mark: How much of it; 0 is the start.

    Returns:
        The evaluation; its cost says how much the run had really spent.

    Raises:
        ValueError: If the run was not evaluated there, and did not end by itself.
    """
    if not trajectory.scores:
        raise ValueError(f"the run in {trajectory.path} has no evaluation; compare runs that were evaluated")
    for score in trajectory.scores:
        if score.cost.of(unit) >= mark:
            return score
    last = trajectory.scores[-1]
    if trajectory.ended_early is None:
        raise ValueError(
            f"the run in {trajectory.path} (seed {trajectory.seed}) has no evaluation at {amount(mark, unit)} or "
            f"later: the last is at {amount(last.cost.of(unit), unit)}; finish the run, or compare at less"
        )
    return last


def starts_by_seed(arms: Sequence[Arm]) -> list[list[Score]]:
    """Return how the checkpoint scored in the evaluations that runs begin with, those of one seed together.

    Runs of one seed evaluate the same model on the same prompts with the same random numbers, whatever their arm: that
    is one evaluation made several times, and several only where runs differ in how they are evaluated.

    Args:
        arms: The arms.

    Raises:
        ValueError: If a run was not evaluated at its start.
    """
    starts: dict[int, list[Score]] = {}
    for arm in arms:
        for run in arm.trajectories:
            starts.setdefault(run.seed, []).append(score_at(run, "steps", 0))
    return [starts[seed] for seed in sorted(starts)]


def match_at(arms: Sequence[Arm], unit: Unit, mark: float) -> tuple[RunMatch, ...]:
    """Return of every run whether it is matched at a mark, in the order of arms and runs.

    A run that ended early spent less than the others and counts as matched, since it could not have used more; its
    words say so.

    Args:
        arms: The arms.
        unit: What is counted.
        mark: How much of it.

    Raises:
        ValueError: If a run was not evaluated there, and did not end by itself.
    """
    return tuple(_match(arm, run, unit, mark) for arm in arms for run in arm.trajectories)


def mismatch(arms: Sequence[Arm], unit: Unit, mark: float) -> tuple[str, ...]:
    """Say of each run that overshot a mark by more than `TOLERANCE` by how much, and how to mend it.

    Args:
        arms: The arms.
        unit: What is counted.
        mark: How much of it.

    Returns:
        A line for each such run; none if all runs are matched.

    Raises:
        ValueError: If a run was not evaluated there, and did not end by itself.
    """
    return tuple(run.words for run in match_at(arms, unit, mark) if not run.matched and run.words)


def costs_at(arm: Arm, unit: Unit, mark: float) -> ArmCosts:
    """Return what an arm's runs had spent in every unit when they were evaluated for a mark.

    Args:
        arm: The arm, with at least one run.
        unit: What the mark counts.
        mark: How much of it.

    Raises:
        ValueError: If a run was not evaluated there, and did not end by itself.
    """
    costs = [score_at(run, unit, mark).cost for run in arm.trajectories]
    return ArmCosts(
        arm=arm.name,
        steps=Spread.of([c.steps for c in costs]),
        seconds=Spread.of([c.seconds for c in costs]),
        samples=Spread.of([c.samples for c in costs]),
        sampled_tokens=Spread.of([c.sampled_tokens for c in costs]),
        unique_tokens=Spread.of([c.unique_tokens for c in costs]),
    )


def _match(arm: Arm, run: Trajectory, unit: Unit, mark: float) -> RunMatch:
    spent = score_at(run, unit, mark).cost
    used = spent.of(unit)
    matched = used <= mark * (1 + TOLERANCE)
    ended_early = run.ended_early if used < mark else None
    words = None
    if ended_early is not None:
        words = (
            f"{arm.name}, seed {run.seed}, ended early at {amount(used, unit)} of {amount(mark, unit)} "
            f"({ended_early}); its last score counts, since it could not use more"
        )
    elif not matched:
        words = (
            f"arm {arm.name}, seed {run.seed}: not matched at {amount(mark, unit)}; it had spent {amount(used, unit)} "
            f"after the step that reached the mark, {used / mark - 1:.0%} more (at most {TOLERANCE:.0%} counts as "
            "matched): raise the budget, or lower the arm's prompts_per_step so that its steps are smaller"
        )
    return RunMatch(arm.name, run.seed, spent, ended_early, matched, words)
