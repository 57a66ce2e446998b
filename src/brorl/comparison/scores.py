"""Scores of arms at evaluation points, as arrays of runs and prompts.

In: a comparison. Out: for each run the evaluation at which it had spent a given amount, and pass@k or worst@k of each
prompt there. A run that was not evaluated there is an error, unless it ended early: then its last score counts, because
it could not have spent more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison, IntArray, RunScores, Score
from brorl.cost import Unit, amount
from brorl.evaluation.pass_at_k import FloatArray, pass_at_k, worst_at_k


@dataclass(frozen=True)
class Measure:
    """A score of a prompt: pass@k (one of k responses is correct: coverage) or worst@k (all are: sharpness).

    Attributes:
        k: Number of responses.
        worst: Whether it is worst@k.
    """

    k: int = 1
    worst: bool = False

    @property
    def name(self) -> str:
        """Its name: pass@1, pass@16, worst@16."""
        return f"{'worst' if self.worst else 'pass'}@{self.k}"

    def of(self, num_correct: NDArray[np.int64], num_samples: int) -> FloatArray:
        """Return the scores of prompts with so many correct responses among n."""
        return (worst_at_k if self.worst else pass_at_k)(num_correct, num_samples, self.k)


PASS_1 = Measure()


def score_at(run: RunScores, unit: Unit, spent: float) -> Score:
    """Return the first evaluation of a run at which it had spent a given amount.

    Args:
        run: The run.
        unit: Unit of the amount.
        spent: The amount; 0 is the start.

    Returns:
        The evaluation; its cost is the real cost of the run.

    Raises:
        ValueError: If the run was not evaluated there and did not end early.
    """
    if not run.scores:
        raise ValueError(f"the run in {run.path} has no evaluation; compare runs that were evaluated")
    for score in run.scores:
        if score.cost.of(unit) >= spent:
            return score
    last = run.scores[-1]
    if run.ended_early is None:
        raise ValueError(
            f"the run in {run.path} (seed {run.seed}) has no evaluation at {amount(spent, unit)} or later: the last is "
            f"at {amount(last.cost.of(unit), unit)}; finish the run, or compare at a smaller amount"
        )
    return last


def num_correct_at(comparison: Comparison, arm: Arm, spent: float) -> IntArray:
    """Return the number of correct responses to each prompt at an amount of the budget, shape [S, P], runs by seed."""
    runs = sorted(arm.runs, key=lambda run: run.seed)
    if not runs:
        raise ValueError(f"arm {arm.name} has no run to compare")
    return np.stack([score_at(run, comparison.unit, spent).num_correct_P for run in runs])


def scores_at(comparison: Comparison, arm: Arm, spent: float, measure: Measure = PASS_1) -> FloatArray:
    """Return an arm's score on each prompt.

    Args:
        comparison: The comparison.
        arm: One of its arms.
        spent: The amount, in the comparison's unit; 0 is the start.
        measure: The score.

    Returns:
        Scores, shape [S, P], runs by seed.
    """
    return np.stack([measure.of(row_P, comparison.num_samples) for row_P in num_correct_at(comparison, arm, spent)])


def start_scores(comparison: Comparison, measure: Measure = PASS_1) -> FloatArray:
    """Return the checkpoint's scores as measured with each seed, shape [seeds of all arms, P]."""
    return np.stack([
        np.mean([measure.of(score.num_correct_P, comparison.num_samples) for score in of_seed], axis=0)
        for of_seed in starts_by_seed(comparison.arms)
    ])  # fmt: skip


def starts_by_seed(arms: Sequence[Arm]) -> list[list[Score]]:
    """Return the evaluations of the checkpoint that runs begin with, those of one seed together.

    Runs of one seed evaluate the same model on the same prompts with the same random numbers, whatever their arm: that
    is one evaluation made several times. The results differ only if the runs are evaluated differently.
    """
    starts: dict[int, list[Score]] = {}
    for arm in arms:
        for run in arm.runs:
            starts.setdefault(run.seed, []).append(score_at(run, "steps", 0))
    return [starts[seed] for seed in sorted(starts)]


def have_same_seeds(a: Arm, b: Arm) -> bool:
    """Return whether two arms have runs of the same seeds, each once, so that the runs are paired."""
    seeds_a, seeds_b = ([run.seed for run in arm.runs] for arm in (a, b))
    return sorted(seeds_a) == sorted(seeds_b) and len(set(seeds_a)) == len(seeds_a)
