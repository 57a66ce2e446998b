"""Prompts gained and lost against sets; luck's share against every way to deal out the correct responses."""

from itertools import combinations

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.results import coverage_change
from brorl.comparison.scores import Arm
from brorl.cost import Cost
from brorl.evaluation.pass_at_k import pass_at_k


def random_arms(rng: np.random.Generator, seeds: int, prompts: int) -> tuple[list[Arm], np.ndarray]:
    """Two arms of some runs, each evaluated at the start and after 10 s with 4 responses, half of the counts 0."""
    counts = rng.integers(0, 5, (2, seeds, 2, prompts)) * rng.integers(0, 2, (2, seeds, 2, prompts))
    arms = []
    for name, of_arm in zip("ab", counts, strict=True):
        scores = [[score_of(Cost(seconds=10.0 * e), row) for e, row in enumerate(run)] for run in of_arm]
        arms.append(arm_of(name, [run_of(seed, row) for seed, row in enumerate(scores)]))
    return arms, counts


def test_gains_and_losses_are_those_of_sets(rng: np.random.Generator) -> None:
    arms, counts = random_arms(rng, 3, 30)
    comparison = comparison_of(arms, [10], 4)
    found = coverage_change(comparison, arms[1], 10, 2)
    gained, lost = [], []
    for start, end in counts[1]:
        before, after = ({p for p in range(30) if row[p] > 0} for row in (start, end))
        gained.append(after - before)
        lost.append(before - after)
    for spread, sets in ((found.gained, gained), (found.lost, lost)):
        sizes = [len(s) for s in sets]
        assert (spread.least, spread.most) == (min(sizes), max(sizes))
        assert spread.mean == pytest.approx(sum(sizes) / 3)
    assert found.arm == "b"


def test_expected_numbers_are_sums_of_pass_at_k(rng: np.random.Generator) -> None:
    arms, counts = random_arms(rng, 3, 20)
    found = coverage_change(comparison_of(arms, [10], 4), arms[0], 10, 3)
    before, after = (np.array([pass_at_k(run[e], 4, 3).sum() for run in counts[0]]) for e in (0, 1))
    spread = found.expected
    assert [spread.mean, spread.least, spread.most] == pytest.approx([after.mean(), after.min(), after.max()])
    change = found.expected_change
    assert change.value == pytest.approx((after - before).mean(), abs=1e-12)
    assert -20 <= change.low <= change.value <= change.high <= 20


def test_gains_by_chance_are_those_of_every_deal() -> None:
    """Of c correct responses among 2n, every set of n is as likely to be the start's."""
    n = 3
    pairs = [(0, 0), (0, 1), (2, 0), (0, 3), (1, 2), (3, 3), (1, 1)]
    expected = 0.0
    for start, end in pairs:
        correct = [1] * (start + end) + [0] * (2 * n - start - end)
        deals = list(combinations(range(2 * n), n))
        gains = [sum(correct) > 0 and not any(correct[i] for i in deal) for deal in deals]
        expected += sum(gains) / len(deals)
    run = run_of(0, [score_of(Cost(seconds=10.0 * e), [pair[e] for pair in pairs]) for e in (0, 1)])
    arms = [arm_of("a", [run])]
    found = coverage_change(comparison_of(arms, [10], n), arms[0], 10, 1)
    assert found.by_chance.mean == pytest.approx(expected, rel=1e-12)


def test_luck_alone_gives_as_many_gains_as_said() -> None:
    """Evaluations of an unchanged model: gains, and losses, agree with what is expected by chance."""
    generator = np.random.default_rng(8)
    chance_P = generator.beta(0.4, 3, 4000)
    run = run_of(0, [score_of(Cost(seconds=10.0 * e), generator.binomial(8, chance_P)) for e in (0, 1)])
    arms = [arm_of("a", [run])]
    found = coverage_change(comparison_of(arms, [10], 8), arms[0], 10, 1)
    assert found.by_chance.mean > 200
    assert found.gained.mean == pytest.approx(found.by_chance.mean, rel=0.15)
    assert found.lost.mean == pytest.approx(found.by_chance.mean, rel=0.15)
