"""An engine over a pool of rollout workers: cuts each call into tasks, and waits for all of them.

In: prompts, N, sampling parameters, a seed. Out: one tree per prompt, in order. The cut does not depend on the number
of workers, and neither do the trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from brorl.activity import Decoding, Observe, unobserved
from brorl.rollout.engine import rollouts_of_prompts
from brorl.rollout.pool import SampleTask, SamplingPool
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree

_POLL_S = 0.2  # between two reports to the observer, which ends the call on Ctrl-C


class PooledEngine:
    """Samples on the workers of a pool; no other code takes results from the pool during a call.

    Args:
        pool: The workers.
        prompts_per_task: Prompts that a worker samples together, 1 or more.
        observe: Receives a `Decoding` whenever tasks are done, and several times a second in between.

    Raises:
        ValueError: If a task has no prompts.
    """

    def __init__(self, pool: SamplingPool, prompts_per_task: int = 1, observe: Observe = unobserved) -> None:
        if prompts_per_task < 1:
            raise ValueError(f"prompts_per_task must be 1 or more, got {prompts_per_task}")
        self.version = 0
        self._pool = pool
        self._prompts_per_task = prompts_per_task
        self._observe = observe

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self._pool.stop_token_ids

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish weights to the workers; see `Engine`."""
        self._pool.publish(weights, version)
        self.version = version

    def row_costs(self, max_rows: int, max_tokens: int) -> None:  # noqa: ARG002 (of the protocol)
        """Return None: the rows are in the memory of the workers."""
        return

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Sample N rollouts of each prompt; see `Sampler`.

        If the observer or a worker raises, all tasks of the call are discarded.
        """
        rollouts_P = rollouts_of_prompts(num_rollouts, len(prompts))
        size = self._prompts_per_task
        tasks = [
            SampleTask(prompts[i : i + size], rollouts_P[i : i + size], sampling, seed, first + i)
            for i in range(0, len(prompts), size)
        ]
        trees_of: dict[int, list[RolloutTree]] = {}
        tickets = [self._pool.submit(task) for task in tasks]
        progress = Decoding(finished=0, rollouts=sum(rollouts_P), tokens=0, depth=0)
        try:
            while len(trees_of) < len(tickets):
                for done in self._pool.done(_POLL_S):
                    trees_of[done.ticket] = done.trees
                    progress = _advanced(progress, done.trees)
                self._observe(progress)
        finally:
            self._pool.discard([ticket for ticket in tickets if ticket not in trees_of])
        return [tree for ticket in tickets for tree in trees_of[ticket]]


def _advanced(progress: Decoding, trees: Sequence[RolloutTree]) -> Decoding:
    """Return the progress of a call after one more task."""
    return Decoding(
        finished=progress.finished + sum(tree.num_rollouts for tree in trees),
        rollouts=progress.rollouts,
        tokens=progress.tokens + sum(tree.num_unique_tokens for tree in trees),
        depth=max(progress.depth, *(int(tree.length.max()) for tree in trees)),
    )
