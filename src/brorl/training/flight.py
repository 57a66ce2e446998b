"""A prompt under way: its rollouts are sampled in one piece, or in segments with the newest weights.

In: the trees of finished tasks. Out: the next task, until every rollout has ended. The first task samples the first
tokens of all rollouts. Each later one continues the unfinished responses from their prefixes, a prompt for each
distinct one, with as many rollouts as it has. The tree grows by their continuations, so each node has the log-prob of
the weights that sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from brorl.prompts.prompt import Prompt
from brorl.rollout.pool import SampledTask, SampleTask
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.tree import IntArray, RolloutTree


@dataclass(frozen=True)
class Start:
    """A prompt that begins.

    Attributes:
        serial: Number of the start, rising.
        prompt: The prompt.
        version: Newest version of the weights when it began; later, that of the weights that sampled its first tokens.
        wave: Number of the call that began it, among those with the same version.
        place: Its place among the prompts of the call.
    """

    serial: int
    prompt: Prompt
    version: int
    wave: int
    place: int


@dataclass(frozen=True)
class Flight:
    """A prompt whose rollouts are being sampled.

    Attributes:
        start: When it began.
        sampling: How responses are sampled.
        num_rollouts: N.
        segment_tokens: Tokens of a segment; None samples the rollouts in one piece.
        seed: Seed of its first task.
        tree: Its rollouts so far; None before the first task is done.
        num_tasks: Number of tasks that are done.
        worker_seconds: Seconds that workers spent on them.
    """

    start: Start
    sampling: SamplingParams
    num_rollouts: int
    segment_tokens: int | None
    seed: int
    tree: RolloutTree | None = None
    num_tasks: int = 0
    worker_seconds: float = 0.0

    def next_task(self) -> SampleTask | None:
        """Return the task that continues the rollouts; None if all of them have ended.

        A segment is longer than `segment_tokens` where `min_new_tokens` allows no response to end within it.
        """
        if self.tree is None:
            prompt = self.start.prompt.token_ids
            return SampleTask([prompt], self.num_rollouts, self._segment(0), self.seed, self.start.place)
        leaves = self._unfinished(self.tree)
        if not leaves.size:
            return None
        responses = self.tree.responses()
        return SampleTask(
            [self.tree.prompt_ids + responses[leaf][0] for leaf in leaves],
            self.tree.leaf_count[leaves].tolist(),
            self._segment(int(self.tree.length[leaves[0]])),
            derived_seed(self.seed, self.num_tasks, self.start.place),
        )

    def after(self, sampled: SampledTask) -> Flight:
        """Return the flight with the rollouts of its task."""
        start = self.start
        if self.tree is None:
            (tree,), start = sampled.trees, replace(start, version=sampled.version)
        else:
            tree = self.tree.extended(self._unfinished(self.tree), sampled.trees)
        seconds = self.worker_seconds + sampled.seconds
        return replace(self, start=start, tree=tree, num_tasks=self.num_tasks + 1, worker_seconds=seconds)

    @property
    def length(self) -> int:
        """Tokens of the longest response so far."""
        return 0 if self.tree is None else int(self.tree.length.max())

    def _unfinished(self, tree: RolloutTree) -> IntArray:
        """Return the responses that were cut by a segment; they have the same length."""
        return np.flatnonzero(~tree.finished & (tree.length < self.sampling.max_new_tokens))

    def _segment(self, length: int) -> SamplingParams:
        """Return the sampling of the tokens after the first `length`."""
        most, least = self.sampling.max_new_tokens - length, max(self.sampling.min_new_tokens - length, 0)
        if self.segment_tokens is not None:
            most = min(most, max(self.segment_tokens, least + 1))
        return replace(self.sampling, max_new_tokens=most, min_new_tokens=least)
