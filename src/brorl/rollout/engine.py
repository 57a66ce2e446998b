"""The engine protocol: prompts in, rollout trees out, with the weights that were published last.

The source of groups owns the engine and publishes weights to it. Evaluation and diagnostics get a `Sampler` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree


class Sampler(Protocol):
    """Samples N rollouts of each prompt with the current weights."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Return one tree per prompt, in order.

        Args:
            prompts: Token ids of P prompts.
            num_rollouts: Rollouts of each prompt, N; one number for all, or P numbers.
            sampling: Temperature, truncation, length limits.
            seed: Seed of the draws.
            first: Number of the first prompt. The draws of a prompt depend on the seed and its number, so parts of a
                batch can be sampled in separate calls.
        """
        ...


def rollouts_of_prompts(num_rollouts: int | Sequence[int], num_prompts: int) -> list[int]:
    """Return the rollouts of each of P prompts, from one number for all or one for each.

    Raises:
        ValueError: If there are other than P numbers.
    """
    if isinstance(num_rollouts, int):
        return [num_rollouts] * num_prompts
    if len(num_rollouts) != num_prompts:
        raise ValueError(f"got {len(num_rollouts)} rollout counts for {num_prompts} prompts; pass one per prompt")
    return list(num_rollouts)


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def version(self) -> int:
        """Version of the weights: the number of the step whose update made them; 0 for the start."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on."""
        ...
