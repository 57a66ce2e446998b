"""Steps of a learner with given advantages, and the groups that its estimator of advantages receives."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.runs.step_record import UpdateRecord
from brorl.training.learner import Learner
from brorl.tree import RolloutTree
from small_models import random_tree


def learn(
    learner: Learner, groups: Sequence[Group], advantages: Sequence[Any], seed: int = 0, lr_scale: float = 1.0
) -> UpdateRecord:
    return learner.learn(groups, lambda _: list(advantages), seed, lr_scale)


class _ReceivedError(Exception):
    pass


def penalized_groups(learner: Learner, groups: Sequence[Group]) -> list[Group]:
    """The groups as the estimator receives them, with the KL penalty on their rewards; nothing is trained."""
    received: list[Group] = []

    def estimate(groups: Sequence[Group]) -> list[Any]:
        received.extend(groups)
        raise _ReceivedError

    with suppress(_ReceivedError):
        learner.learn(groups, estimate, seed=0)
    return received


def group_of(tree: RolloutTree, rng: np.random.Generator) -> Group:
    """A group with random verdicts."""
    correct_L = rng.random(tree.num_responses) < 0.5
    return Group(Prompt("id", "text", tree.prompt_ids, "answer", "domain"), tree, correct_L, correct_L.astype(float))


def batch_of(rng: np.random.Generator, num_groups: int = 4) -> tuple[list[Group], list[np.ndarray]]:
    groups = []
    for _ in range(num_groups):
        tree = random_tree(rng, num_rollouts=30, branching=8)
        groups.append(group_of(replace(tree, logprob=rng.uniform(-3, -1, tree.num_unique_tokens)), rng))
    return groups, [rng.normal(size=g.tree.num_responses) for g in groups]
