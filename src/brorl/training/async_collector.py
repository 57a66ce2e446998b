"""Asynchronous sampling: a collector whose pool samples the next groups while the learner makes its updates.

A step gets its groups as soon as enough are done. `Backlog` limits their staleness and number. One thread takes results
from the pool, and a second verifies them and submits tasks. Which groups a step gets depends on when they finish, so
repeated runs differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor

from brorl.activity import Decoding
from brorl.algorithms.groups import Group
from brorl.rollout.engine import Sampler, SampleTask, SamplingPool, TaskResult, prompt_seed
from brorl.runs.checkpoint import CollectorState
from brorl.seeds import derived_seed
from brorl.training.backlog import Backlog, PromptStart
from brorl.training.batch import Batch
from brorl.training.collector import Collector, RetryPolicy
from brorl.tree import RolloutTree

_POLL_S = 0.01  # interval at which the thread polls for results
_OBSERVE_S = 0.1  # interval at which a waiting caller reports progress
Sampled = tuple[PromptStart, TaskResult]
"""A prompt and its finished rollouts."""


@dataclass(kw_only=True)
class AsyncCollector(Collector):
    """A collector that samples ahead of the learner. Each training task has one prompt.

    It gives up after `dynamic_sampling.max_tries` times P consecutive prompts without a group to train on. Verifiers
    are called from a separate thread, so they must be thread-safe.
    """

    # samples the tasks; used only by this collector, under its lock; the caller closes it after the collector
    pool: SamplingPool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = threading.Condition()  # guards everything below, and the pool
        cluster = self.config.cluster
        self._backlog = Backlog(self.stream, self.config.prompts_per_step, cluster.max_staleness)
        self._retries = RetryPolicy(self.config.dynamic_sampling)
        self._round: list[Group] = []
        self._started: dict[int, PromptStart] = {}  # ticket -> training prompt being sampled
        self._asked: dict[int, list[RolloutTree] | None] = {}  # ticket of a `sample` task -> its trees; None until done
        self._batch = self._new_batch()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    @property
    def sampler(self) -> Sampler:
        """This collector itself: `sample` uses the same pool, always with the newest weights."""
        return self

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        """Sample with the newest weights. See `Sampler.sample`. Sampling for training continues in the meantime."""
        with self._changed:
            tickets = [self.pool.submit(piece) for piece in task.split(self.config.cluster.prompts_per_task)]
            self._asked |= dict.fromkeys(tickets)
            try:
                while any(self._asked[ticket] is None for ticket in tickets):
                    self._wait()
                return [tree for ticket in tickets for tree in self._asked[ticket] or ()]
            finally:  # an observer may raise
                self.pool.discard([ticket for ticket in tickets if self._asked[ticket] is None])
                for ticket in tickets:
                    del self._asked[ticket]

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Use these weights for all tasks that start from now on. Running tasks keep theirs. See `Collector`."""
        with self._changed:
            self._check()
            self.pool.publish(weights, version)
            self._backlog.advance(version)
            self._state_before_batch = None
            self._fill()
            self._start_thread()

    def next_batch(self, step: int) -> Batch:
        """Wait for enough groups, and return them with everything sampled since the last step."""
        with self._changed:
            self._state_before_batch = self._state()
            self._fill()
            with self.clock("generation"):
                while (taken := self._backlog.take(step)) is None:
                    if self._retries.is_over:
                        self._backlog.report()
                        self._attempts += 1
                        raise self._retries.error(self._take_batch())
                    self._wait()
            self._attempts = 0
            batch = self._take_batch()
            batch.groups, batch.ahead = taken
            batch.num_carried = self._backlog.num_ready
            self._fill()
            return batch

    def state(self) -> CollectorState:
        """Return the state for a checkpoint, including finished groups that have been reported but not trained on.

        A resumed run resamples all other prompts in progress.
        """
        with self._changed:
            return self._state()

    def load_state(self, state: CollectorState) -> None:
        """Restore a state. Sampling starts when weights are published. See `Collector`."""
        with self._changed:
            if state.stream is not None:
                self.stream.load_state_dict(state.stream)
            self.pool.discard(list(self._started))
            self._started.clear()
            self._backlog.load_state(state.carried, state.ahead)
            self._retries = RetryPolicy(self.config.dynamic_sampling)
            self._round.clear()
            self._attempts = state.attempts
            self._state_before_batch = None
            self._batch = self._new_batch()

    def close(self) -> None:
        """End the thread. The pool stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _state(self) -> CollectorState:
        carried, ahead = self._backlog.state()
        return CollectorState(self.stream.state_dict(), carried, self._attempts, ahead)

    def _new_batch(self) -> Batch:
        return Batch(attempt=self._attempts, dynamic_sampling=self.config.dynamic_sampling)

    def _take_batch(self) -> Batch:
        batch, self._batch = self._batch, self._new_batch()
        return batch

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the collector is closed; create a new one")

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="asynchronous collector", daemon=True)
            self._thread.start()

    def _fill(self) -> None:
        """Start as many prompts as the backlog allows, unless the run is about to give up."""
        if self._retries.is_over:
            return
        for start in self._backlog.start():
            seed = prompt_seed(derived_seed(self.config.seed, start.version + 1, start.call), start.index)
            prompt_ids = start.prompt.token_ids
            task = SampleTask([prompt_ids], self.config.rollouts_per_prompt, self._sampling, [seed])
            self._started[self.pool.submit(task)] = start

    def _receive(self, timeout_s: float | None) -> tuple[bool, list[Sampled]]:
        """Take results from the pool. Return whether there were any, and the finished training prompts."""
        ended: list[Sampled] = []
        results = self.pool.done(timeout_s)
        for result in results:
            if result.ticket in self._asked:
                self._asked[result.ticket] = result.trees
            elif result.ticket in self._started:
                start = replace(self._started.pop(result.ticket), version=result.version)
                self._backlog.began(start)
                ended.append((start, result))
        return bool(results), ended

    def _verify(self, done: Sequence[Sampled]) -> list[Group]:
        """Verify and reward the rollouts of finished prompts. The caller need not hold the lock."""
        prompts = [start.prompt for start, _ in done]
        verified = self.grader.verify(prompts, [result.trees[0] for _, result in done])
        versions = [start.version for start, _ in done]
        return [
            replace(self.grader.rewarded(group, version + 1), version=version)
            for group, version in zip(verified, versions, strict=True)
        ]

    def _add(self, done: Sequence[Sampled], groups: Sequence[Group]) -> None:
        """Add verified prompts, and start others to replace those without a group to train on."""
        any_added = False
        for (start, result), group in zip(done, groups, strict=True):
            if not self._backlog.finish(start, next(iter(self._retries.trainable([group])), None)):
                continue  # a state was loaded during its verification, so it no longer counts
            any_added = True
            self._batch.sampled.append(group)
            self._batch.rounds += 1
            self._batch.worker_seconds += result.seconds
            self._round.append(group)
            if len(self._round) == self.config.prompts_per_step:
                self._retries.add(self._round)
                self._round = []
        if any_added:
            self._fill()
        self._changed.notify_all()

    def _work(self) -> None:
        """Take results until the collector is closed. Runs in one thread; a second thread verifies the results."""
        try:
            with ThreadPoolExecutor(1, "verification") as verification:
                while True:
                    with self._changed:
                        if self._closed or self._error is not None:
                            return
                        any_done, ended = self._receive(0.0)
                        if not any_done:
                            self._changed.wait(_POLL_S)
                            continue
                        self._changed.notify_all()
                    if ended:
                        verification.submit(self._finish, ended)
        except BaseException as error:
            self._stop(error)

    def _finish(self, ended: Sequence[Sampled]) -> None:
        """Verify and add results."""
        try:
            groups = self._verify(ended)
            with self._changed:
                self._add(ended, groups)
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Stop all work. The error is raised in the caller's thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self) -> None:
        """Report progress, then wait for more. The caller must hold the lock. The observer may raise."""
        self._check()
        trees = [group.tree for group in self._batch.verified]
        wanted = self.config.samples_per_step
        ready = min(self._backlog.num_ready * self.config.rollouts_per_prompt, wanted)
        longest = max((int(tree.length.max()) for tree in trees), default=0)
        self.observe(Decoding(ready, wanted, sum(tree.num_unique_tokens for tree in trees), longest))
        self._await_work()

    def _await_work(self) -> None:
        self._start_thread()
        self._changed.wait(_OBSERVE_S)
