"""The prompts that an arm gained and lost since the checkpoint.

A prompt is solved if at least one of n responses is correct. At low pass rates that depends on n, so every count comes
with the expected number of prompts solved in k attempts, which does not, and with the gains and losses that luck alone
would give. A change counts only if its interval excludes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brorl.comparison.arms import Arm, Comparison, num_correct_at
from brorl.comparison.matching import Spread
from brorl.evaluation.paired import CorrectedInterval, mean_over_runs
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.format import Estimate


@dataclass(frozen=True)
class CoverageChange:
    """Prompts that the runs of an arm solve and the start did not, and the reverse."""

    arm: str
    gained: Spread  # prompts solved now and not at the start, over runs
    lost: Spread  # prompts solved at the start and not now
    by_chance: Spread  # gains (and as many losses) to expect if no pass rate had changed
    expected: Spread  # prompts that k attempts are expected to solve now (the sum of pass@k)
    expected_change: Estimate  # that minus the same at the start, with a 95% interval, in prompts
    # the same with an interval corrected for the number of arms; in its conclusion the start is A
    corrected: CorrectedInterval
    gained_ids: tuple[str, ...]  # prompts that a majority of the runs gained
    lost_ids: tuple[str, ...]  # prompts that a majority of the runs lost


def coverage_change(comparison: Comparison, arm: Arm, spent: float, k: int, num_intervals: int = 1) -> CoverageChange:
    """Count the prompts that the runs of an arm gained and lost since the start.

    Gains and losses by chance: if a prompt's pass rate had not changed, its c correct responses of both evaluations
    would fall on either with equal probability, and all of them on one evaluation of n with the probability
    C(2n - c, n) / C(2n, n). Evaluations that share random numbers differ less, so this is rather too many.

    The expected numbers are of k attempts. The corrected interval holds together with those of `num_intervals` arms.
    """
    n = comparison.num_samples
    start_SP, end_SP = num_correct_at(comparison, arm, 0), num_correct_at(comparison, arm, spent)
    gained_SP, lost_SP = (start_SP == 0) & (end_SP > 0), (start_SP > 0) & (end_SP == 0)
    total_SP = start_SP + end_SP
    before_SP, after_SP = pass_at_k(start_SP, n, k), pass_at_k(end_SP, n, k)

    def change_at(level: float) -> Estimate:
        return _in_prompts(mean_over_runs(after_SP - before_SP, lowest=-1, level=level), comparison)

    return CoverageChange(
        arm=arm.name,
        gained=_total(gained_SP),
        lost=_total(lost_SP),
        by_chance=_total(np.where(total_SP > 0, 1 - pass_at_k(total_SP, 2 * n, n), 0.0)),
        expected=_total(after_SP),
        expected_change=change_at(0.95),
        corrected=CorrectedInterval.of(change_at, num_intervals),
        gained_ids=_ids(comparison, gained_SP.mean(0) > 0.5),
        lost_ids=_ids(comparison, lost_SP.mean(0) > 0.5),
    )


def _total(value_SP: NDArray[Any]) -> Spread:
    """Return the spread over runs of a sum over prompts."""
    return Spread.of([float(total) for total in value_SP.sum(1)])


def _in_prompts(fraction: Estimate, comparison: Comparison) -> Estimate:
    number = len(comparison.prompts)
    return Estimate(fraction.value * number, fraction.low * number, fraction.high * number)


def _ids(comparison: Comparison, chosen_P: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(prompt.id for prompt, chosen in zip(comparison.prompts, chosen_P, strict=True) if chosen)
