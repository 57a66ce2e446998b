"""Steps of a learner with given advantages, and the groups that its estimator of advantages receives."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from brorl.algorithms.groups import Group
from brorl.training.learner import Learner, StepMetrics


def learn(
    learner: Learner, groups: Sequence[Group], advantages: Sequence[Any], seed: int = 0, lr_scale: float = 1.0
) -> StepMetrics:
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
