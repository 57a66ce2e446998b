"""Factors and mismatch against loops over the N rollouts, and against sums over a whole vocabulary."""

import math
from dataclasses import replace

import numpy as np
import pytest

from brorl.algorithms.importance import importance_factors, mismatch, mismatch_sums
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
    found = mismatch([mismatch_sums(*zip(*part, strict=True)) for part in (pairs[:2], pairs[2:])])
    assert found["mismatch_mean"] == pytest.approx(np.mean(ratios), rel=1e-12)
    assert found["mismatch_max"] == pytest.approx(max(ratios), rel=1e-12)
    assert found["mismatch_kl"] == pytest.approx(np.mean([r - 1 - math.log(r) for r in ratios]), rel=1e-9)


def test_over_every_token_in_its_share_the_mean_is_one_and_the_estimate_is_the_divergence(
    rng: np.random.Generator,
) -> None:
    """A tree of one token a response, whose counts are the sampler's probabilities times N: means are exact."""
    count = rng.integers(1, 9, 12)
    sampler = count / count.sum()
    old = rng.dirichlet(np.ones(12))
    responses = [[token] for token, c in enumerate(count) for _ in range(c)]
    tree = RolloutTree.from_responses([1], responses, [[math.log(sampler[r[0]])] for r in responses])
    found = mismatch([mismatch_sums([tree], [np.log(old)])])
    assert found["mismatch_mean"] == pytest.approx(1.0, rel=1e-12)
    assert found["mismatch_kl"] == pytest.approx(float(sampler @ np.log(sampler / old)), rel=1e-9)


def test_enormous_ratios_stay_finite_and_are_masked_or_truncated(rng: np.random.Generator) -> None:
    tree, old_M = apart(rng)
    old_M[tree.leaf[0]] = tree.logprob[tree.leaf[0]] + 1e6
    found = mismatch([mismatch_sums([tree], [old_M])])
    assert all(math.isfinite(x) for x in found.values())
    assert importance_factors(tree, old_M, ImportanceCorrection(correction="mask"))[0][tree.leaf[0]] == 0
    assert importance_factors(tree, old_M, ImportanceCorrection(correction="truncate"))[0][tree.leaf[0]] == 5.0


def test_unknown_log_probs_and_senseless_bounds_are_refused(rng: np.random.Generator) -> None:
    tree, old_M = apart(rng)
    unknown = replace(tree, logprob=np.where(np.arange(old_M.size) == 1, np.nan, tree.logprob))
    with pytest.raises(
        ValueError, match=r"needs the log-probs that the engine sampled with.*importance.correction: none"
    ):
        importance_factors(unknown, old_M, ImportanceCorrection(correction="truncate"))
    for low, high in ((1.5, 5), (-0.1, 5), (0.5, 0.9), (0.5, math.inf), (math.nan, 5)):
        with pytest.raises(ValueError, match="validation error for ImportanceCorrection"):
            ImportanceCorrection(correction="mask", low=low, high=high)
    with pytest.raises(ValueError, match="'none', 'truncate', 'mask' or 'sequence_mask'"):
        ImportanceCorrection(correction="clip")  # type: ignore[arg-type]
