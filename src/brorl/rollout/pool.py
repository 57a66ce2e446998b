"""The protocol of a pool of rollout workers: tasks in, trees out, in the order in which they are done.

A pool places engines elsewhere: in other processes, on other machines. A task is sampled as one call of an engine, so
its trees do not depend on the number of workers, on the worker, or on the other tasks. A task whose worker is lost is
sampled again, with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree


@dataclass(frozen=True)
class SampleTask:
    """One call of an engine; see `Sampler.sample`.

    Attributes:
        prompts: Token ids of P prompts.
        num_rollouts: Rollouts of each prompt.
        sampling: Temperature, truncation, length limits.
        seed: Seed of the draws.
        first: Number of the first prompt.
    """

    prompts: Sequence[Sequence[int]]
    num_rollouts: int | Sequence[int]
    sampling: SamplingParams
    seed: int
    first: int = 0


class SampledTask(NamedTuple):
    """The result of a task.

    Attributes:
        ticket: The number that `submit` returned.
        trees: One tree per prompt, in order.
        version: Version of the weights that sampled them.
        seconds: Seconds that the worker spent on the task.
    """

    ticket: int
    trees: list[RolloutTree]
    version: int
    seconds: float


class SamplingPool(Protocol):
    """Samples tasks on several workers."""

    @property
    def num_workers(self) -> int:
        """Number of tasks that are sampled at the same time."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ...

    def submit(self, task: SampleTask) -> int:
        """Queue a task; it starts as soon as a worker is free, in the order of the calls.

        Returns:
            Its ticket. Tickets rise from call to call.
        """
        ...

    def done(self, timeout_s: float | None = None) -> list[SampledTask]:
        """Wait until at least one task is done, and return all that are; each is returned once.

        Args:
            timeout_s: Longest wait in seconds; None for no limit. After it the list can be empty.
        """
        ...

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget tasks; those that are being sampled end unseen."""
        ...

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights all tasks that start from now on; tasks under way keep theirs.

        Args:
            weights: The weights by name.
            version: Their version.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...
