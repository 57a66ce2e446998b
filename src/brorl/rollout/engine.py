"""What an engine is: prompts in, rollout trees out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree


class Engine(Protocol):
    """Samples N rollouts of each prompt."""

    def sample(
        self, prompts: Sequence[Sequence[int]], num_rollouts: int, sampling: SamplingParams, seed: int
    ) -> list[RolloutTree]:
        """Return one tree per prompt, in order, each with `num_rollouts` rollouts."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sample with these weights from now on."""
        ...
