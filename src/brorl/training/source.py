"""The source protocol: where the groups of a step come from.

The training loop calls `next_groups(step)`. A source may sample when it is called, as `Collector` does, or
return groups that it sampled earlier: each group carries the version of the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from brorl.algorithms.groups import Group
from brorl.rollout.engine import Sampler
from brorl.training.collected import Collected


@dataclass(frozen=True)
class Batch:
    """The groups of one step.

    Attributes:
        groups: The groups that the step trains on.
        sampled: Everything that was sampled for the step, dropped and surplus groups included.
        num_waiting: Surplus groups that wait for a later step.
    """

    groups: list[Group]
    sampled: Collected
    num_waiting: int


class SourceState(NamedTuple):
    """The state from which a source continues exactly.

    Attributes:
        stream: Position of the prompt stream; None at the start of a run.
        waiting: Groups that were sampled but not trained on.
        attempts: How often the next step has found no mixed group.
    """

    stream: dict[str, Any] | None = None
    waiting: tuple[Group, ...] = ()
    attempts: int = 0


class NoMixedGroupsError(RuntimeError):
    """No group was mixed for as many rounds as the config allows.

    Mixed groups that were found before wait in the source for the next attempt.

    Attributes:
        collected: Everything that was sampled for the step.
    """

    def __init__(self, message: str, collected: Collected) -> None:
        super().__init__(message)
        self.collected = collected


class GroupSource(Protocol):
    """Gives each step its groups."""

    def next_groups(self, step: int) -> Batch:
        """Return the groups of a step.

        Raises:
            NoMixedGroupsError: If the source finds no mixed group.
        """
        ...

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on.

        Args:
            weights: The weights by name.
            version: Number of the step whose update made them.
        """
        ...

    @property
    def sampler(self) -> Sampler:
        """Samples other prompts with the published weights, for evaluation and diagnostics."""
        ...

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        ...

    def rewind(self) -> None:
        """Undo the last `next_groups` if its weights have not been replaced since; its groups are sampled again."""
        ...

    def state(self) -> SourceState:
        """Return the state for a checkpoint."""
        ...

    def load_state(self, state: SourceState) -> None:
        """Restore a state.

        Raises:
            ValueError: If the prompts are others than those of the state.
        """
        ...
