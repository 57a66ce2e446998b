"""Asynchronous sampling: a source whose pool samples the next groups while the learner learns.

In: a pool of rollout workers, prompts, published weights. Out: the groups of a step as soon as enough are done,
whatever else is still being sampled. The staleness of a group and the memory of the source are bounded; see `Backlog`.

In the background, a thread takes results from the pool, verifies them and submits tasks. Then the order of completions
decides the groups of a step, and a repeated run differs. In the foreground, the same work is done within the calls of
the training loop. Over a pool with a virtual clock, such a run is reproducible bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from torch import Tensor

from brorl.activity import Decoding, Observe, unobserved
from brorl.prompts.stream import PromptSupply
from brorl.rollout.engine import Sampler, rollouts_of_prompts
from brorl.rollout.pool import SampledTask, SampleTask, SamplingPool
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.training.backlog import Backlog, Stragglers
from brorl.training.drawn import GradedPrompt, RetryPolicy
from brorl.training.flight import Flight
from brorl.training.source import Batch, Collected, SourceState
from brorl.training.stopwatch import Stopwatch
from brorl.tree import RolloutTree
from brorl.verification.grade import Grader

_POLL_S = 0.01  # the thread looks for results this often
_OBSERVE_S = 0.1  # a caller that waits reports this often


@dataclass
class AsyncSource:
    """A source that samples ahead of the learner.

    Attributes:
        pool: Samples tasks. Only this source may use it, under its lock. The caller closes it, after this source.
        stream: The training prompts.
        grader: Verifies and rewards responses. In the background it is called from a thread, so its verifiers must
            allow calls from several threads.
        sampling: How responses are sampled.
        rollouts_per_prompt: N.
        prompts_per_step: Number of groups that a step trains on, P.
        dynamic_sampling: False keeps every group.
        max_tries: Give up after this many times P prompts in a row without a mixed group.
        seed: Seed of the run.
        max_staleness: A group trains at most this many updates after the weights that sampled its first token, unless
            its prompt is a straggler.
        stragglers: What happens to prompts that take longer; see `Backlog`.
        segment_tokens: Tokens of a segment; None samples rollouts in one piece.
        prompts_per_task: Prompts of a task of the `sampler`; a task of training has one prompt.
        background: Whether a thread works while the learner learns.
        clock: Adds up the seconds that the loop waits for groups, and in the foreground those of verification.
        observe: Receives the progress while the loop waits.
    """

    pool: SamplingPool
    stream: PromptSupply
    grader: Grader
    sampling: SamplingParams
    rollouts_per_prompt: int
    prompts_per_step: int
    dynamic_sampling: bool
    max_tries: int
    seed: int
    max_staleness: int
    stragglers: Stragglers
    segment_tokens: int | None = None
    prompts_per_task: int = 1
    background: bool = True
    clock: Stopwatch = field(default_factory=Stopwatch)
    observe: Observe = unobserved

    def __post_init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below, and the pool
        self._backlog = Backlog(self.stream, self.prompts_per_step, self.max_staleness, self.stragglers)
        self._tries = RetryPolicy(self.max_tries, self.dynamic_sampling, adaptive=False)
        self._round: list[GradedPrompt] = []
        self._flights: dict[int, Flight] = {}  # by ticket
        self._in_verification: list[Flight] = []
        self._asked: dict[int, SampledTask | None] = {}  # tasks of the sampler, by ticket
        self._attempts = 0
        self._collected = self._new_collected()
        self._before: SourceState | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    @property
    def sampler(self) -> Sampler:
        """Samples other prompts over the same pool, with the newest weights only."""
        return _PoolSampler(self)

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        return self.stream.num_prompts

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights all tasks that start from now on; see `GroupSource`.

        Tasks under way keep their weights. Stragglers are dropped if the backlog does not keep them.
        """
        with self._changed:
            self._check()
            while not self.background and self._work_once(0.0):
                pass  # until nothing else is done by now
            self.pool.publish(weights, version)
            flights = [*self._flights.values(), *self._in_verification]
            length_of = {flight.start.serial: flight.length for flight in flights}
            dropped = self._backlog.advance(version, length_of)
            self._discard([ticket for ticket, flight in self._flights.items() if flight.start.serial in dropped])
            self._before = None
            self._fill()
            self._start_thread()

    def next_groups(self, step: int) -> Batch:
        """Return the groups of a step as soon as there are enough; see `GroupSource`.

        Args:
            step: The step after the newest version of the weights.

        Returns:
            `prompts_per_step` groups, and everything that was done since the last step.

        Raises:
            NoMixedGroupsError: After `max_tries` times `prompts_per_step` prompts in a row without a mixed group.
            UnverifiedError: If most rollouts could not be verified, three times in a row.
        """
        with self._changed:
            self._before = self._state()
            self._fill()
            with self.clock("generation") if self.background else nullcontext():
                while (found := self._backlog.take(step)) is None:
                    if self._tries.are_over:
                        self._backlog.report()
                        self._attempts += 1
                        collected, self._collected = self._collected, self._new_collected()
                        raise self._tries.error(collected)
                    self._wait()
            groups, lead = found
            self._attempts = 0
            collected, self._collected = self._collected, self._new_collected()
            collected.lead, collected.trained = lead, groups
            self._fill()
            return Batch(groups, collected, lead.num_ready)

    def rewind(self) -> None:
        """Undo the last `next_groups`, unless weights were published since; its prompts are sampled again."""
        if self._before is not None:
            self.load_state(self._before)

    def state(self) -> SourceState:
        """Return the state for a checkpoint.

        It holds the groups that a step has reported and none has trained. All other prompts that have begun are sampled
        again after a resume. In the foreground, this run samples them again too: it continues exactly as a resumed
        one does.
        """
        with self._changed:
            state = self._state()
            if not self.background:
                self.load_state(state)
                self._fill()
            return state

    def load_state(self, state: SourceState) -> None:
        """Restore a state; sampling begins when weights are published. See `GroupSource`."""
        with self._changed:
            if state.stream is not None:
                self.stream.load_state_dict(state.stream)
            self._discard(list(self._flights))
            self._backlog.load_state(state.waiting, state.ahead)
            self._tries = RetryPolicy(self.max_tries, self.dynamic_sampling, adaptive=False)
            self._round.clear()
            self._attempts, self._before = state.attempts, None
            self._collected = self._new_collected()

    def close(self) -> None:
        """End the thread; the pool stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _state(self) -> SourceState:
        waiting, ahead = self._backlog.state()
        return SourceState(self.stream.state_dict(), waiting, self._attempts, ahead)

    def _new_collected(self) -> Collected:
        return Collected(attempt=self._attempts, keeps_all=not self.dynamic_sampling)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the source is closed, and samples nothing; make a new one")

    def _start_thread(self) -> None:
        if self.background and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="asynchronous source", daemon=True)
            self._thread.start()

    def _discard(self, tickets: Sequence[int]) -> None:
        self.pool.discard(tickets)
        for ticket in tickets:
            del self._flights[ticket]

    def _fill(self) -> None:
        """Begin as many prompts as the backlog allows, unless too many in a row gave no group."""
        if self._tries.are_over:
            return
        for start in self._backlog.start():
            seed = derived_seed(self.seed, start.version + 1, start.wave)
            self._submit(Flight(start, self.sampling, self.rollouts_per_prompt, self.segment_tokens, seed))

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

    def _graded(self, flights: Sequence[Flight]) -> list[GradedPrompt]:
        """Verify the rollouts of prompts; needs no lock."""
        prompts = [flight.start.prompt for flight in flights]
        trees = [flight.tree for flight in flights if flight.tree is not None]
        verdicts = self.grader.verdicts(prompts, trees)
        drawn = []
        for flight, tree, found in zip(flights, trees, verdicts, strict=True):
            version = flight.start.version
            group = self.grader.group(flight.start.prompt, tree, found, version + 1)
            drawn.append(GradedPrompt(flight.start.prompt, tree, found, group and replace(group, version=version)))
        return drawn

    def _add(self, flights: Sequence[Flight], drawn: Sequence[GradedPrompt]) -> None:
        """Add verified prompts, and begin others in place of those without a group to train on."""
        any_added = False
        for flight, one in zip(flights, drawn, strict=True):
            kept = one.group if one.group is not None and self._tries.keeps(one.group) else None
            if not self._backlog.finish(flight.start.serial, kept):
                continue  # it was dropped while it was verified
            any_added = True
            self._collected.add(one.group, one.whole(self.grader, flight.start.version + 1), one.verdicts)
            self._collected.rounds += flight.num_tasks
            self._collected.worker_seconds += flight.worker_seconds
            self._round.append(one)
            if len(self._round) == self.prompts_per_step:
                self._tries.add(self._round)
                self._round = []
        if any_added:
            self._fill()
        self._changed.notify_all()

    def _work_once(self, timeout_s: float | None) -> bool:
        """Do all work of the next results in the foreground; return whether there were any."""
        with self.clock("generation"):
            any_done, ended = self._receive(timeout_s)
        if ended:
            with self.clock("verification"):
                drawn = self._graded(ended)
            self._add(ended, drawn)
        return any_done

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
                    drawn = self._graded(ended)
                    with self._changed:
                        self._in_verification = []
                        self._add(ended, drawn)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait(self) -> None:
        """Wait for progress, with the lock held, and report it. The observer may raise."""
        self._check()
        trees = [group.tree for group in self._collected.groups]
        wanted = self.prompts_per_step * self.rollouts_per_prompt
        ready = min(self._backlog.num_ready * self.rollouts_per_prompt, wanted)
        longest = max((int(tree.length.max()) for tree in trees), default=0)
        self.observe(Decoding(ready, wanted, sum(tree.num_unique_tokens for tree in trees), longest))
        if self.background:
            self._start_thread()
            self._changed.wait(_OBSERVE_S)
        else:
            self._work_once(None)


class _PoolSampler:
    """Samples prompts over the pool of a source, and waits for them."""

    def __init__(self, source: AsyncSource) -> None:
        self._source = source

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int | Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first: int = 0,
    ) -> list[RolloutTree]:
        """Sample with the newest weights; see `Sampler.sample`. Training goes on sampling meanwhile."""
        source, size = self._source, self._source.prompts_per_task
        rollouts_P = rollouts_of_prompts(num_rollouts, len(prompts))
        places = range(0, len(prompts), size)
        tasks = [SampleTask(prompts[i : i + size], rollouts_P[i : i + size], sampling, seed, first + i) for i in places]
        trees: list[list[RolloutTree]] = [[] for _ in tasks]
        missing = list(range(len(tasks)))
        while missing:  # once, unless a pool starts a task with older weights
            with source._changed, self._asking([tasks[i] for i in missing]) as tickets:
                while any(source._asked[ticket] is None for ticket in tickets):
                    source._wait()
                answers = [source._asked[ticket] for ticket in tickets]
            newest = source._backlog.version
            for i, answer in zip(missing, answers, strict=True):
                if answer is not None and answer.version >= newest:
                    trees[i] = answer.trees
            missing = [i for i in missing if not trees[i]]
        return [tree for some in trees for tree in some]

    @contextmanager
    def _asking(self, tasks: Sequence[SampleTask]) -> Iterator[list[int]]:
        """Submit tasks, and forget them in the end, also if an observer raises."""
        source = self._source
        tickets = [source.pool.submit(task) for task in tasks]
        source._asked |= dict.fromkeys(tickets)
        try:
            yield tickets
        finally:
            source.pool.discard([ticket for ticket in tickets if source._asked[ticket] is None])
            for ticket in tickets:
                del source._asked[ticket]
