"""Aggregations against means over the rows of the N x T batch."""

import numpy as np
import pytest

from brorl.algorithms.policy_loss import loss_denominator, response_weights
from small_models import random_tree, rollouts


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_weights_over_the_denominator_equal_the_mean_over_rows(aggregation: str, rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=n) for n in (3, 11, 30)]
    loss = [rng.normal(size=t.num_unique_tokens) for t in trees]
    got = 0.0
    for tree, loss_M in zip(trees, loss, strict=True):
        got += float(tree.sum_below(tree.leaf_count * response_weights(tree, aggregation)) @ loss_M)
    got /= loss_denominator(trees, aggregation, 9)
    rows = [loss_M[path] for tree, loss_M in zip(trees, loss, strict=True) for _, path in rollouts(tree)]
    expected = {
        "token_mean": np.concatenate(rows).mean(),
        "sequence_mean": np.mean([row.mean() for row in rows]),
        "constant": sum(row.sum() for row in rows) / (len(rows) * 9),
    }[aggregation]
    assert got == pytest.approx(float(expected), rel=1e-10)


def test_constant_needs_its_number(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="pass max_new_tokens"):
        loss_denominator([random_tree(rng)], "constant", None)
