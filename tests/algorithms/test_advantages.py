"""Advantages against loops over the rollouts, and outcome weights against the gradients that they name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt

import numpy as np
import pytest

from brorl.algorithms import advantages
from brorl.algorithms.advantages import advantage_estimator, outcome_weighted
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree

PROMPT = Prompt("id", "text", (1, 2), "answer", "domain")
REINFORCE = advantage_estimator(AdvantageSettings(estimator="reinforce_pp_baseline"))
REINFORCE_BY_TOKEN = advantage_estimator(AdvantageSettings(estimator="reinforce_pp_baseline", normalize_over="tokens"))
GRPO = advantage_estimator(AdvantageSettings(estimator="grpo"))
RLOO = advantage_estimator(AdvantageSettings(estimator="rloo"))


def random_group(rng: np.random.Generator, num_rollouts: int = 30, graded: bool = False) -> Group:
    responses = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(num_rollouts)]
    tree = RolloutTree.from_responses(PROMPT.token_ids, responses)
    reward = rng.normal(size=tree.num_responses) if graded else rng.integers(0, 2, tree.num_responses).astype(float)
    reward[0] = 1.5  # never all equal
    return Group(PROMPT, tree, reward > 0.5, reward)


@pytest.mark.parametrize("estimate", [REINFORCE, GRPO, RLOO])
def test_equal_rewards_have_an_advantage_of_exactly_zero(
    estimate: Callable[[Sequence[Group]], list[np.ndarray]], rng: np.random.Generator
) -> None:
    """For any N and any reward: the mean of equal numbers can differ from them in the last bit."""
    groups = [random_group(rng, int(rng.integers(3, 40)), graded=True) for _ in range(60)]
    equal = [
        replace(group, reward_L=np.full(group.tree.num_responses, rng.uniform(0.1, 1))) if i % 2 else group
        for i, group in enumerate(groups)
    ]
    for i, advantage_L in enumerate(estimate(equal)):
        assert bool(advantage_L.any()) == (i % 2 == 0)


def repeated(group: Group) -> list[tuple[int, float, int]]:
    """(distinct response, reward, length in tokens), once per rollout."""
    return [
        (leaf, float(group.reward_L[leaf]), len(response))
        for leaf, (response, count) in enumerate(group.tree.responses())
        for _ in range(count)
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    return sqrt(sum((v - mean(values)) ** 2 for v in values) / len(values))


def loop_reinforce(groups: Sequence[Group], per_token: bool) -> list[dict[int, float]]:
    centered = []
    for group in groups:
        baseline = mean([reward for _, reward, _ in repeated(group)])
        centered.append([(leaf, reward - baseline, length) for leaf, reward, length in repeated(group)])
    batch = [a for rows in centered for _, a, length in rows for _ in range(length if per_token else 1)]
    return [{leaf: (a - mean(batch)) / (std(batch) + 1e-8) for leaf, a, _ in rows} for rows in centered]


def loop_grpo(groups: Sequence[Group]) -> list[dict[int, float]]:
    found = []
    for group in groups:
        rewards = [reward for _, reward, _ in repeated(group)]
        found.append({leaf: (r - mean(rewards)) / (std(rewards) + 1e-8) for leaf, r, _ in repeated(group)})
    return found


def loop_rloo(groups: Sequence[Group]) -> list[dict[int, float]]:
    found: list[dict[int, float]] = []
    for group in groups:
        rows = repeated(group)
        found.append({})
        for i, (leaf, reward, _) in enumerate(rows):
            found[-1][leaf] = reward - mean([r for j, (_, r, _) in enumerate(rows) if j != i])
    return found


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize(
    ("tree_form", "loop_form"),
    [
        (REINFORCE, lambda groups: loop_reinforce(groups, per_token=False)),
        (REINFORCE_BY_TOKEN, lambda groups: loop_reinforce(groups, per_token=True)),
        (GRPO, loop_grpo),
        (RLOO, loop_rloo),
    ],
    ids=["reinforce++ trajectories", "reinforce++ tokens", "grpo", "rloo"],
)
def test_advantages_equal_a_loop_over_rollouts(
    tree_form: Callable, loop_form: Callable, graded: bool, rng: np.random.Generator
) -> None:
    groups = [random_group(rng, int(rng.integers(2, 40)), graded) for _ in range(5)]
    assert any(g.tree.leaf_count.max() > 1 for g in groups)
    for got, expected in zip(tree_form(groups), loop_form(groups), strict=True):
        np.testing.assert_allclose(got, [expected[leaf] for leaf in range(got.size)], rtol=1e-10, atol=1e-12)


def test_rloo_refuses_a_single_rollout() -> None:
    tree = RolloutTree.from_responses((1,), [(2,)])
    with pytest.raises(ValueError, match="at least 2 rollouts"):
        RLOO([Group(PROMPT, tree, np.array([True]), np.array([1.0]))])


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
