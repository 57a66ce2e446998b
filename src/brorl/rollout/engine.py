"""Engines turn prompts into rollout trees. This module defines their protocol, and an engine over a pool of workers.

The collector owns the engine and publishes weights to it. Evaluation and diagnostics only receive a `Sampler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from brorl.activity import Decoding, Observe, unobserved
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree

_WORD = 2**32


def prompt_seed(seed: int, index: int) -> int:
    """Return a prompt's seed, 0 to 2**96 - 1, from its task's seed and the prompt's index in the task."""
    return (seed % _WORD**2) * _WORD + index


def split_prompt_seed(prompt_seed: int) -> tuple[int, int]:
    """Return the two arguments that `prompt_seed` combined."""
    return divmod(prompt_seed, _WORD)


@dataclass(frozen=True)
class SampleTask:
    """The work of one sampler call: N rollouts of each of P prompts.

    A prompt's draws depend only on its seed and number of rollouts, so a task can be split into several calls.

    Raises:
        ValueError: If a prompt has no tokens or no rollouts, or if the numbers of prompts, counts and seeds differ.
    """

    prompts: Sequence[Sequence[int]]  # token ids of P prompts
    num_rollouts: int | Sequence[int]  # rollouts per prompt, N: one number for all prompts, or P numbers
    sampling: SamplingParams  # temperature, truncation, length limits
    seed: int | Sequence[int]  # seed of the draws, or P seeds from `prompt_seed`

    def __post_init__(self) -> None:
        for name, value_P in (("rollout counts", self.num_rollouts), ("seeds", self.seed)):
            if not isinstance(value_P, int) and len(value_P) != len(self.prompts):
                raise ValueError(
                    f"got {len(value_P)} {name} for {len(self.prompts)} prompts; pass one per prompt, or one for all"
                )
        if min(self.rollouts_P, default=1) < 1 or not all(len(prompt) for prompt in self.prompts):
            raise ValueError("every prompt needs at least one token and num_rollouts must be >= 1")

    @property
    def rollouts_P(self) -> list[int]:
        """Number of rollouts for each prompt."""
        num_rollouts = self.num_rollouts
        return [num_rollouts] * len(self.prompts) if isinstance(num_rollouts, int) else list(num_rollouts)

    @property
    def seed_P(self) -> list[int]:
        """Seed for each prompt."""
        if isinstance(self.seed, int):
            return [prompt_seed(self.seed, index) for index in range(len(self.prompts))]
        return list(self.seed)

    def split(self, size: int) -> list[SampleTask]:
        """Split into tasks of at most `size` prompts, in order: five prompts with size 2 become 2, 2 and 1."""
        rollouts_P, seed_P = self.rollouts_P, self.seed_P
        slices = [slice(start, start + size) for start in range(0, len(self.prompts), size)]
        return [SampleTask(self.prompts[s], rollouts_P[s], self.sampling, seed_P[s]) for s in slices]


class Sampler(Protocol):
    """Samples N rollouts of each prompt with the most recently published weights."""

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Return one tree per prompt, in order."""
        ...


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def version(self) -> int:
        """Version of the weights: the step whose update produced them; 0 at the start."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """From now on, sample with these weights."""
        ...

    def close(self) -> None:
        """End the processes that the engine started."""
        ...


_POLL_S = 0.2  # seconds between reports to the observer, which can end the call on Ctrl-C


class TaskResult(NamedTuple):
    """A task's result."""

    ticket: int  # the number that `submit` returned
    trees: list[RolloutTree]  # one tree per prompt, in order
    version: int  # version of the weights that sampled them
    seconds: float  # seconds that the worker spent on the task


class SamplingPool(Protocol):
    """Runs sampling tasks on several workers."""

    def submit(self, task: SampleTask) -> int:
        """Queue a task and return its ticket. Idle workers take tasks in order, and tickets increase."""
        ...

    def done(self, timeout_s: float | None = None) -> list[TaskResult]:
        """Wait until a task is done or `timeout_s` has passed. Return the tasks finished since the last call."""
        ...

    def discard(self, tickets: Iterable[int]) -> None:
        """Drop tasks that are still queued, and the results of those in progress."""
        ...

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Use these weights for every task that starts from now on. Tasks in progress keep their weights."""
        ...


class PooledEngine:
    """Samples on a pool of workers, with `prompts_per_task` prompts per task. Nothing else may take the pool's results.

    The observer receives a `Decoding` whenever tasks finish, and several times a second in between.
    """

    def __init__(self, pool: SamplingPool, prompts_per_task: int = 1, observe: Observe = unobserved) -> None:
        self.version = 0
        self._pool = pool
        self._prompts_per_task = prompts_per_task
        self._observe = observe

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish weights to the workers; see `Engine`."""
        self._pool.publish(weights, version)
        self.version = version

    def close(self) -> None:
        """Do nothing: the workers end with the cluster."""

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler`.

        Trees do not depend on workers or other tasks: if a worker is lost, its part is sampled again with the same
        seed. If the observer or a worker raises an error, all parts are discarded.
        """
        trees_of: dict[int, list[RolloutTree]] = {}
        tickets = [self._pool.submit(split_task) for split_task in task.split(self._prompts_per_task)]
        progress = Decoding(finished=0, rollouts=sum(task.rollouts_P), tokens=0, depth=0)
        try:
            while len(trees_of) < len(tickets):
                for done in self._pool.done(_POLL_S):
                    trees_of[done.ticket] = done.trees
                    progress = replace(
                        progress,
                        finished=progress.finished + sum(tree.num_rollouts for tree in done.trees),
                        tokens=progress.tokens + sum(tree.num_unique_tokens for tree in done.trees),
                        depth=max(progress.depth, *(int(tree.length.max()) for tree in done.trees)),
                    )
                self._observe(progress)
        finally:
            self._pool.discard([ticket for ticket in tickets if ticket not in trees_of])
        return [tree for ticket in tickets for tree in trees_of[ticket]]
