"""Outcome weights by enumeration of all outcomes: mean zero, and the gradient of the objective that each names."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from brorl.algorithms import advantages
from brorl.algorithms.advantages import outcome_weighted
from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree

PROMPT = Prompt("id", "text", (1, 2), "answer", "domain")


def expected_gradient(weight: Callable[[int, int], float], num_rollouts: int, logits_V: np.ndarray) -> np.ndarray:
    """E[(1/N) sum_i A_i grad log pi(y_i)] over all V^N outcomes of N draws from a softmax; 0 and 1 are right."""
    prob_V = np.exp(logits_V) / np.exp(logits_V).sum()
    total = np.zeros_like(logits_V)
    for draws in np.ndindex(*[logits_V.size] * num_rollouts):
        reward = np.array([1.0 if y < 2 else 0.0 for y in draws])
        advantage = weight(num_rollouts, int(reward.sum())) * (reward - reward.mean())
        assert abs(advantage.sum()) < 1e-9 * max(1.0, np.abs(advantage).max())
        score = np.eye(logits_V.size)[list(draws)] - prob_V
        total += np.prod(prob_V[list(draws)]) * (advantage @ score) / num_rollouts
    return total


def pass_rate_gradient(logits_V: np.ndarray) -> tuple[float, np.ndarray]:
    """p and its gradient in the logits, by central differences of the softmax."""

    def p(z: np.ndarray) -> float:
        e = np.exp(z - z.max())
        return float(e[:2].sum() / e.sum())

    eps = 1e-6
    steps = np.eye(logits_V.size) * eps
    return p(logits_V), np.array([(p(logits_V + d) - p(logits_V - d)) / (2 * eps) for d in steps])


def d_pass_at(k: int, p: float) -> float:
    return k * (1 - p) ** (k - 1)


N = 5
OBJECTIVES = {
    "rloo": (advantages.rloo_weight, lambda _: 1.0),
    "reinforce": (advantages.reinforce_pp_baseline_weight, lambda _: 1 - 1 / N),
    **{
        f"pass@{k}": (partial(advantages.pass_at_k_weight, k=k), partial(lambda p, k: d_pass_at(k, p), k=k))
        for k in range(1, N)
    },
    **{
        f"maxrl-{t}": (
            partial(advantages.maxrl_weight, order=t),
            partial(lambda p, t: sum(d_pass_at(k, p) / k for k in range(1, min(t or N, N - 1) + 1)), t=t),
        )
        for t in (1, 2, 3, 4, 9, None)
    },
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_expectation_is_the_gradient_of_the_objective(name: str, rng: np.random.Generator) -> None:
    weight, derivative = OBJECTIVES[name]
    logits_V = rng.normal(size=4)
    p, gradient_V = pass_rate_gradient(logits_V)
    found = expected_gradient(weight, N, logits_V)
    np.testing.assert_allclose(found, derivative(p) * gradient_V, rtol=1e-7, atol=1e-9)


def test_the_weights_of_pass_at_k_add_up_to_one_over_the_mean(rng: np.random.Generator) -> None:
    """sum_{k<N} W_k / k = N/c, and the partial sums are MaxRL's orders."""
    for num_rollouts in rng.integers(2, 300, 20).tolist():
        c = int(rng.integers(1, num_rollouts))
        order = int(rng.integers(1, num_rollouts))
        parts = [advantages.pass_at_k_weight(num_rollouts, c, k) / k for k in range(1, num_rollouts)]
        assert sum(parts[:order]) == pytest.approx(advantages.maxrl_weight(num_rollouts, c, order), rel=1e-10)
        assert sum(parts) == pytest.approx(num_rollouts / c, rel=1e-10)


def test_grpo_is_one_over_the_standard_deviation(rng: np.random.Generator) -> None:
    for _ in range(20):
        n = int(rng.integers(2, 600))
        c = int(rng.integers(1, n))
        rewards = np.repeat([1.0, 0.0], [c, n - c])
        assert advantages.grpo_weight(n, c) == pytest.approx(1 / rewards.std(), rel=1e-10)
    assert advantages.grpo_weight(8, 0) == advantages.grpo_weight(8, 8) == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 5 rollouts"):
        advantages.pass_at_k_weight(5, 2, 5)
    with pytest.raises(ValueError, match="order must be at least 1"):
        advantages.maxrl_weight(5, 2, 0)
    with pytest.raises(ValueError, match="at least 2 rollouts"):
        advantages.maxrl_weight(1, 1)


def test_the_weight_comes_from_verdicts_and_the_direction_from_rewards(rng: np.random.Generator) -> None:
    responses = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(30)]
    tree = RolloutTree.from_responses(PROMPT.token_ids, responses)
    correct_L = rng.random(tree.num_responses) < 0.4
    correct_L[:2] = True, False
    reward_L = rng.normal(size=tree.num_responses)
    [advantage_L] = outcome_weighted([Group(PROMPT, tree, correct_L, reward_L)], advantages.maxrl_weight)
    rows = [(c, r) for c, r, n in zip(correct_L, reward_L, tree.leaf_count, strict=True) for _ in range(n)]
    fraction = sum(c for c, _ in rows) / len(rows)
    mean = sum(r for _, r in rows) / len(rows)
    np.testing.assert_allclose(advantage_L, [(r - mean) / fraction for r in reward_L], rtol=1e-10)
