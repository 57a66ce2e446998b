"""Sampled and unsampled mass against a model whose responses are all listed, and every draw of N enumerated."""

from itertools import combinations_with_replacement, product
from math import factorial

import numpy as np
import pytest

from brorl.training.coverage import (
    growth_ratios,
    leaving_mass,
    measure_coverage,
    response_masses,
    tree_growth,
    unsampled_correct_at,
)
from brorl.tree import RolloutTree
from exact_model import END, ExactModel, Response

Verdicts = dict[Response, bool]


@pytest.fixture
def model(rng: np.random.Generator) -> ExactModel:
    return ExactModel.random(rng, vocabulary=2, max_length=4)  # 5 responses


@pytest.fixture
def verdicts(rng: np.random.Generator, model: ExactModel) -> Verdicts:
    responses = [r for r, _ in model.responses()]
    right = rng.permutation(len(responses)) < rng.integers(1, len(responses))
    return dict(zip(responses, right.tolist(), strict=True))


def correct(tree: RolloutTree, verdicts: Verdicts) -> np.ndarray:
    return np.array([verdicts[r] for r, _ in tree.responses()])


def every_draw(model: ExactModel, num_rollouts: int):
    """Yield every sequence of N rollouts with its probability."""
    for draw in product(list(model.responses()), repeat=num_rollouts):
        yield [r for r, _ in draw], float(np.prod([p for _, p in draw]))


def test_masses_are_those_of_the_sampled_responses(rng: np.random.Generator) -> None:
    model = ExactModel.random(rng, vocabulary=4, max_length=3, concentration=0.5)
    responses, p = zip(*model.responses(), strict=True)
    assert sum(p) == pytest.approx(1, abs=1e-12)
    verdicts = {r: bool(rng.random() < 0.4) for r in responses}
    drawn = [responses[i] for i in rng.choice(len(responses), 20, p=p)]
    mass, seen = dict(zip(responses, p, strict=True)), set(drawn)
    tree = model.tree(drawn)
    coverage = measure_coverage(tree, correct(tree, verdicts))

    right, wrong = [mass[r] for r in seen if verdicts[r]], [mass[r] for r in seen if not verdicts[r]]
    fraction = sum(verdicts[r] for r in drawn) / 20
    assert coverage.p_pos == pytest.approx(sum(right), rel=1e-12, abs=1e-15)
    assert coverage.p_neg == pytest.approx(sum(wrong), rel=1e-12, abs=1e-15)
    assert coverage.unsampled == pytest.approx(sum(m for r, m in mass.items() if r not in seen), abs=1e-12)
    assert coverage.a_2 == pytest.approx(sum(m**2 for m in right), rel=1e-12, abs=1e-15)
    assert coverage.b_2 == pytest.approx(sum(m**2 for m in wrong), rel=1e-12, abs=1e-15)
    rewards = [(float(verdicts[r]) - fraction) * mass[r] for r in seen]
    assert coverage.s_r == pytest.approx(sum(rewards), abs=1e-14)
    tokens = [lp for r in drawn for lp in model.logprobs(r)]
    assert coverage.entropy == pytest.approx(-np.mean(tokens), rel=1e-12)
    assert (coverage.num_rollouts, coverage.num_correct, coverage.num_distinct) == (20, round(20 * fraction), len(seen))
    assert coverage.duplicate_rate == pytest.approx(1 - len(seen) / 20)
    assert coverage.all_unique == (len(seen) == 20)
    np.testing.assert_allclose(response_masses(tree), [mass[r] for r, _ in tree.responses()], rtol=1e-12)


@pytest.mark.parametrize("num_rollouts", [1, 2, 4])
def test_estimates_have_the_right_mean_over_all_draws(model: ExactModel, verdicts: Verdicts, num_rollouts: int) -> None:
    other = (1, 3, 4, 9, 50)
    means, curve = np.zeros(4), np.zeros(len(other))
    for drawn, chance in every_draw(model, num_rollouts):
        tree = model.tree(drawn)
        correct_L = correct(tree, verdicts)
        m = measure_coverage(tree, correct_L)
        means += chance * np.array([m.q_pos, m.unsampled_correct, m.u_pos_2, m.u_neg_2])
        curve += chance * unsampled_correct_at(tree, correct_L, other)

    p = np.array([mass for _, mass in model.responses()])
    right = np.array([verdicts[r] for r, _ in model.responses()])
    missed = (1 - p) ** num_rollouts
    expected = [p[right].sum(), (p * missed)[right].sum(), (p**2 * missed)[right].sum(), (p**2 * missed)[~right].sum()]
    np.testing.assert_allclose(means, expected, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(curve, [(p * (1 - p) ** n)[right].sum() for n in other], rtol=1e-9, atol=1e-14)


def test_a_fresh_rollout_leaves_the_tree_where_the_next_token_mass_is_missing(rng: np.random.Generator) -> None:
    model = ExactModel.random(rng, vocabulary=4, max_length=4, concentration=0.7)
    responses, p = zip(*model.responses(), strict=True)
    drawn = [responses[i] for i in rng.choice(len(responses), 12, p=p)]
    prefixes = {r[:i] for r in drawn for i in range(1, len(r) + 1)}
    expected = np.zeros(max(map(len, drawn)))
    for response, mass in zip(responses, p, strict=True):
        outside = [i for i in range(len(response)) if response[: i + 1] not in prefixes]
        if outside:
            expected[outside[0]] += mass
    tree = model.tree(drawn)
    np.testing.assert_allclose(leaving_mass(tree), expected, atol=1e-14)
    unsampled = measure_coverage(tree, np.ones(tree.num_responses, np.bool_)).unsampled
    assert leaving_mass(tree).sum() == pytest.approx(unsampled, abs=1e-13)


def test_long_responses_whose_probability_underflows_fall_back_to_counts() -> None:
    responses = [(1, *([2 + i] * 400), END) for i in range(8)]
    tree = RolloutTree.from_responses((1,), responses, [[-5.0] * 402] * 8)
    coverage = measure_coverage(tree, np.arange(8) < 3)
    assert coverage.all_unique
    assert coverage.unsampled == 1
    assert coverage.q_pos == pytest.approx(3 / 8)
    assert coverage.unsampled_correct == pytest.approx(3 / 8)
    assert (coverage.u_pos_2, coverage.u_neg_2) == (0, 0)
    assert leaving_mass(tree).sum() == pytest.approx(1)


def test_a_certain_response_leaves_nothing_unsampled() -> None:
    tree = RolloutTree.from_responses((1,), [(5, END)] * 4, [[0.0, 1e-9]] * 4)  # rounding may exceed 1
    coverage = measure_coverage(tree, np.array([True]))
    assert (coverage.q_pos, coverage.p_pos, coverage.unsampled, coverage.unsampled_correct, coverage.u_pos_2) == (
        1,
        1,
        0,
        0,
        0,
    )
    assert unsampled_correct_at(tree, np.array([True]), (1, 100)).tolist() == [0, 0]


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


@pytest.mark.slow
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
