"""A simulation of the queue of a run: rollout workers, verifiers and a learner, event by event.

A synchronous step samples rounds as the collector does, verifies, learns and publishes. An asynchronous run samples
while the learner learns. A group starts only if the next `max_staleness` + 1 steps can train it; the oldest groups
train first, stragglers late. The results are a function of the seed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Generic, Literal, TypeVar

import numpy as np

from brorl.training.collect import prompts_of_round
from brorl.tree import FloatArray

Lengths = Callable[[int, np.random.Generator], FloatArray]
Owner = TypeVar("Owner")

_MAX_EVENTS = 20_000_000
_WARM_UP = 2  # steps before those of the result
_ROUNDING = 1e-6  # tokens; rows that end within it end together


class DecodingWorker(Generic[Owner]):
    """A rollout worker with continuous batching: rows that decode together, and rows that wait for a slot.

    All running rows gain a token in each decoding step, so that a row is finished when the worker has made as many
    steps as the row is long. Between two events the number of rows is constant, and time is steps times the seconds of
    a step.

    Args:
        step_seconds_B: Seconds of a decoding step with b rows, shape [slots + 1].
    """

    def __init__(self, step_seconds_B: FloatArray) -> None:
        self._seconds: list[float] = step_seconds_B.tolist()
        self._slots = len(self._seconds) - 1
        self._running: list[tuple[float, int, Owner]] = []  # by the step at which a row ends
        self._waiting: deque[tuple[float, Owner]] = deque()
        self._order = count()
        self._steps = 0.0
        self._time = 0.0
        self.stamp = 0
        """Changes with every change of the rows, which makes an earlier `next_end` void."""

    @property
    def load(self) -> int:
        """Rows that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def accepts(self) -> bool:
        """Whether a slot is free and no row waits for it."""
        return not self._waiting and len(self._running) < self._slots

    def add(self, time: float, lengths: FloatArray, owner: Owner) -> None:
        """Add rows at a time, which start as slots get free."""
        self._advance(time)
        self._waiting.extend((length, owner) for length in lengths.tolist())
        self._fill()

    def stall(self, time: float, seconds: float) -> None:
        """Pause decoding for some seconds, in addition to a pause that has not ended."""
        self._advance(time)
        self._time = max(self._time, time) + seconds
        self.stamp += 1

    def next_end(self) -> float:
        """Return the time at which the next row ends; infinite without rows."""
        if not self._running:
            return inf
        left = max(self._running[0][0] - self._steps, 0.0)
        return self._time + left * self._seconds[len(self._running)]

    def finish(self, time: float) -> list[Owner]:
        """Remove the rows that have ended by a time, fill their slots, and return their owners."""
        self._advance(time)
        limit = self._steps + _ROUNDING + 1e-9 * self._steps
        owners = []
        while self._running and self._running[0][0] <= limit:
            owners.append(heapq.heappop(self._running)[2])
        self._fill()
        return owners

    def _advance(self, time: float) -> None:
        """Decode until a time, which is at most that of the next end."""
        if time > self._time:
            if self._running:
                self._steps += (time - self._time) / self._seconds[len(self._running)]
            self._time = time

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            length, owner = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + length, next(self._order), owner))
        self.stamp += 1


@dataclass(frozen=True)
class Queue:
    """The workers and the work of a simulated run."""

    workers: int  # rollout workers, >= 1
    step_seconds_B: FloatArray  # seconds of a worker's decoding step with b rows, shape [slots + 1]
    group_rows: int  # rows of a group
    groups: int  # groups of a step, P
    learn_seconds: float  # seconds of the learner's step
    publish_seconds: float = 0.0  # seconds in which new weights reach the workers, which stand still
    verify_seconds: float = 0.0  # seconds of all verifiers for one group
    prefill_seconds: float = 0.0  # seconds of a worker at the start of a task
    parts: int = 1  # tasks of a group, which may run on different workers; at most `group_rows`
    kept_fraction: float = 1.0  # chance that a group is kept
    mode: Literal["sync", "async"] = "sync"  # whether sampling waits for learning
    # most steps between the weights of a group's first token and its training, except for stragglers; `async` only
    max_staleness: int = 1

    def __post_init__(self) -> None:
        if min(self.workers, self.group_rows, self.groups, self.parts) < 1 or self.step_seconds_B.size < 2:
            raise ValueError("workers, group_rows, groups and parts must be at least 1, and step_seconds_B needs two")
        if self.parts > self.group_rows or not 0 < self.kept_fraction <= 1:
            raise ValueError("parts must be at most group_rows, and kept_fraction must be in (0, 1]")


@dataclass(frozen=True)
class QueueResult:
    """Means over the simulated steps after the warm-up."""

    seconds: float  # seconds per step
    sampled_groups: float  # groups that finished sampling, per step
    sampled_tokens: float  # tokens of all rows that finished, per step
    staleness: float  # mean steps between the weights of a group's first token and its training
    verify_wait: float  # mean seconds between the end of a group's sampling and the start of its verification
    learner_busy: float  # fraction of the time in which the learner learns


def simulate_queue(queue: Queue, lengths: Lengths, seed: int, steps: int) -> QueueResult:
    """Simulate some steps of a run.

    Args:
        queue: The stations.
        lengths: Draws lengths in tokens, > 0, from a generator.
        seed: Seed of the draws.
        steps: Steps of the result, >= 1.

    Raises:
        RuntimeError: If the run does not end, because the kept fraction is too small.
    """
    simulation = _Simulation(queue, lengths, np.random.default_rng(seed))
    simulation.run_until(_WARM_UP)
    before = simulation.totals()
    simulation.run_until(_WARM_UP + steps)
    seconds, groups, tokens, staleness, waited, verified = (simulation.totals() - before).tolist()
    return QueueResult(
        seconds=seconds / steps,
        sampled_groups=groups / steps,
        sampled_tokens=tokens / steps,
        staleness=staleness / (steps * queue.groups),
        verify_wait=waited / max(verified, 1),
        learner_busy=steps * queue.learn_seconds / seconds if seconds else 0.0,
    )


@dataclass(eq=False)
class _Group:
    """A group in the queue: the version of the weights at its first token, and its rows."""

    lengths: FloatArray
    left: int
    version: int = -1
    sampled_at: float = 0.0


@dataclass(eq=False)
class _Simulation:
    """The state of a simulation. Events are (time, number, action): actions of one time run in their order."""

    queue: Queue
    lengths: Lengths
    generator: np.random.Generator
    time: float = 0.0
    version: int = 0
    steps: int = 0
    learning: bool = False
    kept: deque[_Group] = field(default_factory=deque)
    tasks: deque[tuple[_Group, FloatArray]] = field(default_factory=deque)
    sampling: int = 0  # groups that are submitted and not sampled
    verifying: int = 0  # groups that are sampled and not verified
    verifier_free: float = 0.0
    drawn: int = 0  # groups of this step, for the sizes of synchronous calls
    mixed: int = 0
    sampled_groups: int = 0
    sampled_tokens: float = 0.0
    staleness: int = 0
    waited: float = 0.0
    verified: int = 0

    def __post_init__(self) -> None:
        self._number = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._workers: list[DecodingWorker[_Group]] = [
            DecodingWorker(self.queue.step_seconds_B) for _ in range(self.queue.workers)
        ]
        self._sample()

    def totals(self) -> FloatArray:
        """Return the totals since the start: seconds, groups, tokens, staleness, waiting, verified groups."""
        counts = (self.sampled_groups, self.sampled_tokens, self.staleness, self.waited, self.verified)
        return np.array([self.time, *counts])

    def run_until(self, steps: int) -> None:
        """Run until some steps are done."""
        for _ in range(_MAX_EVENTS):
            if self.steps >= steps:
                return
            self.time, _, action = heapq.heappop(self._events)
            action()
        raise RuntimeError(f"{_MAX_EVENTS:,} events did not complete {steps} steps; raise the kept fraction")

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), action))

    def _sample(self) -> None:
        """Submit the groups that may start now, and give tasks to workers with free slots."""
        groups = self.queue.groups
        if self.queue.mode == "sync" and not (self.sampling or self.verifying or self.learning):
            self._submit(int(prompts_of_round(groups, groups - len(self.kept), self.mixed, self.drawn)))
        self._feed(self._workers)

    def _submit(self, number: int) -> None:
        for _ in range(number):
            lengths = self.lengths(self.queue.group_rows, self.generator)
            group = _Group(lengths, self.queue.group_rows)
            self.tasks.extend((group, part) for part in np.array_split(lengths, self.queue.parts))
        self.sampling += number

    def _may_start(self) -> bool:
        """Return whether the steps within the bound of staleness can train another asynchronous group."""
        pending = len(self.kept) + self.sampling + self.verifying
        return pending < (self.queue.max_staleness + (0 if self.learning else 1)) * self.queue.groups

    def _feed(self, workers: list[DecodingWorker[_Group]]) -> None:
        """Give tasks to workers with free slots, the least loaded first."""
        if not self.tasks and (self.queue.mode == "sync" or not self._may_start()):
            return
        free = [(worker.load, i) for i, worker in enumerate(workers) if worker.accepts]
        heapq.heapify(free)
        while free:
            if not self.tasks and self.queue.mode == "async" and self._may_start():
                self._submit(1)
            if not self.tasks:
                return
            worker = workers[heapq.heappop(free)[1]]
            group, part = self.tasks.popleft()
            if group.version < 0:
                group.version = self.version
            worker.add(self.time, part, group)
            if self.queue.prefill_seconds:
                worker.stall(self.time, self.queue.prefill_seconds)
            self._await(worker)
            if worker.accepts:
                heapq.heappush(free, (worker.load, workers.index(worker)))

    def _await(self, worker: DecodingWorker[_Group]) -> None:
        """Plan the next end of a row of a worker."""
        time, stamp = worker.next_end(), worker.stamp
        if time < inf:
            self._at(time, lambda: self._ended(worker, stamp))

    def _ended(self, worker: DecodingWorker[_Group], stamp: int) -> None:
        if stamp != worker.stamp:
            return
        for group in worker.finish(self.time):
            group.left -= 1
            if not group.left:
                self._sampled(group)
        self._await(worker)
        if worker.accepts:
            self._feed([worker])

    def _sampled(self, group: _Group) -> None:
        """Verify a group: at once, or after all others of a synchronous call."""
        self.sampling -= 1
        self.verifying += 1
        self.sampled_groups += 1
        self.sampled_tokens += float(group.lengths.sum())
        group.sampled_at = self.time
        if self.queue.mode == "sync":
            self.kept.append(group)
            if not self.sampling:
                self._at(self.time + self.verifying * self.queue.verify_seconds, self._verified_call)
            return
        start = max(self.time, self.verifier_free)
        self.waited += start - self.time
        self.verifier_free = start + self.queue.verify_seconds
        self._at(self.verifier_free, lambda: self._verified(group))

    def _verified_call(self) -> None:
        """Keep some groups of a synchronous call; learn, or sample the rest."""
        call = [self.kept.pop() for _ in range(self.verifying)]
        kept = [group for group in call if self.generator.random() < self.queue.kept_fraction]
        self.drawn += len(call)
        self.mixed += len(kept)
        self.verified += len(call)
        self.verifying = 0
        self.kept.extend(kept)
        if len(self.kept) >= self.queue.groups:
            self._learn()
        else:
            self._sample()

    def _verified(self, group: _Group) -> None:
        """Keep an asynchronous group or not, and learn if there are enough."""
        self.verifying -= 1
        self.verified += 1
        if self.generator.random() < self.queue.kept_fraction:
            self.kept.append(group)
        if not self.learning:
            self._learn_if_full()
        self._feed(self._workers)

    def _learn_if_full(self) -> None:
        if len(self.kept) >= self.queue.groups:
            self.kept = deque(sorted(self.kept, key=lambda group: group.version))
            self._learn()

    def _learn(self) -> None:
        for _ in range(self.queue.groups):
            self.staleness += self.steps - self.kept.popleft().version
        self.learning = True
        self._at(self.time + self.queue.learn_seconds, self._learned)

    def _learned(self) -> None:
        """Publish the weights; workers pause until they have them."""
        self.steps += 1
        self.drawn = self.mixed = 0
        if self.queue.mode == "async":
            for worker in self._workers:
                worker.stall(self.time, self.queue.publish_seconds)
                self._await(worker)
        self._at(self.time + self.queue.publish_seconds, self._published)

    def _published(self) -> None:
        self.version = self.steps
        self.learning = False
        if self.queue.mode == "async":
            self._learn_if_full()
        self._sample()
