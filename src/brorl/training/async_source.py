"""Asynchronous sampling: a source whose pool samples the next groups while the learner learns.

A step gets its groups as soon as enough are done. Their staleness and the memory of the source are bounded; see
`Backlog`. A thread takes results from the pool, verifies them and submits tasks: the order of completions decides the
groups of a step, and a repeated run differs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from brorl.activity import Decoding, Observe, Stopwatch
from brorl.algorithms.groups import Group
from brorl.config.settings import TrainConfig
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampledTask, Sampler, SampleTask, SamplingPool, sample_tasks
from brorl.runs.checkpoint import SourceState
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.training.backlog import Backlog, Flight, Stragglers
from brorl.training.source import Batch, GroupSource, RetryPolicy
from brorl.tree import RolloutTree
from brorl.verification.grade import Grader

_POLL_S = 0.01  # the thread looks for results this often
_OBSERVE_S = 0.1  # a caller that waits reports this often


@dataclass(kw_only=True)
class AsyncSource(GroupSource):
    """A source that samples ahead of the learner.

    It gives up after `max_tries` times P prompts in a row without a mixed group. Verifiers are called from a thread, so
    they must allow calls from several threads.
    """

    # samples tasks. Only this source may use it, under its lock. The caller closes it, after this source.
    pool: SamplingPool
    # A group trains at most this many updates after the weights that sampled its first token, unless its prompt is a
    # straggler
    max_staleness: int
    stragglers: Stragglers  # what happens to prompts that take longer; see `Backlog`
    segment_tokens: int | None = None  # tokens of a segment; None samples rollouts in one piece
    prompts_per_task: int = 1  # prompts of a task of the `sampler`; a task of training has one prompt

    @classmethod
    def from_recipe(
        cls,
        config: TrainConfig,
        stream: PromptStream,
        grader: Grader,
        pool: SamplingPool,
        clock: Stopwatch,
        observe: Observe,
    ) -> AsyncSource:
        """Make the source of a run."""
        settings = config.cluster
        return cls(
            pool=pool,
            stream=stream,
            grader=grader,
            sampling=config.sampling.params,
            num_rollouts=config.rollouts_per_prompt,
            prompts_per_step=config.prompts_per_step,
            dynamic_sampling=config.dynamic_sampling.enabled,
            max_tries=config.dynamic_sampling.max_tries,
            seed=config.seed,
            max_staleness=settings.max_staleness,
            stragglers=settings.stragglers,
            segment_tokens=settings.segment_tokens,
            prompts_per_task=settings.prompts_per_task,
            clock=clock,
            observe=observe,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = threading.Condition()  # guards everything below, and the pool
        self._backlog = Backlog(self.stream, self.prompts_per_step, self.max_staleness, self.stragglers)
        self._retries = RetryPolicy(self.max_tries, self.dynamic_sampling)
        self._round: list[Group] = []
        self._flights: dict[int, Flight] = {}  # by ticket
        self._in_verification: list[Flight] = []
        self._asked: dict[int, SampledTask | None] = {}  # tasks of the sampler, by ticket
        self._batch = self._new_batch()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    @property
    def sampler(self) -> Sampler:
        """This source: it samples other prompts over the same pool, with the newest weights only."""
        return self

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Sample with the newest weights; see `Sampler.sample`. Training continues to sample meanwhile."""
        tasks = sample_tasks(prompts, num_rollouts, sampling, seed, first, self.prompts_per_task)
        trees: list[list[RolloutTree]] = [[] for _ in tasks]
        missing = list(range(len(tasks)))
        while missing:  # once, unless a pool starts a task with older weights
            with self._changed, self._asking([tasks[i] for i in missing]) as tickets:
                while any(self._asked[ticket] is None for ticket in tickets):
                    self._wait()
                answers = [self._asked[ticket] for ticket in tickets]
            newest = self._backlog.version
            for i, answer in zip(missing, answers, strict=True):
                if answer is not None and answer.version >= newest:
                    trees[i] = answer.trees
            missing = [i for i in missing if not trees[i]]
        return [tree for some in trees for tree in some]

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights all tasks that start from now on; see `GroupSource`.

        Tasks in progress keep their weights. Stragglers are dropped if the backlog does not keep them.
        """
        with self._changed:
            self._check()
            self.pool.publish(weights, version)
            flights = [*self._flights.values(), *self._in_verification]
            length_of = {flight.start.serial: flight.length for flight in flights}
            dropped = self._backlog.advance(version, length_of)
            self._discard([ticket for ticket, flight in self._flights.items() if flight.start.serial in dropped])
            self._before = None
            self._fill()
            self._start_thread()

    def next_batch(self, step: int) -> Batch:
        """Return the groups of a step as soon as there are enough, and everything that was done since the last step.

        Raises:
            NoMixedGroupsError: After `max_tries` times `prompts_per_step` prompts in a row without a mixed group.
            UnverifiedError: If most rollouts could not be verified, three times in a row.
        """
        with self._changed:
            self._before = self._state()
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
            batch.groups, batch.staleness = taken
            batch.num_carried = batch.staleness.num_ready
            self._fill()
            return batch

    def state(self) -> SourceState:
        """Return the state for a checkpoint: the groups that a step has reported and none has trained.

        All other prompts that have begun are sampled again after a resume.
        """
        with self._changed:
            return self._state()

    def load_state(self, state: SourceState) -> None:
        """Restore a state; sampling begins when weights are published. See `GroupSource`."""
        with self._changed:
            if state.stream is not None:
                self.stream.load_state_dict(state.stream)
            self._discard(list(self._flights))
            self._backlog.load_state(state.carried, state.ahead)
            self._retries = RetryPolicy(self.max_tries, self.dynamic_sampling)
            self._round.clear()
            self._attempts, self._before = state.attempts, None
            self._batch = self._new_batch()

    def close(self) -> None:
        """End the thread; the pool stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _state(self) -> SourceState:
        carried, ahead = self._backlog.state()
        return SourceState(self.stream.state_dict(), carried, self._attempts, ahead)

    def _new_batch(self) -> Batch:
        return Batch(attempt=self._attempts, keeps_all=not self.dynamic_sampling)

    def _take_batch(self) -> Batch:
        batch, self._batch = self._batch, self._new_batch()
        return batch

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the source is closed; create a new one")

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="asynchronous source", daemon=True)
            self._thread.start()

    def _discard(self, tickets: Sequence[int]) -> None:
        self.pool.discard(tickets)
        for ticket in tickets:
            del self._flights[ticket]

    def _fill(self) -> None:
        """Begin as many prompts as the backlog allows, unless too many in a row gave no group."""
        if self._retries.is_over:
            return
        for start in self._backlog.start():
            seed = derived_seed(self.seed, start.version + 1, start.wave)
            self._submit(Flight(start, self.sampling, self.num_rollouts, self.segment_tokens, seed))

    def _submit(self, flight: Flight) -> bool:
        """Submit the next task of a prompt; False if it is done."""
        task = flight.next_task()
        if task is not None:
            self._flights[self.pool.submit(task)] = flight
        return task is not None

    def _receive(self, timeout_s: float | None) -> tuple[bool, list[Flight]]:
        """Take results from the pool; return whether there were any, and the prompts all of whose rollouts ended."""
        ended: list[Flight] = []
        results = self.pool.done(timeout_s)
        for sampled in results:
            if sampled.ticket in self._asked:
                self._asked[sampled.ticket] = sampled
            elif sampled.ticket in self._flights:
                flight = self._flights.pop(sampled.ticket).after(sampled)
                self._backlog.began(flight.start)
                if not self._submit(flight):
                    ended.append(flight)
        return bool(results), ended

    def _verify(self, flights: Sequence[Flight]) -> list[Group]:
        """Verify the rollouts of prompts; needs no lock."""
        prompts = [flight.start.prompt for flight in flights]
        trees = [flight.tree for flight in flights if flight.tree is not None]
        versions = [flight.start.version for flight in flights]
        verified = zip(self.grader.verify(prompts, trees), versions, strict=True)
        return [replace(self.grader.rewarded(g, version + 1), version=version) for g, version in verified]

    def _add(self, flights: Sequence[Flight], groups: Sequence[Group]) -> None:
        """Add verified prompts, and begin others to replace those without a group to train on."""
        any_added = False
        for flight, group in zip(flights, groups, strict=True):
            if not self._backlog.finish(flight.start.serial, next(iter(self._retries.kept([group])), None)):
                continue  # it was dropped while it was verified
            any_added = True
            self._batch.sampled.append(group)
            self._batch.rounds += flight.num_tasks
            self._batch.worker_seconds += flight.worker_seconds
            self._round.append(group)
            if len(self._round) == self.prompts_per_step:
                self._retries.add(self._round)
                self._round = []
        if any_added:
            self._fill()
        self._changed.notify_all()

    def _work(self) -> None:
        """Do the work of all results, in the thread."""
        try:
            while True:
                with self._changed:
                    if self._closed:
                        return
                    any_done, ended = self._receive(0.0)
                    self._in_verification = ended
                    if not any_done:
                        self._changed.wait(_POLL_S)
                        continue
                    self._changed.notify_all()
                if ended:
                    groups = self._verify(ended)
                    with self._changed:
                        self._in_verification = []
                        self._add(ended, groups)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait(self) -> None:
        """Wait for progress, with the lock held, and report it. The observer may raise."""
        self._check()
        trees = [group.tree for group in self._batch.verified]
        wanted = self.prompts_per_step * self.num_rollouts
        ready = min(self._backlog.num_ready * self.num_rollouts, wanted)
        longest = max((int(tree.length.max()) for tree in trees), default=0)
        self.observe(Decoding(ready, wanted, sum(tree.num_unique_tokens for tree in trees), longest))
        self._await_work()

    def _await_work(self) -> None:
        self._start_thread()
        self._changed.wait(_OBSERVE_S)

    @contextmanager
    def _asking(self, tasks: Sequence[SampleTask]) -> Iterator[list[int]]:
        """Submit tasks, and discard them at the end, even if an observer raises."""
        tickets = [self.pool.submit(task) for task in tasks]
        self._asked |= dict.fromkeys(tickets)
        try:
            yield tickets
        finally:
            self.pool.discard([ticket for ticket in tickets if self._asked[ticket] is None])
            for ticket in tickets:
                del self._asked[ticket]
