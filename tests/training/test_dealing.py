"""Dealing responses to ranks against brute force over all contiguous cuts, and against sums over tokens."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl.model.chunks import tree_costs
from brorl.model.flat_path import flat_costs
from brorl.training.ranks import deal
from small_models import random_tree


def best_largest(cost: np.ndarray, num_ranks: int) -> float:
    """The largest fraction of the best of all contiguous cuts."""
    cuts = combinations_with_replacement(range(cost.size + 1), num_ranks - 1)
    ends = ([0, *cut, cost.size] for cut in cuts)
    return min(max(cost[a:b].sum() for a, b in pairwise(e)) for e in ends)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_trees=st.integers(0, 4), num_ranks=st.integers(1, 5))
def test_every_response_goes_to_one_rank_and_shares_cost_nearly_the_same(
    seed: int, num_trees: int, num_ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    costs = [np.exp(rng.normal(size=rng.integers(1, 6))) for _ in range(num_trees)]
    shares = deal(costs, num_ranks)
    assert len(shares) == num_ranks
    dealt = [(p.tree, leaf) for share in shares for p in share for leaf in range(p.start, p.stop)]
    assert dealt == [(tree, leaf) for tree, cost_L in enumerate(costs) for leaf in range(cost_L.size)]
    assert all(piece.start < piece.stop for share in shares for piece in share)
    assert sum(map(len, shares)) <= num_trees + num_ranks - 1
    if not num_trees:
        return
    cost = np.concatenate(costs)
    totals = np.array([sum(costs[p.tree][p.start : p.stop].sum() for p in share) for share in shares])
    assert np.abs(totals - cost.sum() / num_ranks).max() <= cost.max() * (1 + 1e-12)
    assert totals.max() <= best_largest(cost, num_ranks) + cost.max() * (1 + 1e-12)


@pytest.mark.parametrize("per_position", [0.0, 0.1])
def test_a_response_costs_its_new_tokens_on_the_tree_and_all_of_them_as_a_row(
    per_position: float, rng: np.random.Generator
) -> None:
    tree = random_tree(rng, num_rollouts=30, branching=4)
    prompt = [1 + per_position * position for position in range(len(tree.prompt_ids))]
    tree_cost, row_cost, seen = [], [], set()
    for number, (tokens, _) in enumerate(tree.responses()):
        prefixes = [tokens[: i + 1] for i in range(len(tokens))]
        of = {p: 1 + per_position * (len(prompt) + len(p) - 1) for p in prefixes}
        tree_cost.append(sum(of[p] for p in prefixes if p not in seen) + (sum(prompt) if number == 0 else 0))
        row_cost.append(sum(prompt) + sum(of.values()))
        seen.update(prefixes)
    np.testing.assert_allclose(tree_costs(tree, per_position), tree_cost, rtol=1e-12, atol=1e-8)
    np.testing.assert_allclose(flat_costs(tree, per_position), row_cost, rtol=1e-12)
