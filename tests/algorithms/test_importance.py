"""The factors of importance between two policies, and those of a subset of the responses."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from brorl.algorithms.importance import (
    choose,
    choose_responses,
    importance_factors,
    inclusion_probabilities,
    mismatch,
)
from brorl.algorithms.losses import node_weights
from brorl.algorithms.settings import ImportanceCorrection
from brorl.tree import RolloutTree
from small_models import random_tree, rollouts


def apart(rng: np.random.Generator, num_rollouts: int = 40) -> tuple[RolloutTree, np.ndarray]:
    """A tree with the sampler's log-probs, and those of an old policy some way from them."""
    tree = random_tree(rng, num_rollouts=num_rollouts)
    sampler_M = rng.uniform(-4, -0.5, tree.num_unique_tokens)
    return replace(tree, logprob=sampler_M), sampler_M + rng.normal(size=sampler_M.size) * 0.4


def test_mismatch_equals_a_loop_over_the_tokens_of_several_trees(rng: np.random.Generator) -> None:
    pairs = [apart(rng, num_rollouts=n) for n in (5, 20, 60)]
    ratios = [
        math.exp(old_M[node] - tree.logprob[node])
        for tree, old_M in pairs
        for _, path in rollouts(tree)
        for node in path
    ]
    measured = mismatch(*zip(*pairs, strict=True))
    assert measured["mismatch_mean"] == pytest.approx(np.mean(ratios), rel=1e-12)
    assert measured["mismatch_max"] == pytest.approx(max(ratios), rel=1e-12)
    assert measured["mismatch_kl"] == pytest.approx(np.mean([r - 1 - math.log(r) for r in ratios]), rel=1e-9)


def test_over_every_token_in_its_share_the_mean_is_one_and_the_estimate_is_the_divergence(
    rng: np.random.Generator,
) -> None:
    """A tree of one token a response, whose counts are the sampler's probabilities times N: means are exact."""
    count = rng.integers(1, 9, 12)
    sampler = count / count.sum()
    old = rng.dirichlet(np.ones(12))
    responses = [[token] for token, c in enumerate(count) for _ in range(c)]
    tree = RolloutTree.from_responses([1], responses, [[math.log(sampler[r[0]])] for r in responses])
    measured = mismatch([tree], [np.log(old)])
    assert measured["mismatch_mean"] == pytest.approx(1.0, rel=1e-12)
    assert measured["mismatch_kl"] == pytest.approx(float(sampler @ np.log(sampler / old)), rel=1e-9)


def test_enormous_ratios_stay_finite_and_are_masked_or_truncated(rng: np.random.Generator) -> None:
    tree, old_M = apart(rng)
    old_M[tree.leaf[0]] = tree.logprob[tree.leaf[0]] + 1e6
    measured = mismatch([tree], [old_M])
    assert all(math.isfinite(x) for x in measured.values())
    assert importance_factors(tree, old_M, ImportanceCorrection(correction="mask"))[0][tree.leaf[0]] == 0
    assert importance_factors(tree, old_M, ImportanceCorrection(correction="truncate"))[0][tree.leaf[0]] == 5.0


def test_unknown_log_probs_are_refused(rng: np.random.Generator) -> None:
    tree, old_M = apart(rng)
    unknown = replace(tree, logprob=np.where(np.arange(old_M.size) == 1, np.nan, tree.logprob))
    with pytest.raises(
        ValueError, match=r"needs the log-probs that the engine sampled with.*importance.correction: none"
    ):
        importance_factors(unknown, old_M, ImportanceCorrection(correction="truncate"))


class FixedUniforms:
    """A generator that hands out given uniform numbers."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


def intervals(pi_L: np.ndarray) -> Iterator[tuple[float, float]]:
    """The (middle, length) of each interval of offsets in which the choice cannot change."""
    edges = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(pi_L) % 1.0]))
    for low, high in pairwise(edges):
        if high - low > 1e-13:
            yield (low + high) / 2, high - low


def random_weights(rng: np.random.Generator, size: int) -> np.ndarray:
    weight = rng.exponential(size=size) ** 3  # heavy tail, so that some are certain
    weight[rng.random(size) < 0.2] = 0.0
    return weight


@pytest.mark.parametrize("wanted", [1, 2, 5, 12, 100])
def test_inclusion_probabilities_solve_the_cap_equation(wanted: int, rng: np.random.Generator) -> None:
    """Reference: bisection on c such that the min(1, c w) add up to the wanted number."""
    for _ in range(40):
        weight = random_weights(rng, 20)
        low, high = 0.0, 1e30
        for _ in range(400):
            c = (low + high) / 2 if high < 1e29 else max(2 * low, 1e-12)
            if np.minimum(1, c * weight).sum() < wanted and c < 1e28:
                low = c
            else:
                high = c
        pi_L = inclusion_probabilities(weight, wanted)
        np.testing.assert_allclose(pi_L, np.minimum(1, high * weight), rtol=1e-9, atol=1e-12)
        assert pi_L.sum() == pytest.approx(min(wanted, np.count_nonzero(weight)), rel=1e-12)
        assert (pi_L[weight == 0] == 0).all()
        assert pi_L.max(initial=0) <= 1


def test_every_entry_is_chosen_with_exactly_its_probability(rng: np.random.Generator) -> None:
    for wanted in (1, 3, 7):
        for _ in range(20):
            pi_L = inclusion_probabilities(random_weights(rng, 15), wanted)
            fraction, total = np.zeros(15), 0.0
            for offset, length in intervals(pi_L):
                chosen = choose(pi_L, FixedUniforms(offset))
                assert abs(chosen.size - pi_L.sum()) < 1
                assert (np.diff(chosen) > 0).all()
                fraction[chosen] += length
                total += length
            assert total == pytest.approx(1, abs=1e-11)
            np.testing.assert_allclose(fraction, pi_L, rtol=1e-9, atol=1e-11)


def all_choices(
    tree: RolloutTree, advantage_L: np.ndarray, correct_L: np.ndarray, size: int
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """(probability, chosen, factors) of every outcome; the two verdicts draw one uniform number each."""
    total_L = tree.leaf_count * advantage_L
    offsets = [
        list(intervals(inclusion_probabilities(np.abs(total_L[correct_L == verdict]), size)))
        for verdict in (False, True)
    ]
    for (u, p), (v, q) in product(*offsets):
        yield p * q, *choose_responses(total_L, correct_L, size, FixedUniforms(u, v))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_node_weights_are_unbiased_and_few(size: int, rng: np.random.Generator) -> None:
    tree = random_tree(rng, num_rollouts=15)
    correct_L = rng.random(tree.num_responses) < 0.4
    advantage_L = np.where(correct_L, 1.0, -1.0) * rng.exponential(size=tree.num_responses)
    full, mean = node_weights(tree, advantage_L), [np.zeros(tree.num_unique_tokens) for _ in range(2)]
    outcomes = 0
    for probability, chosen, factor_K in all_choices(tree, advantage_L, correct_L, size):
        smaller, node_index = tree.select(chosen)
        for m, weight in zip(mean, node_weights(smaller, advantage_L[chosen] * factor_K), strict=True):
            m[node_index] += probability * weight
        for verdict in (False, True):
            there = int((correct_L == verdict).sum())
            assert min(size, there) - 1 < (correct_L[chosen] == verdict).sum() < min(size, there) + 1
        outcomes += 1
    assert outcomes > 1
    for m, weight in zip(mean, full, strict=True):
        np.testing.assert_allclose(m, weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("correct", [lambda n: np.ones(n, bool), lambda n: np.zeros(n, bool)])
def test_a_verdict_that_nobody_has_is_no_obstacle(correct: Callable, rng: np.random.Generator) -> None:
    chosen, factor_K = choose_responses(rng.normal(size=9), correct(9), 3, rng)
    assert 2 <= chosen.size <= 4
    assert (factor_K >= 1).all()
