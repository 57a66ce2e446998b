"""Advantages against plain loops over all N rollouts, each response repeated by its count."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from brorl.algorithms.advantages import advantage_estimator
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
