"""The same runs compared at equal cost in every unit, not only in the one that the budget counts.

In: a comparison whose runs were evaluated on the way. Out: the arms' scores where each run had spent the same amount of
another unit, read off straight lines between its evaluations. Nothing is read off between the start and a run's first
evaluation, between two evaluations that lie far apart, or beyond the last one.

A score rises by less and less, so a long straight line runs below it, and of two arms of one distribution the one that
was evaluated there seems to lead. In 100 simulated comparisons of two such arms (100 prompts, 32 samples, 5 seeds; one
arm evaluated at the cost itself, the other before and after it, where the score still rises) a difference was found in
5 where the two evaluations were a factor of 1.4 apart (the default marks), in 12 at 2, in 70 at 4, in 99 at 8, and in
all from the start. Hence the limit of about 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brorl.comparison.arms import Arm, Comparison, Score, Trajectory
from brorl.comparison.paired import Measure, PairedDifference, have_same_seeds, mean_over_runs, paired_difference
from brorl.cost import Unit
from brorl.evaluation.pass_at_k import Estimate, FloatArray, pass_at_k, worst_at_k

_FARTHEST = 2.1  # one evaluation's cost, as a multiple of that before it: marks that double, overshot by 5%


@dataclass(frozen=True)
class EqualCost:
    """Scores of all arms where each of their runs had spent the same.

    Attributes:
        unit: Of what.
        amount: How much: the most that every run reached.
        scores: Score of each arm, with a 95% interval over prompts and seeds; None if it is not known.
        difference: The second arm less the first; None for more than two arms, and if a score is not known.
        not_evaluated: Names of the arms whose score is not known: a run has no evaluations close enough to this cost.
    """

    unit: Unit
    amount: float
    scores: tuple[Estimate | None, ...]
    difference: PairedDifference | None
    not_evaluated: tuple[str, ...]


def at_equal_cost(comparison: Comparison, unit: Unit, measure: Measure = "pass@1", k: int = 1) -> EqualCost:
    """Compare the arms at the largest cost in a unit that every run reached.

    A run that ended early by itself keeps its last score, and does not limit how far the others are looked at.

    Args:
        comparison: What is compared.
        unit: What is to be equal.
        measure: What is scored.
        k: Of best@k and worst@k.

    Raises:
        ValueError: If k is not 1 to n.
    """
    runs = [run for arm in comparison.arms for run in arm.trajectories]
    limiting = [run for run in runs if run.ended_early is None] or runs
    amount = min(run.scores[-1].cost.of(unit) for run in limiting)
    score_A = [
        scores_at_cost(comparison, arm, unit, amount, measure, k) if is_evaluated_near(arm, unit, amount) else None
        for arm in comparison.arms
    ]
    not_evaluated = tuple(arm.name for arm, score_SP in zip(comparison.arms, score_A, strict=True) if score_SP is None)
    known = [score_SP for score_SP in score_A if score_SP is not None]
    difference = None
    if len(known) == len(comparison.arms) == 2:
        difference = paired_difference(*known, seeds_paired=have_same_seeds(*comparison.arms))
    scores = tuple(None if score_SP is None else mean_over_runs(score_SP) for score_SP in score_A)
    return EqualCost(unit, amount, scores, difference, not_evaluated)


def is_evaluated_near(arm: Arm, unit: Unit, amount: float) -> bool:
    """Return whether every run of an arm was evaluated at a cost, or before and after it and not too far apart."""
    for run in arm.trajectories:
        before, after, share = _around(run, unit, amount)
        if 0 < share < 1 and after.cost.of(unit) > _FARTHEST * before.cost.of(unit):
            return False
    return True


def scores_at_cost(
    comparison: Comparison, arm: Arm, unit: Unit, amount: float, measure: Measure = "pass@1", k: int = 1
) -> FloatArray:
    """Return an arm's score on each prompt at a cost, on straight lines between evaluations.

    Args:
        comparison: What is compared.
        arm: One of its arms.
        unit: What is counted.
        amount: How much of it; a run that did not spend as much keeps its last score.
        measure: What is scored.
        k: Of best@k and worst@k.

    Returns:
        Scores, shape [S, P], runs by seed.

    Raises:
        ValueError: If a run was not evaluated near that cost, or k is not 1 to n.
    """
    if not is_evaluated_near(arm, unit, amount):
        raise ValueError(f"a run of {arm.name} was not evaluated near {amount} {unit}, so its score there is not known")
    estimate = worst_at_k if measure == "worst@k" else pass_at_k
    attempts = 1 if measure == "pass@1" else k
    rows = []
    for run in sorted(arm.trajectories, key=lambda run: run.seed):
        before, after, share = _around(run, unit, amount)
        ends = [estimate(score.num_correct_P, comparison.num_samples, attempts) for score in (before, after)]
        rows.append((1 - share) * ends[0] + share * ends[1])
    return np.stack(rows)


def _around(run: Trajectory, unit: Unit, amount: float) -> tuple[Score, Score, float]:
    """Return the evaluations around a cost, and how far it lies from the first to the second."""
    costs = [score.cost.of(unit) for score in run.scores]
    after = next((i for i, cost in enumerate(costs) if cost >= amount), len(costs) - 1)
    before = max(after - 1, 0)
    width = costs[after] - costs[before]
    share = min((amount - costs[before]) / width, 1.0) if width > 0 else 1.0
    return run.scores[before], run.scores[after], share
