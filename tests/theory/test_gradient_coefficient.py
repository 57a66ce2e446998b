"""coef(N, p) and the gradient's noise: enumeration of all outcomes, closed forms, sums over all counts."""

import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from brorl.algorithms import outcome_weights
from brorl.algorithms.outcome_weights import OutcomeWeight
from brorl.algorithms.settings import AdvantageSettings
from brorl.theory.outcome_weights import gradient_coefficient, gradient_moments, noise_to_known_rates, noise_to_rloo
from brorl.training.objective import annealed

LARGE = (2, 3, 16, 512, pytest.param(4096, marks=pytest.mark.slow))


def tabulate(weight: OutcomeWeight, num_rollouts: int) -> np.ndarray:
    return np.array([weight(num_rollouts, c) for c in range(num_rollouts + 1)])


def rates(rng: np.random.Generator) -> np.ndarray:
    """Pass rates of all sizes, the ends included."""
    return np.concatenate([[0.0, 1e-12, 1.0], 10 ** rng.uniform(-9, 0, 20), 1 - 10 ** rng.uniform(-9, 0, 20)])


def enumerated(
    weight_C: np.ndarray, logits_V: np.ndarray, right: int, reward_V: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """E[g] and E|g|^2 - |E g|^2 over all V^N draws from a softmax whose first outcomes are right.

    Rewards are 0 and 1 unless `reward_V` is given.
    """
    num_rollouts, prob_V = weight_C.size - 1, np.exp(logits_V) / np.exp(logits_V).sum()
    score_VV = np.eye(logits_V.size) - prob_V
    first, second = np.zeros_like(logits_V), 0.0
    for draws in np.ndindex(*[logits_V.size] * num_rollouts):
        correct = np.array([y < right for y in draws], np.float64)
        reward = correct if reward_V is None else reward_V[list(draws)]
        advantage = weight_C[int(correct.sum())] * (reward - reward.mean())
        gradient = advantage @ score_VV[list(draws)] / num_rollouts
        chance = np.prod(prob_V[list(draws)])
        first += chance * gradient
        second += chance * gradient @ gradient
    return first, second - first @ first


def shaped_expectation(weight_C: np.ndarray, prob_V: np.ndarray, reward_V: np.ndarray, right: int) -> np.ndarray:
    """The formula of theory.md, with the gradient in the logits of a softmax."""
    num_rollouts, correct_V = weight_C.size - 1, (np.arange(prob_V.size) < right).astype(float)

    def gradient(value_V: np.ndarray) -> np.ndarray:
        return prob_V * (value_V - prob_V @ value_V)

    def mean_weight(correct: int, of: int) -> float:
        others = np.arange(num_rollouts - of + 1)
        return float(binom.pmf(others, num_rollouts - of, prob_V @ correct_V) @ weight_C[others + correct])

    x1_V, x0_V = reward_V * correct_V, reward_V * (1 - correct_V)
    rate = (mean_weight(1, 2) - mean_weight(2, 2)) * (prob_V @ x1_V)
    rate += (mean_weight(0, 2) - mean_weight(1, 2)) * (prob_V @ x0_V)
    classes = mean_weight(1, 1) * gradient(x1_V) + mean_weight(0, 1) * gradient(x0_V)
    return (1 - 1 / num_rollouts) * (classes + rate * gradient(correct_V))


def softmax_parts(logits_V: np.ndarray, right: int) -> tuple[float, np.ndarray, float, float]:
    """P, its gradient by differences, and the traces of the score's covariance in the two classes."""

    def p(z: np.ndarray) -> float:
        e = np.exp(z)
        return float(e[:right].sum() / e.sum())

    steps = 1e-6 * np.eye(logits_V.size)
    gradient = np.array([(p(logits_V + d) - p(logits_V - d)) / 2e-6 for d in steps])
    prob_V = np.exp(logits_V) / np.exp(logits_V).sum()
    traces = []
    for members in (slice(None, right), slice(right, None)):
        fraction = prob_V[members] / prob_V[members].sum()
        score = np.eye(logits_V.size)[members] - prob_V
        traces.append(float(fraction @ (score**2).sum(1) - ((fraction @ score) ** 2).sum()))
    return p(logits_V), gradient, *traces


@pytest.mark.parametrize("num_rollouts", [2, 3, 5])
def test_mean_and_variance_are_those_of_all_outcomes(num_rollouts: int, rng: np.random.Generator) -> None:
    """For any weight: also one that is negative, and one that differs at c = 0 and N."""
    for right in (1, 2, 3):
        weight_C, logits_V = rng.normal(size=num_rollouts + 1), rng.normal(size=4)
        p, gradient, correct, incorrect = softmax_parts(logits_V, right)
        mean, variance = enumerated(weight_C, logits_V, right)
        moments = gradient_moments(weight_C, np.array([p]))
        np.testing.assert_allclose(mean, moments.coefficient * gradient, atol=1e-9)
        np.testing.assert_allclose(gradient_coefficient(weight_C, [p]), moments.coefficient, rtol=1e-12)
        found = moments.variance(gradient @ gradient, correct, incorrect)
        np.testing.assert_allclose(found, variance, rtol=1e-7)


@pytest.mark.parametrize("num_rollouts", [2, 5, 16, 77, 512, 4096])
def test_the_coefficient_is_the_sum_over_the_other_rollouts(num_rollouts: int, rng: np.random.Generator) -> None:
    """The definition: rollout i is correct or not, and j of the N - 1 others are; all counts are summed."""
    weight_C, rate_G = rng.normal(size=num_rollouts + 1), rates(rng)
    j = np.arange(num_rollouts)
    chance_GJ = binom.pmf(j, num_rollouts - 1, rate_G[:, None])
    summand_J = weight_C[j + 1] * (num_rollouts - 1 - j) / num_rollouts + weight_C[j] * j / num_rollouts
    np.testing.assert_allclose(gradient_coefficient(weight_C, rate_G), chance_GJ @ summand_J, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_rollouts", LARGE)
def test_known_objectives(num_rollouts: int, rng: np.random.Generator) -> None:
    rate_G = rates(rng)
    log_miss_G = np.log1p(-np.minimum(rate_G, 1 - 1e-15))

    def coefficient(weight: OutcomeWeight) -> np.ndarray:
        return gradient_coefficient(tabulate(weight, num_rollouts), rate_G)

    np.testing.assert_allclose(coefficient(outcome_weights.rloo), 1, rtol=1e-11)
    np.testing.assert_allclose(coefficient(outcome_weights.reinforce_pp_baseline), 1 - 1 / num_rollouts, rtol=1e-11)
    for k in {1, min(16, num_rollouts - 1), num_rollouts // 2, num_rollouts - 1} - {0}:
        found = coefficient(partial(outcome_weights.pass_at_k, k=k))
        np.testing.assert_allclose(found, k * np.exp((k - 1) * log_miss_G), rtol=1e-9, atol=1e-9)
    for order in (1, 8, num_rollouts - 1, None):
        terms = min(order or num_rollouts, num_rollouts - 1)
        found = coefficient(partial(outcome_weights.maxrl, order=order))
        expected_G = np.where(rate_G > 0, -np.expm1(terms * log_miss_G) / np.where(rate_G > 0, rate_G, 1), terms)
        np.testing.assert_allclose(found, expected_G, rtol=1e-9, atol=1e-9)


def test_every_derivative_of_low_degree_has_a_weight_and_no_other(rng: np.random.Generator) -> None:
    """The N - 1 weights of mixed groups span the derivatives of pass@1..N-1, and pass@N is not among them."""
    num_rollouts, rate_G = 7, rng.uniform(0.01, 0.99, 40)
    reached = gradient_coefficient(np.eye(num_rollouts + 1)[1:-1], rate_G)
    for k in range(1, num_rollouts + 2):
        wanted_G = k * (1 - rate_G) ** (k - 1)
        solution = np.linalg.lstsq(reached.T, wanted_G, rcond=None)[0]
        error = np.abs(solution @ reached - wanted_G).max()
        assert (error < 1e-9) == (k < num_rollouts), (k, error)


def test_grpo_is_the_weighted_count_of_all_groups(rng: np.random.Generator) -> None:
    """E[sqrt(x(1-x))] / (p(1-p)): 1/std times x(1-x), over all groups; 1/sqrt(p(1-p)) for large N."""
    for num_rollouts in (2, 3, 16, 512, 4096):
        rate_G = rng.uniform(1e-3, 1 - 1e-3, 30)
        x_C = np.arange(num_rollouts + 1) / num_rollouts
        group_GC = binom.pmf(np.arange(num_rollouts + 1), num_rollouts, rate_G[:, None])
        expected_G = group_GC @ np.sqrt(x_C * (1 - x_C)) / (rate_G * (1 - rate_G))
        found_G = gradient_coefficient(tabulate(outcome_weights.grpo, num_rollouts), rate_G)
        np.testing.assert_allclose(found_G, expected_G, rtol=1e-9)
    far = gradient_coefficient(tabulate(outcome_weights.grpo, 2**16), [0.2, 0.5])
    np.testing.assert_allclose(far, [1 / 0.4, 2], rtol=1e-4)


def test_the_noise_of_rloo_is_the_least(rng: np.random.Generator) -> None:
    """Against the enumerated E over groups: E[w^2 x(1-x)] E[x(1-x)] / E[w x(1-x)]^2, over prompts and counts."""
    rate_G, share_G = rng.uniform(0, 1, 9), rng.dirichlet(np.ones(9))
    for num_rollouts in (2, 6, 40):
        c = np.arange(num_rollouts + 1)
        x_C = c / num_rollouts
        group_C = share_G @ binom.pmf(c, num_rollouts, rate_G[:, None]) * x_C * (1 - x_C)
        for weight in (outcome_weights.rloo, outcome_weights.grpo, outcome_weights.maxrl):
            weight_C = tabulate(weight, num_rollouts)
            ratio = (group_C @ weight_C**2) * group_C.sum() / (group_C @ weight_C) ** 2
            assert noise_to_rloo(weight_C, rate_G, share_G) == pytest.approx(ratio, rel=1e-10)
            assert noise_to_rloo(weight_C, rate_G, share_G) >= 1 - 1e-12
        assert noise_to_rloo(tabulate(outcome_weights.rloo, num_rollouts), rate_G, share_G) == pytest.approx(1)


def test_the_price_of_unknown_rates_is_that_of_its_model(rng: np.random.Generator) -> None:
    """The variance over that of RLOO gradients, each times the exact coefficient of its prompt."""
    rate_G, share_G = rng.uniform(0.01, 0.9, 5), rng.dirichlet(np.ones(5))
    rloo = gradient_moments(tabulate(outcome_weights.rloo, 24), rate_G).variance(0.0, 1.0, 1.0)
    for weight in (outcome_weights.grpo, outcome_weights.maxrl, partial(outcome_weights.pass_at_k, k=5)):
        moments = gradient_moments(tabulate(weight, 24), rate_G)
        expected = moments.variance(0.0, 1.0, 1.0) @ share_G / (moments.coefficient**2 * rloo @ share_G)
        found = noise_to_known_rates(tabulate(weight, 24), rate_G, share_G)
        assert found == pytest.approx(expected, rel=1e-10)
        assert found > 1


def test_several_weights_are_computed_together(rng: np.random.Generator) -> None:
    weight_EC, rate_G = rng.uniform(0, 1, (3, 34)), rng.uniform(0, 1, 6)
    together = gradient_coefficient(weight_EC, rate_G)
    np.testing.assert_allclose(together, [gradient_coefficient(row, rate_G) for row in weight_EC], rtol=1e-12)
    noise = noise_to_rloo(weight_EC, rate_G, np.ones(6))
    np.testing.assert_allclose(noise, [noise_to_rloo(row, rate_G, np.ones(6)) for row in weight_EC], rtol=1e-12)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="N >= 2"):
        gradient_coefficient([1.0, 1.0], [0.5])
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        gradient_coefficient([1.0, 1.0, 1.0], [1.5])
    with pytest.raises(ValueError, match="no gradient"):
        gradient_moments([1.0, 1.0, 1.0], [0.0])
    with pytest.raises(ValueError, match="no gradient"):
        noise_to_rloo([1.0, 1.0, 1.0], [0.0, 1.0], [0.5, 0.5])


def test_the_table_of_the_documentation_is_computed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    estimators = {
        "rloo": outcome_weights.rloo,
        "reinforce_pp_baseline": outcome_weights.reinforce_pp_baseline,
        "grpo": outcome_weights.grpo,
        "pass_at_k": partial(outcome_weights.pass_at_k, k=16),
        "maxrl": outcome_weights.maxrl,
    }
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d+) \|((?: [\d.]+ \|){5})$", page, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(estimators)
    for name, num_rollouts, cells in rows:
        weight_C = tabulate(estimators[name], int(num_rollouts))
        found = gradient_coefficient(weight_C, [0.002, 0.01, 0.05, 0.2, 0.5])
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(found.tolist(), abs=0.0051)


def test_the_falling_order_of_the_documentation_is_computed() -> None:
    """The weights at each order, and where in a fall a prompt has lost half of its weight."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    section = page.partition("### A falling order")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|((?: \.\d+ \|){5})$", section, re.MULTILINE)
    assert [int(order) for order, _ in rows] == [511, 127, 15, 4, 1]
    rate_G = np.array([0.002, 0.01, 0.05, 0.2, 0.5])

    @cache
    def weight_C(order: int) -> np.ndarray:
        return tabulate(partial(outcome_weights.maxrl, order=order), 512)

    def weights(order: int, rate_G: np.ndarray) -> np.ndarray:
        return gradient_coefficient(weight_C(order), rate_G) * rate_G * (1 - rate_G)

    for order, cells in rows:
        found = weights(int(order), rate_G)
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(found.tolist(), abs=5.1e-4)

    def halved_at(pass_rate: float, first: int) -> float:
        falling = AdvantageSettings(estimator="maxrl", final_order=1)
        progress = np.linspace(0, 1, 1001)
        orders = [annealed(falling, x, first + 1).order or 0 for x in progress]
        kept = [float(weights(order, np.array([pass_rate]))[0]) for order in orders]
        return float(progress[np.argmax(np.array(kept) < (1 - pass_rate) / 2)])

    for first, rates in ((511, (0.002, 0.01, 0.05, 0.2)), (15, (0.05, 0.2))):
        [text] = re.findall(rf"From {first} to 1 (?:this|it) is at (.*?)\.\s", section, re.DOTALL)
        stated = [int(percent) / 100 for percent in re.findall(r"(\d+)%", text)]
        order_is_whole = 0.08 if first == 15 else 0.03  # few orders are left where they are small
        assert stated == pytest.approx([halved_at(rate, first) for rate in rates], abs=order_is_whole)
    smallest = [float(x) for x in re.findall(r"to p = (\.\d+),\s+N = 128 to (\.\d+), N = 512 to (\.\d+)", section)[0]]
    for rate, order in zip(smallest, (15, 127, 511), strict=True):
        assert weights(order, np.array([rate]))[0] == pytest.approx((1 - rate) / 2, rel=0.03)  # two digits


@pytest.mark.parametrize("num_rollouts", [2, 3, 5])
def test_the_expectation_with_shaped_rewards(num_rollouts: int, rng: np.random.Generator) -> None:
    logits_V, reward_V, weight_C = rng.normal(size=5), rng.normal(size=5), rng.random(num_rollouts + 1)
    expected, _ = enumerated(weight_C, logits_V, 2, reward_V)
    prob_V = np.exp(logits_V) / np.exp(logits_V).sum()
    np.testing.assert_allclose(shaped_expectation(weight_C, prob_V, reward_V, 2), expected, atol=1e-12)


def angle_to_mean_reward(weight_C: np.ndarray, pass_rate: float) -> float:
    """Return the angle in degrees for the four responses of the table of theory.md."""
    prob_V = np.array([pass_rate, pass_rate, 1 - pass_rate, 1 - pass_rate]) / 2
    reward_V = np.array([1.0, 0.9, 0.0, -0.1])
    found, mean_reward = shaped_expectation(weight_C, prob_V, reward_V, 2), prob_V * (reward_V - prob_V @ reward_V)
    cosine = found @ mean_reward / np.linalg.norm(found) / np.linalg.norm(mean_reward)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))


def test_a_constant_weight_keeps_the_direction_of_the_mean_reward(rng: np.random.Generator) -> None:
    for num_rollouts in (2, 16, 512):
        assert angle_to_mean_reward(tabulate(outcome_weights.rloo, num_rollouts), rng.uniform(0.001, 0.999)) < 1e-3


def test_the_angles_of_the_documentation_are_computed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    weights = {
        "`rloo`, mixed groups only": lambda n, c: outcome_weights.rloo(n, c) * (0 < c < n),
        "`grpo`": outcome_weights.grpo,
        "`maxrl`": outcome_weights.maxrl,
    }
    _, table = page.split("| shaped rewards | N |")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|((?: [\d.]+ \|){4})$", table.split("\n\n")[0], re.MULTILINE)
    assert {(name, int(n)) for name, n, _ in rows} == {(name, n) for name in weights for n in (16, 512)}
    for name, num_rollouts, cells in rows:
        weight_C = tabulate(weights[name], int(num_rollouts))
        found = [angle_to_mean_reward(weight_C, p) for p in (0.002, 0.02, 0.2, 0.5)]
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(found, abs=0.051)
