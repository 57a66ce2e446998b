"""The same runs compared at equal cost, in any unit.

Scores lie on straight lines between evaluations. None is read between the start and a run's first evaluation, between
two evaluations that lie a factor of more than about 2 apart, or beyond the last one. docs/explanation/comparing.md has
the reasons, and the error rates in simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from brorl.arrays import FloatArray
from brorl.comparison.arms import Arm, Comparison, have_same_seeds
from brorl.cost import Unit
from brorl.evaluation.paired import CorrectedInterval, PairedDifference, mean_over_runs, paired_difference
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate

_FARTHEST = 2.1  # cost of one evaluation over that of the one before: points that double, overshot by 5%


@dataclass(frozen=True)
class EqualCost:
    """An arm against the first where each of their runs had spent the same; None where a score is not known."""

    arm: str
    unit: Unit
    amount: float  # the amount: the largest that every run of the two reached
    scores: Mapping[int, Estimate | None]  # pass@k of the arm, by k, with a 95% interval over prompts and seeds
    differences: Mapping[int, PairedDifference | None]  # that minus pass@k of the first arm
    # the same with an interval corrected for the number of known differences of its table
    corrected: Mapping[int, CorrectedInterval | None] = field(default_factory=dict)

    def corrected_for(self, number: int) -> dict[int, CorrectedInterval | None]:
        """Return the differences with intervals corrected for so many."""
        return {k: None if d is None else CorrectedInterval.of(d.at_level, number) for k, d in self.differences.items()}


def equal_amount(arms: Sequence[Arm], unit: Unit) -> float:
    """Return the largest amount of a unit that every run reached; a run that ended early does not limit it."""
    runs = [run for arm in arms for run in arm.runs]
    limiting = [run for run in runs if run.ended_early is None] or runs
    return min(run.scores[-1].cost.of(unit) for run in limiting)


def at_equal_cost(comparison: Comparison, arm: Arm, unit: Unit, ks: Sequence[int]) -> EqualCost:
    """Compare an arm with the first of a comparison at the largest cost in a unit that every run of the two reached."""
    first = comparison.arms[0]
    amount = equal_amount([first, arm], unit)
    scores: dict[int, Estimate | None] = {}
    differences: dict[int, PairedDifference | None] = {}
    for k in ks:
        a_SP, b_SP = (scores_at_cost(comparison, one, unit, amount, k) for one in (first, arm))
        scores[k] = None if b_SP is None else mean_over_runs(b_SP)
        differences[k] = None
        if a_SP is not None and b_SP is not None:
            differences[k] = paired_difference(a_SP, b_SP, seeds_paired=have_same_seeds(first, arm))
    return EqualCost(arm.name, unit, amount, scores, differences)


def scores_at_cost(comparison: Comparison, arm: Arm, unit: Unit, amount: float, k: int = 1) -> FloatArray | None:
    """Return an arm's pass@k on each prompt at a cost, on straight lines between evaluations.

    A run that ended early keeps its last score.

    Returns:
        Scores, shape [S, P], runs by seed; None if a run has no evaluations close enough to the cost.

    Raises:
        ValueError: If k is above n.
    """
    rows = []
    for run in sorted(arm.runs, key=lambda run: run.seed):
        costs = [score.cost.of(unit) for score in run.scores]
        after = next((i for i, cost in enumerate(costs) if cost >= amount), len(costs) - 1)
        before = max(after - 1, 0)
        width = costs[after] - costs[before]
        fraction = min((amount - costs[before]) / width, 1.0) if width > 0 else 1.0
        if 0 < fraction < 1 and costs[after] > _FARTHEST * costs[before]:
            return None
        ends = [pass_at_k(run.scores[i].num_correct_P, comparison.num_samples, k) for i in (before, after)]
        rows.append((1 - fraction) * ends[0] + fraction * ends[1])
    return np.stack(rows)
