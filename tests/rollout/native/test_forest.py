"""Growing trees node by node, in many orders, against building them from the finished responses."""

import numpy as np
import pytest

from brorl.rollout.native.growth import Forest
from brorl.tree import RolloutTree
from tree_invariants import check_tree

EOS = 0


def random_responses(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    responses = []
    for _ in range(count):
        body = tuple(rng.integers(1, 4, rng.integers(0, 6)).tolist())
        responses.append((*body, EOS) if rng.random() < 0.5 or not body else body)
    return responses


def grow(rng: np.random.Generator, prompts: list, responses_P: list, waves: bool) -> tuple[Forest, dict]:
    """Add the nodes of all prompts in random batches, parents first: level by level, or one subtree after the other."""
    forest = Forest(prompts)
    number: dict[tuple[int, tuple[int, ...]], int] = {(p, ()): -1 for p in range(len(prompts))}
    waiting = {(p, r[:i]) for p, rs in enumerate(responses_P) for r in rs for i in range(1, len(r) + 1)}
    while waiting:
        ready = [node for node in waiting if (node[0], node[1][:-1]) in number]
        depth = len(ready[rng.integers(len(ready))][1]) if waves else min(len(prefix) for _, prefix in ready)
        batch = [node for node in ready if len(node[1]) == depth]
        batch = [batch[i] for i in rng.permutation(len(batch))]
        if waves:
            batch = batch[: rng.integers(1, len(batch) + 1)]
        counts = [sum(r[:depth] == prefix for r in responses_P[p]) for p, prefix in batch]
        numbers = forest.add(
            depth - 1,
            np.array([p for p, _ in batch]),
            np.array([number[p, prefix[:-1]] for p, prefix in batch]),
            np.array([prefix[-1] for _, prefix in batch]),
            np.array(counts),
            np.array([-float(hash((p, prefix)) % 997) for p, prefix in batch]),
        )
        number |= dict(zip(batch, numbers.tolist(), strict=True))
        ends = [i for i, (p, prefix) in enumerate(batch) if prefix in responses_P[p]]
        forest.finish(
            numbers[ends],
            np.array([responses_P[batch[i][0]].count(batch[i][1]) for i in ends], np.int64),
            np.array([batch[i][1][-1] == EOS for i in ends], np.bool_),
        )
        waiting -= set(batch)
    return forest, number


@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3, 8])
def test_grown_trees_equal_trees_built_from_responses(rng: np.random.Generator, num_prompts: int, waves: bool) -> None:
    prompts = [tuple(rng.integers(0, 9, 3).tolist()) for _ in range(num_prompts)]
    responses_P = [random_responses(rng, int(rng.integers(1, 30))) for _ in prompts]
    forest, _ = grow(rng, prompts, responses_P, waves)
    for p, tree in enumerate(forest.trees()):
        responses = responses_P[p]
        check_tree(tree)
        assert tree == RolloutTree.from_responses(
            prompts[p],
            responses,
            [[-float(hash((p, r[: i + 1])) % 997) for i in range(len(r))] for r in responses],
            [r[-1] == EOS for r in responses],
        )


def test_paths_are_the_prefixes_of_the_nodes(rng: np.random.Generator) -> None:
    responses_P = [random_responses(rng, 20) for _ in range(3)]
    forest, number = grow(rng, [(1,), (2,), (3,)], responses_P, waves=True)
    for depth in range(max(len(prefix) for _, prefix in number)):
        nodes = [node for node in number if len(node[1]) == depth + 1]
        paths = forest.paths(np.array([number[node] for node in nodes]), depth)
        assert [tuple(path) for path in paths.tolist()] == [prefix for _, prefix in nodes]
    for tree, responses in zip(forest.trees(), responses_P, strict=True):  # asking for paths disturbs nothing
        assert sorted(r for r, c in tree.responses() for _ in range(c)) == sorted(responses)
