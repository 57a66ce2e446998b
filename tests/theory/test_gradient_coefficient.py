"""coef(N, p), what an outcome weight makes of a prompt's gradient: enumeration of all outcomes, closed forms."""

import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from brorl.algorithms import advantages
from brorl.algorithms.advantages import OutcomeWeight
from brorl.algorithms.settings import AdvantageSettings
from brorl.training.schedule import annealed


def gradient_coefficient(weight_C: np.ndarray, pass_rate_G: np.ndarray) -> np.ndarray:
    """coef(N, p) = (1 - 1/N) E[w(N, 1 + C)] with C ~ Binomial(N - 2, p): the mean gradient is coef(N, p) grad p."""
    num_rollouts = weight_C.shape[-1] - 1
    chance_GC = binom.pmf(np.arange(num_rollouts - 1), num_rollouts - 2, np.asarray(pass_rate_G)[:, None])
    return np.asarray((1 - 1 / num_rollouts) * weight_C[..., 1:-1] @ chance_GC.T)


LARGE = (2, 3, 16, 512, pytest.param(4096, marks=pytest.mark.slow))


def tabulate(weight: OutcomeWeight, num_rollouts: int) -> np.ndarray:
    return np.array([weight(num_rollouts, c) for c in range(num_rollouts + 1)])


def rates(rng: np.random.Generator) -> np.ndarray:
    """Pass rates of all sizes, the ends included."""
    return np.concatenate([[0.0, 1e-12, 1.0], 10 ** rng.uniform(-9, 0, 20), 1 - 10 ** rng.uniform(-9, 0, 20)])


def enumerated(
    weight_C: np.ndarray, logits_V: np.ndarray, right: int, reward_V: np.ndarray | None = None
) -> np.ndarray:
    """E[g] over all V^N draws from a softmax whose first outcomes are right.

    Rewards are 0 and 1 unless `reward_V` is given.
    """
    num_rollouts, prob_V = weight_C.size - 1, np.exp(logits_V) / np.exp(logits_V).sum()
    score_VV = np.eye(logits_V.size) - prob_V
    first = np.zeros_like(logits_V)
    for draws in np.ndindex(*[logits_V.size] * num_rollouts):
        correct = np.array([y < right for y in draws], np.float64)
        reward = correct if reward_V is None else reward_V[list(draws)]
        advantage = weight_C[int(correct.sum())] * (reward - reward.mean())
        first += np.prod(prob_V[list(draws)]) * (advantage @ score_VV[list(draws)]) / num_rollouts
    return first


def shaped_expectation(weight_C: np.ndarray, prob_V: np.ndarray, reward_V: np.ndarray, right: int) -> np.ndarray:
    """The formula of theory.md, with the gradient in the logits of a softmax."""
    num_rollouts, correct_V = weight_C.size - 1, (np.arange(prob_V.size) < right).astype(float)

    def gradient(value_V: np.ndarray) -> np.ndarray:
        return prob_V * (value_V - prob_V @ value_V)

    def mean_weight(correct: int, of: int) -> float:
        num_others = np.arange(num_rollouts - of + 1)
        return float(binom.pmf(num_others, num_rollouts - of, prob_V @ correct_V) @ weight_C[num_others + correct])

    x1_V, x0_V = reward_V * correct_V, reward_V * (1 - correct_V)
    rate = (mean_weight(1, 2) - mean_weight(2, 2)) * (prob_V @ x1_V)
    rate += (mean_weight(0, 2) - mean_weight(1, 2)) * (prob_V @ x0_V)
    classes = mean_weight(1, 1) * gradient(x1_V) + mean_weight(0, 1) * gradient(x0_V)
    return (1 - 1 / num_rollouts) * (classes + rate * gradient(correct_V))


@pytest.mark.parametrize("num_rollouts", [2, 3, 5])
def test_mean_is_that_of_all_outcomes(num_rollouts: int, rng: np.random.Generator) -> None:
    """For any weight: also one that is negative, and one that differs at c = 0 and N."""
    for right in (1, 2, 3):
        weight_C, logits_V = rng.normal(size=num_rollouts + 1), rng.normal(size=4)
        prob_V, steps = np.exp(logits_V) / np.exp(logits_V).sum(), 1e-6 * np.eye(4)
        passes = [[np.exp(z)[:right].sum() / np.exp(z).sum() for z in (logits_V - d, logits_V + d)] for d in steps]
        gradient = np.array([(after - before) / 2e-6 for before, after in passes])
        coefficient = gradient_coefficient(weight_C, np.array([prob_V[:right].sum()]))
        np.testing.assert_allclose(enumerated(weight_C, logits_V, right), coefficient * gradient, atol=1e-9)


@pytest.mark.parametrize("num_rollouts", LARGE)
def test_known_objectives(num_rollouts: int, rng: np.random.Generator) -> None:
    rate_G = rates(rng)
    log_miss_G = np.log1p(-np.minimum(rate_G, 1 - 1e-15))

    def coefficient(weight: OutcomeWeight) -> np.ndarray:
        return gradient_coefficient(tabulate(weight, num_rollouts), rate_G)

    np.testing.assert_allclose(coefficient(advantages.rloo_weight), 1, rtol=1e-11)
    np.testing.assert_allclose(coefficient(advantages.reinforce_pp_baseline_weight), 1 - 1 / num_rollouts, rtol=1e-11)
    for k in {1, min(16, num_rollouts - 1), num_rollouts // 2, num_rollouts - 1} - {0}:
        got = coefficient(partial(advantages.pass_at_k_weight, k=k))
        np.testing.assert_allclose(got, k * np.exp((k - 1) * log_miss_G), rtol=1e-9, atol=1e-9)
    for order in (1, 8, num_rollouts - 1, None):
        terms = min(order or num_rollouts, num_rollouts - 1)
        got = coefficient(partial(advantages.maxrl_weight, order=order))
        expected_G = np.where(rate_G > 0, -np.expm1(terms * log_miss_G) / np.where(rate_G > 0, rate_G, 1), terms)
        np.testing.assert_allclose(got, expected_G, rtol=1e-9, atol=1e-9)


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
        found_G = gradient_coefficient(tabulate(advantages.grpo_weight, num_rollouts), rate_G)
        np.testing.assert_allclose(found_G, expected_G, rtol=1e-9)
    far = gradient_coefficient(tabulate(advantages.grpo_weight, 2**16), [0.2, 0.5])
    np.testing.assert_allclose(far, [1 / 0.4, 2], rtol=1e-4)


def test_the_table_of_the_documentation_is_computed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    estimators = {
        "rloo": advantages.rloo_weight,
        "reinforce_pp_baseline": advantages.reinforce_pp_baseline_weight,
        "grpo": advantages.grpo_weight,
        "pass_at_k": partial(advantages.pass_at_k_weight, k=16),
        "maxrl": advantages.maxrl_weight,
    }
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d+) \|((?: [\d.]+ \|){5})$", page, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(estimators)
    for name, num_rollouts, cells in rows:
        weight_C = tabulate(estimators[name], int(num_rollouts))
        got = gradient_coefficient(weight_C, [0.002, 0.01, 0.05, 0.2, 0.5])
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(got.tolist(), abs=0.0051)


@pytest.mark.slow
def test_the_falling_order_of_the_documentation_is_computed() -> None:
    """The weights at each order, and where in a fall a prompt has lost half of its weight."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    section = page.partition("### A falling order")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|((?: \.\d+ \|){5})$", section, re.MULTILINE)
    assert [int(order) for order, _ in rows] == [511, 127, 15, 4, 1]
    rate_G = np.array([0.002, 0.01, 0.05, 0.2, 0.5])

    @cache
    def weight_C(order: int) -> np.ndarray:
        return tabulate(partial(advantages.maxrl_weight, order=order), 512)

    def weights(order: int, rate_G: np.ndarray) -> np.ndarray:
        return gradient_coefficient(weight_C(order), rate_G) * rate_G * (1 - rate_G)

    for order, cells in rows:
        got = weights(int(order), rate_G)
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(got.tolist(), abs=5.1e-4)

    def halved_at(pass_rate: float, first: int) -> float:
        falling = AdvantageSettings(estimator="maxrl", final_order=1)
        progress = np.linspace(0, 1, 1001)
        orders = [annealed(falling, x, first + 1).order or 0 for x in progress]
        kept = [float(weights(order, np.array([pass_rate]))[0]) for order in orders]
        return float(progress[np.argmax(np.array(kept) < (1 - pass_rate) / 2)])

    for first, rates in ((511, (0.002, 0.01, 0.05, 0.2)), (15, (0.05, 0.2))):
        [text] = re.findall(rf"From {first} to 1, (?:that|it) is (.*?)\.\s", section, re.DOTALL)
        stated = [int(percent) / 100 for percent in re.findall(r"(\d+)%", text)]
        order_is_whole = 0.08 if first == 15 else 0.03  # few orders are left where they are small
        assert stated == pytest.approx([halved_at(rate, first) for rate in rates], abs=order_is_whole)
    smallest = [float(x) for x in re.findall(r"to p = (\.\d+),\s+N = 128 to (\.\d+), N = 512 to (\.\d+)", section)[0]]
    for rate, order in zip(smallest, (15, 127, 511), strict=True):
        assert weights(order, np.array([rate]))[0] == pytest.approx((1 - rate) / 2, rel=0.03)  # two digits


@pytest.mark.parametrize("num_rollouts", [2, 3, 5])
def test_the_expectation_with_shaped_rewards(num_rollouts: int, rng: np.random.Generator) -> None:
    logits_V, reward_V, weight_C = rng.normal(size=5), rng.normal(size=5), rng.random(num_rollouts + 1)
    expected = enumerated(weight_C, logits_V, 2, reward_V)
    prob_V = np.exp(logits_V) / np.exp(logits_V).sum()
    np.testing.assert_allclose(shaped_expectation(weight_C, prob_V, reward_V, 2), expected, atol=1e-12)


def angle_to_mean_reward(weight_C: np.ndarray, pass_rate: float) -> float:
    """Return the angle in degrees for the four responses of the table of theory.md."""
    prob_V = np.array([pass_rate, pass_rate, 1 - pass_rate, 1 - pass_rate]) / 2
    reward_V = np.array([1.0, 0.9, 0.0, -0.1])
    got, mean_reward = shaped_expectation(weight_C, prob_V, reward_V, 2), prob_V * (reward_V - prob_V @ reward_V)
    cosine = got @ mean_reward / np.linalg.norm(got) / np.linalg.norm(mean_reward)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))


def test_a_constant_weight_keeps_the_direction_of_the_mean_reward(rng: np.random.Generator) -> None:
    for num_rollouts in (2, 16, 512):
        assert angle_to_mean_reward(tabulate(advantages.rloo_weight, num_rollouts), rng.uniform(0.001, 0.999)) < 1e-3


def test_the_angles_of_the_documentation_are_computed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    weights = {
        "`rloo`, mixed groups only": lambda n, c: advantages.rloo_weight(n, c) * (0 < c < n),
        "`grpo`": advantages.grpo_weight,
        "`maxrl`": advantages.maxrl_weight,
    }
    _, table = page.split("| shaped rewards | N |")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|((?: [\d.]+ \|){4})$", table.split("\n\n")[0], re.MULTILINE)
    assert {(name, int(n)) for name, n, _ in rows} == {(name, n) for name in weights for n in (16, 512)}
    for name, num_rollouts, cells in rows:
        weight_C = tabulate(weights[name], int(num_rollouts))
        got = [angle_to_mean_reward(weight_C, p) for p in (0.002, 0.02, 0.2, 0.5)]
        assert [float(cell) for cell in cells.split("|")[:-1]] == pytest.approx(got, abs=0.051)
