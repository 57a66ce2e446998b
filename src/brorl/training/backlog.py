"""The prompts between the stream and a step: those that wait, those that are being sampled, and finished groups.

No more prompts start than the next `max_staleness` + 1 steps can train, and the oldest groups train first. So a group
trains within `max_staleness` updates after the weights that sampled its first token, unless newer groups fill a step
while its prompt is being sampled. Such stragglers train late, or the steps wait for them, or they are dropped and start
again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from brorl.algorithms.groups import Group
from brorl.arrays import IntArray
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.rollout.engine import SampledTask, SampleTask
from brorl.sampling import SamplingParams
from brorl.seeds import derived_seed
from brorl.training.source import Staleness
from brorl.tree import RolloutTree


@dataclass(frozen=True)
class Start:
    """A prompt that begins."""

    serial: int  # number of the start, rising
    prompt: Prompt  # the prompt
    # newest version of the weights when it began; later, that of the weights that sampled its first tokens
    version: int
    wave: int  # number of the call that began it, among those with the same version
    index: int  # its index among the prompts of the call


@dataclass(frozen=True)
class Flight:
    """A prompt whose rollouts are being sampled."""

    start: Start  # when it began
    sampling: SamplingParams  # how responses are sampled
    num_rollouts: int  # N
    segment_tokens: int | None  # tokens of a segment; None samples the rollouts in one piece
    seed: int  # seed of its first task
    tree: RolloutTree | None = None  # its rollouts so far; None before the first task is done
    num_tasks: int = 0  # number of tasks that are done
    worker_seconds: float = 0.0  # seconds that workers spent on them

    def next_task(self) -> SampleTask | None:
        """Return the task that continues the rollouts; None if all of them have ended.

        A segment is longer than `segment_tokens` where `min_new_tokens` allows no response to end within it.
        """
        if self.tree is None:
            prompt = self.start.prompt.token_ids
            return SampleTask([prompt], self.num_rollouts, self._segment(0), self.seed, self.start.index)
        leaves = self._unfinished(self.tree)
        if not leaves.size:
            return None
        responses = self.tree.responses()
        return SampleTask(
            [self.tree.prompt_ids + responses[leaf][0] for leaf in leaves],
            self.tree.leaf_count[leaves].tolist(),
            self._segment(int(self.tree.length[leaves[0]])),
            derived_seed(self.seed, self.num_tasks, self.start.index),
        )

    def after(self, sampled: SampledTask) -> Flight:
        """Return the flight with the rollouts of its task."""
        start = self.start
        if self.tree is None:
            (tree,), start = sampled.trees, replace(start, version=sampled.version)
        else:
            tree = self.tree.graft(self._unfinished(self.tree), sampled.trees)
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
        maximum, minimum = self.sampling.max_new_tokens - length, max(self.sampling.min_new_tokens - length, 0)
        if self.segment_tokens is not None:
            maximum = min(maximum, max(self.segment_tokens, minimum + 1))
        return replace(self.sampling, max_new_tokens=maximum, min_new_tokens=minimum)


Stragglers = Literal["train", "wait", "drop"]


@dataclass
class Backlog:
    """Bounds and orders the prompts of an asynchronous source; it samples nothing.

    The number of groups that wait and prompts in progress is at most P times the number of steps that can still train
    on the newest weights. Staleness is the number of updates between the weights that sampled the first token of a
    group and those that it trains.
    """

    stream: PromptStream  # the training prompts
    prompts_per_step: int  # groups of a step, P
    max_staleness: int  # largest staleness of a group, K
    # What happens to a prompt that takes longer. `train`: its group trains in the first step after it is done.
    # `wait`: a step waits for the prompts that later steps cannot train in time. `drop`: the prompt is dropped, and
    # starts again before all others.
    stragglers: Stragglers
    _version: int = 0
    _steps_taken: int = 0  # the last step whose groups were taken
    _waves: int = 0
    _serials: int = 0
    _pending: deque[Prompt] = field(default_factory=deque)  # they start before those of the stream
    _under_way: dict[int, Start] = field(default_factory=dict)
    _ready: dict[int, Group] = field(default_factory=dict)  # finished groups that wait, in the order of completion
    _open: dict[int, Prompt] = field(default_factory=dict)  # all starts that no step has reported yet
    _stale_ids: set[int] = field(default_factory=set)  # starts that are too stale for the bound
    _times_late: dict[str, int] = field(default_factory=dict)  # in a row, of each prompt
    _late_at: Counter[int] = field(default_factory=Counter)  # since the last step, by length

    @property
    def version(self) -> int:
        """Newest version of the weights."""
        return self._version

    @property
    def num_ready(self) -> int:
        """Number of finished groups that wait."""
        return len(self._ready)

    @property
    def capacity(self) -> int:
        """Most groups and prompts in progress that the steps of the newest weights can train."""
        return self.prompts_per_step * (self._version + 1 + self.max_staleness - self._steps_taken)

    def start(self) -> list[Start]:
        """Begin as many prompts as the capacity allows."""
        number = self.capacity - len(self._ready) - len(self._under_way)
        if number <= 0:
            return []
        prompts = self._next_prompts(number)
        if not prompts:
            return []
        self._waves += 1
        starts = [
            Start(self._serials + index, prompt, self._version, self._waves, index)
            for index, prompt in enumerate(prompts)
        ]
        self._serials += len(starts)
        self._under_way |= {start.serial: start for start in starts}
        self._open |= {start.serial: start.prompt for start in starts}
        return starts

    def _next_prompts(self, number: int) -> list[Prompt]:
        """Return prompts to begin: those that wait, then those of the stream.

        A straggler does not begin again while it is in progress. Otherwise, prompts that are always too slow would come
        again with every epoch, and fill the capacity. It begins once more when it is done: the stream can return it
        many times meanwhile, and as many copies would fill whole steps.
        """
        chosen: list[Prompt] = []
        waiting, self._pending = self._pending, deque()
        busy = {start.prompt.id for start in self._under_way.values()}
        for _ in range(len(waiting) + number + self.stream.num_prompts):
            if len(chosen) == number:
                break
            from_stream = not waiting
            prompt = self.stream.take(1)[0] if from_stream else waiting.popleft()
            if prompt.id not in self._times_late or prompt.id not in busy:
                chosen.append(prompt)
                busy.add(prompt.id)
            elif not (from_stream and any(prompt.id == other.id for other in self._pending)):
                self._pending.append(prompt)
        self._pending += waiting
        return chosen

    def began(self, start: Start) -> None:
        """Note the version of the weights that sampled the first tokens of a prompt."""
        if start.serial in self._under_way:
            self._under_way[start.serial] = start

    def finish(self, serial: int, group: Group | None) -> bool:
        """Take a prompt whose rollouts are done, with its group, or None if it is not trained on.

        Returns:
            Whether the prompt was in progress. False if it was dropped.
        """
        start = self._under_way.pop(serial, None)
        if start is None:
            return False
        late = {self._under_way[other].prompt.id for other in self._stale_ids & self._under_way.keys()}
        if serial not in self._stale_ids and start.prompt.id not in late:
            self._times_late.pop(start.prompt.id, None)
        if group is not None:
            self._ready[serial] = group
        return True

    def take(self, step: int) -> tuple[list[Group], Staleness] | None:
        """Return the groups of a step; None if there are too few, or if the step has to wait for stragglers.

        The groups of the oldest weights come first, and among these the group that was done first.

        Args:
            step: The step after the newest version.

        Raises:
            ValueError: If the step does not follow the newest version.
        """
        if step != self._version + 1:
            raise ValueError(
                f"step {step} needs the weights of version {step - 1}, and the newest are of version {self._version}; "
                "publish the weights after every step"
            )
        if len(self._ready) < self.prompts_per_step:
            return None
        by_age = sorted(self._ready, key=lambda serial: self._ready[serial].version)  # stable: the order of completion
        chosen = sorted(by_age[: self.prompts_per_step])
        rest = {serial: group for serial, group in self._ready.items() if serial not in chosen}
        if self.stragglers == "wait" and self._under_way and not self._in_time(step, rest):
            return None
        groups = [self._ready[serial] for serial in chosen]
        self._ready = rest
        self._steps_taken = step
        updates = tuple(self._version - group.version for group in groups)
        num_late = sum(number > self.max_staleness for number in updates)
        maximum = max(self._times_late.values(), default=0)
        staleness = Staleness(updates, num_late, len(self._ready), len(self._under_way), dict(self._late_at), maximum)
        self.report()
        return groups, staleness

    def _in_time(self, step: int, rest: dict[int, Group]) -> bool:
        """Whether the steps after one can train all other groups and prompts in progress within the bound."""
        begun: list[Start | Group] = [*rest.values(), *self._under_way.values()]
        versions = sorted(one.version for one in begun)
        per_step = self.prompts_per_step
        return all(
            number <= per_step * (version + 1 + self.max_staleness - step) for number, version in enumerate(versions, 1)
        )

    def report(self) -> None:
        """Note that everything that is done has been reported."""
        self._open = {serial: start.prompt for serial, start in sorted(self._under_way.items())}
        self._late_at.clear()

    def advance(self, version: int, length_of: dict[int, int]) -> set[int]:
        """Note a new version of the weights, and the prompts that are now too stale; return the starts that it drops.

        `length_of` has, by start, the tokens of the longest response so far of prompts in progress.
        """
        if version != self._version:
            self._waves = 0
        self._version = self._steps_taken = version
        begun: dict[int, Start | Group] = {**self._under_way, **self._ready}
        lengths = {serial: int(group.tree.length.max()) for serial, group in self._ready.items()} | length_of
        late = {serial for serial, one in begun.items() if one.version < version - self.max_staleness}
        for serial in late - self._stale_ids:
            prompt, length = begun[serial].prompt, lengths.get(serial, 0)
            self._times_late[prompt.id] = self._times_late.get(prompt.id, 0) + 1
            self._late_at[1 << length.bit_length() - 1 if length else 0] += 1
        self._stale_ids = late
        return self._drop() if self.stragglers == "drop" else set()

    def _drop(self) -> set[int]:
        """Drop the late prompts; return those of them that were in progress."""
        for serial in sorted(self._stale_ids, reverse=True):
            self._pending.appendleft((self._under_way.get(serial) or self._ready[serial]).prompt)
            self._open.pop(serial, None)
        under_way = self._stale_ids & self._under_way.keys()
        for serial in under_way:
            del self._under_way[serial]
        self._ready = {serial: group for serial, group in self._ready.items() if serial not in self._stale_ids}
        self._stale_ids = set()
        return under_way

    def state(self) -> tuple[tuple[Group, ...], dict[str, Any]]:
        """Return the reported groups that wait, and the rest as plain values; all other prompts are sampled again."""
        carried = tuple(group for serial, group in self._ready.items() if serial not in self._open)
        prompts = [*self._pending, *(self._open[serial] for serial in sorted(self._open))]
        return carried, {
            "version": self._version,
            "waves": self._waves,
            "pending": [prompt.id for prompt in prompts],
            "times_late": dict(self._times_late),
            "late_at": [list(item) for item in sorted(self._late_at.items())],
        }

    def load_state(self, carried: tuple[Group, ...], plain: dict[str, Any] | None) -> None:
        """Restore a state, with nothing in progress; the stream is restored separately.

        Args:
            carried: Groups that wait for a later step.
            plain: The rest of the state; None at the start of a run, or after synchronous training.
        """
        plain = plain or {"version": 0, "waves": 0, "pending": [], "times_late": {}, "late_at": []}
        prompt_of = {prompt.id: prompt for prompt in self.stream.prompts} if plain["pending"] else {}
        self._version = self._steps_taken = plain["version"]
        self._waves = plain["waves"]
        self._pending = deque(prompt_of[name] for name in plain["pending"])
        self._ready = dict(enumerate(carried, self._serials))
        self._serials += len(carried)  # numbers are never used twice: late results of earlier starts match none
        self._under_way, self._open = {}, {}
        oldest = self._version - self.max_staleness
        # they have been counted
        self._stale_ids = {serial for serial, group in self._ready.items() if group.version < oldest}
        self._times_late = dict(plain["times_late"])
        self._late_at = Counter(dict(plain["late_at"]))
