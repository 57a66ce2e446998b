"""Sizes of trees at another N: enumeration of every pilot there could be, and extreme probabilities."""

from itertools import combinations_with_replacement
from math import factorial

import numpy as np
import pytest

from brorl.theory.coverage import growth_ratios, tree_growth
from brorl.tree import RolloutTree
from exact_model import ExactModel

WANTED = np.array([1, 3, 8, 40, 500])
DEPTH = 4


def exact_sizes(model: ExactModel) -> tuple[np.ndarray, np.ndarray]:
    """Expected nodes and distinct responses, summed over every prefix there is."""
    mass: dict[tuple[int, ...], float] = {}
    responses = dict(model.responses())
    for response, p in responses.items():
        for end in range(1, len(response) + 1):
            mass[response[:end]] = mass.get(response[:end], 0.0) + p
    seen = {prefix: 1 - (1 - p) ** WANTED for prefix, p in mass.items()}
    return sum(seen.values()), sum(seen[r] for r in responses)


@pytest.mark.parametrize("pilot_rollouts", [1, 2, 3])
def test_sizes_are_unbiased_at_every_number_of_rollouts(rng: np.random.Generator, pilot_rollouts: int) -> None:
    """Exactly: the mean over every draw that a pilot could give, weighted by its probability."""
    model = ExactModel.random(rng, 3, DEPTH - 1, concentration=0.5)
    responses = list(model.responses())
    assert sum(p for _, p in responses) == pytest.approx(1)
    means = np.zeros((2, WANTED.size))
    for drawn in combinations_with_replacement(responses, pilot_rollouts):
        orders = factorial(pilot_rollouts) / np.prod([factorial(drawn.count(d)) for d in set(drawn)])
        grown = tree_growth(model.tree([response for response, _ in drawn]), WANTED)
        means += orders * np.prod([p for _, p in drawn]) * np.array(grown)
    np.testing.assert_allclose(means, exact_sizes(model), rtol=1e-7, atol=1e-9)


def test_at_its_own_number_of_rollouts_a_tree_is_itself(rng: np.random.Generator) -> None:
    model = ExactModel.random(rng, 5, 5)
    responses = [r for r, _ in model.responses()]
    tree = model.tree([responses[i] for i in rng.integers(0, len(responses), 20)])
    (nodes,), (responses,) = tree_growth(tree, np.array([20]))
    assert (nodes, responses) == pytest.approx((tree.num_unique_tokens, tree.num_responses), abs=1e-9)


def test_ratios_at_the_ends() -> None:
    wanted = np.array([2, 8, 4096])
    ratio = growth_ratios(np.array([0.0, 1e-9, -2000.0, -40.0]), 8, wanted)
    np.testing.assert_array_equal(ratio[:, 0], 1.0)  # certain, and certain up to rounding
    np.testing.assert_array_equal(ratio[:, 1], 1.0)
    np.testing.assert_allclose(ratio[:, 2], wanted / 8, rtol=1e-12)
    np.testing.assert_allclose(ratio[:, 3], wanted / 8, rtol=1e-12)
    for p in (0.3, 1e-3, 1e-7):
        exact = (1 - (1 - p) ** wanted.astype(float)) / (1 - (1 - p) ** 8)
        np.testing.assert_allclose(growth_ratios(np.log([p]), 8, wanted)[:, 0], exact, rtol=1e-8)


def test_what_a_tree_must_have() -> None:
    with pytest.raises(ValueError, match="without log-probs"):
        tree_growth(RolloutTree.from_responses((1,), [[2, 0]]), np.array([4]))
