"""Groups: which are mixed, and which rollouts and numbers are left of one."""

from dataclasses import replace

import numpy as np
import pytest

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import unverified_verdict, verdict_of
from small_models import random_tree

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


def test_a_part_has_the_numbers_of_its_responses_and_of_their_prefixes(rng: np.random.Generator) -> None:
    """Each number is looked up by its response or its prefix in a plain dictionary."""
    tree = random_tree(rng, num_rollouts=30, branching=6)
    of_leaves, of_nodes = ("reward_L", "advantage_L", "factor_L"), ("old_logprob_M", "reference_logprob_M")
    numbers = {name: rng.normal(size=tree.num_responses) for name in of_leaves}
    numbers |= {name: rng.normal(size=tree.num_unique_tokens) for name in of_nodes}
    verdicts = [verdict_of("correct" if rng.random() < 0.5 else f"reason {i}") for i in range(tree.num_responses)]
    correct_L = np.array([verdict.correct for verdict in verdicts])
    terms_L = {"brief": rng.normal(size=tree.num_responses)}
    prompt = Prompt("id", "text", tree.prompt_ids, "answer", "domain")
    whole = Group(prompt, tree, correct_L, verdicts=verdicts, terms_L=terms_L, version=3, **numbers)

    def looked_up(group: Group) -> dict[object, object]:
        """By response with its ending, and by prefix."""
        endings = [
            (tokens, bool(done)) for (tokens, _), done in zip(group.tree.responses(), group.tree.finished, strict=True)
        ]
        values_of: dict[object, object] = {}
        for i, ending in enumerate(endings):
            values_of[ending] = (
                group.verdicts[i], group.correct_L[i], group.terms_L["brief"][i],
                group.tree.leaf_count[i], *(getattr(group, name)[i] for name in of_leaves),
            )  # fmt: skip
        for node in range(group.tree.num_unique_tokens):
            prefix = tuple(group.tree.token[group.tree.path(node)].tolist())
            values_of[prefix] = tuple(getattr(group, name)[node] for name in of_nodes)
        return values_of

    every = looked_up(whole)
    for _ in range(20):
        chosen = np.flatnonzero(rng.random(tree.num_responses) < 0.4)
        if chosen.size:
            part = whole.select(chosen)
            assert looked_up(part).items() <= every.items()
            kept = {tree.responses()[i][0] for i in chosen}
            assert {tokens for tokens, _ in part.tree.responses()} == kept
            assert part.version == 3


def test_arrays_that_are_not_known_stay_unknown_in_a_part() -> None:
    part = group([True, False, True]).select(np.array([0, 2]))
    assert part.old_logprob_M is part.reference_logprob_M is part.advantage_L is part.factor_L is None
    assert part.verdicts == ()
    assert part.correct_L.tolist() == [True, True]


@pytest.mark.parametrize("lost", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_unverified_responses_are_neither_correct_nor_incorrect(lost: list[int]) -> None:
    """Against plain counting over the rollouts: the responses have 2, 1 and 3, and the last one is incorrect."""
    verdicts = [verdict_of("correct"), verdict_of("correct"), verdict_of("wrong answer")]
    marked = [unverified_verdict("a worker was lost") if i in lost else v for i, v in enumerate(verdicts)]
    judged = Group.from_verdicts(PROMPT, TREE, marked)
    left = [i for i in (0, 0, 1, 2, 2, 2) if i not in lost]
    right = sum(i < 2 for i in left)
    assert (judged.num_unverified, judged.num_correct) == (6 - len(left), right)
    assert judged.is_mixed == (0 < right < len(left))
    assert np.isnan(judged.reward_L).tolist() == [i in lost for i in range(3)]
    if len(left) < 2:
        assert judged.verified is None
        return
    assert judged.verified is not None
    assert (judged.verified is judged) == (not lost)
    assert judged.verified.tree.leaf_count.tolist() == [left.count(i) for i in sorted(set(left))]
    assert judged.verified.reward_L.tolist() == [float(i < 2) for i in sorted(set(left))]
    assert judged.verified.is_mixed == judged.is_mixed


@pytest.mark.parametrize("name", ["old_logprob_M", "reference_logprob_M"])
def test_log_probs_need_one_entry_per_node(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs one entry for each of 3 nodes, got shape"):
        replace(group([True, False, True]), **{name: np.zeros(4)})
