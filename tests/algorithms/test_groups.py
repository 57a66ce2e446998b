"""A group is mixed exactly if some rollouts are correct and some are not, whatever their rewards."""

import numpy as np
import pytest

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree

PROMPT = Prompt("id", "text", (1, 2), "answer", "domain")
TREE = RolloutTree.from_responses((1, 2), [(3,), (3,), (4,), (5,), (5,), (5,)])


def group(correct: list[bool], reward: list[float] | None = None) -> Group:
    reward_L = np.array(correct, np.float64) if reward is None else np.array(reward)
    return Group(PROMPT, TREE, np.array(correct), reward_L)


@pytest.mark.parametrize(
    ("correct", "num_correct"),
    [
        ([False, False, False], 0),
        ([True, False, False], 2),
        ([False, True, False], 1),
        ([False, False, True], 3),
        ([True, False, True], 5),
        ([True, True, True], 6),
    ],
)
def test_mixed_means_neither_none_nor_all_of_the_rollouts(correct: list[bool], num_correct: int) -> None:
    assert group(correct).num_correct == num_correct
    assert group(correct).is_mixed == (num_correct not in (0, 6))


def test_the_raw_verdict_decides_not_the_shaped_reward() -> None:
    same_reward = group([True, False, True], [0.5, 0.5, 0.5])
    only_rewards_differ = group([True, True, True], [1.0, 0.2, 0.7])
    assert [g.is_mixed for g in (only_rewards_differ, same_reward)] == [False, True]


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1)])
def test_a_group_needs_one_verdict_and_one_reward_per_distinct_response(shape: tuple[int, ...]) -> None:
    right = np.zeros(3)
    with pytest.raises(ValueError, match="each of 3 distinct responses"):
        Group(PROMPT, TREE, np.zeros(shape, bool), right)
    with pytest.raises(ValueError, match="each of 3 distinct responses"):
        Group(PROMPT, TREE, right > 0, np.zeros(shape))
