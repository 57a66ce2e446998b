"""Prompts gained and lost since the checkpoint, and prompts that one arm solves and the other does not.

In: a comparison, an amount of the budget. Out: counts and names of prompts, and how many gains and losses luck
alone would give. A prompt is solved if at least one of n responses is correct. At low pass rates that depends on n, so
every count comes with the expected number of prompts solved in k attempts, which does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison
from brorl.comparison.corrected_interval import CorrectedInterval, corrected_level
from brorl.comparison.matching import Spread
from brorl.comparison.paired import difference_interval, mean_over_runs
from brorl.comparison.scores import have_same_seeds, num_correct_at
from brorl.evaluation.pass_at_k import Estimate, pass_at_k


@dataclass(frozen=True)
class CoverageChange:
    """Prompts that the runs of an arm solve and the start did not, and the reverse.

    Attributes:
        arm: The arm's name.
        gained: Prompts solved now and not at the start, over runs.
        lost: Prompts solved at the start and not now.
        kept: Prompts solved at both.
        by_chance: Gains (and as many losses) to expect if no pass rate had changed.
        k: Attempts of the expected numbers.
        expected_start: Prompts that k attempts of the start are expected to solve (the sum of pass@k).
        expected_end: The same now.
        expected_change: Their difference with a 95% interval, in prompts.
        corrected: The same with an interval corrected for the number of arms; in its conclusion the start is A.
        gained_ids: Prompts that a majority of the runs gained.
        lost_ids: Prompts that a majority of the runs lost.
    """

    arm: str
    gained: Spread
    lost: Spread
    kept: Spread
    by_chance: Spread
    k: int
    expected_start: Spread
    expected_end: Spread
    expected_change: Estimate
    corrected: CorrectedInterval
    gained_ids: tuple[str, ...]
    lost_ids: tuple[str, ...]


@dataclass(frozen=True)
class CoverageDifference:
    """Prompts that one arm solves and the other does not. A prompt that exactly half of the runs solve is on no side.

    Attributes:
        only_a: Prompts that more than half of A's runs solve and fewer than half of B's.
        only_b: The reverse.
        both: Number of prompts that more than half of the runs of each solve.
        neither: Number of prompts that fewer than half of the runs of each solve.
        k: Attempts of the expected number.
        expected: B's expected number of prompts solved in k attempts less A's, with a 95% interval.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    both: int
    neither: int
    k: int
    expected: Estimate


def coverage_change(comparison: Comparison, arm: Arm, spent: float, k: int, num_intervals: int = 1) -> CoverageChange:
    """Count the prompts that the runs of an arm gained and lost since the start.

    Gains and losses by chance: if a prompt's pass rate had not changed, its c correct responses of both evaluations
    would fall on either with equal probability, and all of them on one evaluation of n with the probability
    C(2n - c, n) / C(2n, n). Evaluations that fraction random numbers differ less, so this is rather too many.

    Args:
        comparison: The comparison.
        arm: One of its arms.
        spent: Amount of the budget, in the comparison's unit.
        k: Attempts of the expected numbers, 1 to n.
        num_intervals: Number of arms whose changes are shown together, for the corrected interval.

    Raises:
        ValueError: If a run was not evaluated there and did not end early, or k is not 1 to n.
    """
    n = comparison.num_samples
    start_SP, end_SP = num_correct_at(comparison, arm, 0), num_correct_at(comparison, arm, spent)
    gained_SP, lost_SP = (start_SP == 0) & (end_SP > 0), (start_SP > 0) & (end_SP == 0)
    total_SP = start_SP + end_SP
    before_SP, after_SP = pass_at_k(start_SP, n, k), pass_at_k(end_SP, n, k)
    own, wide = (
        _in_prompts(mean_over_runs(after_SP - before_SP, lowest=-1, level=level), comparison)
        for level in (0.95, corrected_level(num_intervals))
    )
    return CoverageChange(
        arm=arm.name,
        gained=_total(gained_SP),
        lost=_total(lost_SP),
        kept=_total((start_SP > 0) & (end_SP > 0)),
        by_chance=_total(np.where(total_SP > 0, 1 - pass_at_k(total_SP, 2 * n, n), 0.0)),
        k=k,
        expected_start=_total(before_SP),
        expected_end=_total(after_SP),
        expected_change=own,
        corrected=CorrectedInterval.of(wide, num_intervals),
        gained_ids=_ids(comparison, gained_SP.mean(0) > 0.5),
        lost_ids=_ids(comparison, lost_SP.mean(0) > 0.5),
    )


def coverage_difference(comparison: Comparison, spent: float, k: int) -> CoverageDifference:
    """Find the prompts that one of two arms solves and the other does not.

    Args:
        comparison: The comparison, of two arms.
        spent: Amount of the budget, in the comparison's unit.
        k: Attempts of the expected number, 1 to n.

    Raises:
        ValueError: If a run was not evaluated there and did not end early, or k is not 1 to n.
    """
    counts = [num_correct_at(comparison, arm, spent) for arm in comparison.arms]
    share_a_P, share_b_P = ((count_SP > 0).mean(0) for count_SP in counts)
    score_a_SP, score_b_SP = (pass_at_k(count_SP, comparison.num_samples, k) for count_SP in counts)
    difference = difference_interval(score_a_SP, score_b_SP, seeds_paired=have_same_seeds(*comparison.arms))
    return CoverageDifference(
        only_a=_ids(comparison, (share_a_P > 0.5) & (share_b_P < 0.5)),
        only_b=_ids(comparison, (share_b_P > 0.5) & (share_a_P < 0.5)),
        both=int(((share_a_P > 0.5) & (share_b_P > 0.5)).sum()),
        neither=int(((share_a_P < 0.5) & (share_b_P < 0.5)).sum()),
        k=k,
        expected=_in_prompts(difference, comparison),
    )


def _total(value_SP: NDArray[Any]) -> Spread:
    """Return the spread over runs of a sum over prompts."""
    return Spread.of([float(total) for total in value_SP.sum(1)])


def _in_prompts(fraction: Estimate, comparison: Comparison) -> Estimate:
    number = len(comparison.prompts)
    return Estimate(fraction.value * number, fraction.low * number, fraction.high * number)


def _ids(comparison: Comparison, chosen_P: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(prompt.id for prompt, chosen in zip(comparison.prompts, chosen_P, strict=True) if chosen)
