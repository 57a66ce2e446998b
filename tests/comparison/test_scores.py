"""Scores of arms at amounts of the budget, against loops over their runs."""

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.scores import have_same_seeds, scores_at, start_scores
from brorl.cost import Cost
from brorl.evaluation.pass_at_k import pass_at_k


def test_arms_of_a_comparison_are_paired_by_seed(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (2, 3, 2, 15))  # arms, seeds, evaluations, prompts
    seeds = [[4, 1, 9], [9, 4, 1]]
    arms = [
        arm_of(name, [
            run_of(seed, [score_of(Cost(seconds=10.0 * e), row) for e, row in enumerate(evaluations)])
            for seed, evaluations in zip(order, of_arm, strict=True)
        ])
        for name, order, of_arm in zip("ab", seeds, counts, strict=True)
    ]  # fmt: skip
    comparison = comparison_of(arms, [10], 8)
    assert have_same_seeds(*arms)
    a_SP, b_SP = counts[0, [1, 0, 2], 1], counts[1, [2, 1, 0], 1]  # by seed: 1, 4, 9
    for k in (1, 3):
        for arm, of_arm in zip(arms, (a_SP, b_SP), strict=True):
            expected_SP = np.stack([pass_at_k(row, 8, k) for row in of_arm])
            np.testing.assert_array_equal(scores_at(comparison, arm, 10, k), expected_SP)
    np.testing.assert_array_equal(scores_at(comparison, arms[1], 0), counts[1, [2, 1, 0], 0] / 8)
    other = arm_of("c", [run_of(s, [score_of(Cost(), counts[0, 0, 0])]) for s in (4, 1, 1)])
    assert not have_same_seeds(arms[0], other)
    assert not have_same_seeds(other, other)
    with pytest.raises(ValueError, match="arm none has no run"):
        scores_at(comparison, arm_of("none", []), 10)


def test_the_start_is_averaged_over_the_runs_of_a_seed(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (2, 2, 12))  # arms, seeds, prompts
    arms = [
        arm_of(name, [run_of(seed, [score_of(Cost(), row_P)]) for seed, row_P in enumerate(of_arm)])
        for name, of_arm in zip("ab", counts, strict=True)
    ]
    expected = [(pass_at_k(counts[0, s], 8, 2) + pass_at_k(counts[1, s], 8, 2)) / 2 for s in range(2)]
    np.testing.assert_allclose(start_scores(comparison_of(arms, [1], 8), 2), expected, atol=1e-15)
