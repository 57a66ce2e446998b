"""The prompts between the stream and a step: those that wait, those that are being sampled, and finished groups.

No more prompts start than the next `max_staleness` + 1 steps can train, and the oldest groups train first. So a group
trains within `max_staleness` updates after the weights that sampled it, unless newer groups fill a step while its
prompt is being sampled. Such stragglers train late, or the steps wait for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt, PromptStream
from brorl.training.batch import Staleness


@dataclass(frozen=True)
class Start:
    """A prompt that begins."""

    serial: int  # number of the start, rising
    prompt: Prompt  # the prompt
    version: int  # newest version of the weights when it began; later, that of the weights that sampled it
    wave: int  # number of the call that began it, among those with the same version
    index: int  # its index among the prompts of the call


@dataclass
class Backlog:
    """Bounds and orders the prompts of an asynchronous collector; it samples nothing.

    The number of groups that wait and prompts in progress is at most P times the number of steps that can still train
    on the newest weights. Staleness is the number of updates between the weights that sampled a group and those that
    it trains.
    """

    stream: PromptStream  # the training prompts
    prompts_per_step: int  # groups of a step, P
    max_staleness: int  # largest staleness of a group, K
    # whether a step waits for the prompts that later steps cannot train in time; else the group of a straggler trains
    # in the first step after it is done
    waits: bool
    _version: int = 0
    _steps_taken: int = 0  # the last step whose groups were taken
    _waves: int = 0
    _serials: int = 0
    _pending: deque[Prompt] = field(default_factory=deque)  # they start before those of the stream
    _under_way: dict[int, Start] = field(default_factory=dict)
    _ready: dict[int, Group] = field(default_factory=dict)  # finished groups that wait, in the order of completion
    _open: dict[int, Prompt] = field(default_factory=dict)  # all starts that no step has reported yet
    _stale: set[int] = field(default_factory=set)  # starts that are too stale for the bound
    _slow: set[str] = field(default_factory=set)  # prompts that were too stale when they were sampled last
    _num_late: int = 0  # prompts that became too stale since the last step

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
        prompts = self._next_prompts(self.capacity - len(self._ready) - len(self._under_way))
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
        if number <= 0:
            return chosen
        waiting, self._pending = self._pending, deque()
        busy = {start.prompt.id for start in self._under_way.values()}
        for _ in range(len(waiting) + number + self.stream.num_prompts):
            if len(chosen) == number:
                break
            from_stream = not waiting
            prompt = self.stream.take(1)[0] if from_stream else waiting.popleft()
            if prompt.id not in self._slow or prompt.id not in busy:
                chosen.append(prompt)
                busy.add(prompt.id)
            elif not (from_stream and any(prompt.id == other.id for other in self._pending)):
                self._pending.append(prompt)
        self._pending += waiting
        return chosen

    def finish(self, start: Start, group: Group | None) -> bool:
        """Take a prompt whose rollouts are done, with its group, or None if it is not trained on.

        Return whether it was in progress: not if the state has been replaced since.
        """
        if self._under_way.pop(start.serial, None) is None:
            return False
        late = {self._under_way[other].prompt.id for other in self._stale & self._under_way.keys()}
        if start.serial not in self._stale and start.prompt.id not in late:
            self._slow.discard(start.prompt.id)
        if group is not None:
            self._ready[start.serial] = group
        return True

    def began(self, start: Start) -> None:
        """Note the version of the weights that sampled a prompt, which is done and not yet verified."""
        if start.serial in self._under_way:
            self._under_way[start.serial] = start

    def take(self, step: int) -> tuple[list[Group], Staleness] | None:
        """Return the groups of a step; None if there are too few, or if the step has to wait for stragglers.

        The groups of the oldest weights come first, and among these the group that was done first.
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
        if self.waits and self._under_way and not self._in_time(step, rest):
            return None
        groups = [self._ready[serial] for serial in chosen]
        self._ready = rest
        self._steps_taken = step
        updates = tuple(self._version - group.version for group in groups)
        num_above = sum(number > self.max_staleness for number in updates)
        staleness = Staleness(updates, num_above, len(self._ready), len(self._under_way), self._num_late)
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
        self._num_late = 0

    def advance(self, version: int) -> None:
        """Note a new version of the weights, and the prompts that are now too stale."""
        if version != self._version:
            self._waves = 0
        self._version = self._steps_taken = version
        begun: dict[int, Start | Group] = {**self._under_way, **self._ready}
        stale = {serial for serial, one in begun.items() if one.version < version - self.max_staleness}
        self._slow |= {begun[serial].prompt.id for serial in stale - self._stale}
        self._num_late += len(stale - self._stale)
        self._stale = stale

    def state(self) -> tuple[tuple[Group, ...], dict[str, Any]]:
        """Return the reported groups that wait, and the rest as plain values; all other prompts are sampled again."""
        carried = tuple(group for serial, group in self._ready.items() if serial not in self._open)
        prompts = [*self._pending, *(self._open[serial] for serial in sorted(self._open))]
        return carried, {
            "version": self._version,
            "waves": self._waves,
            "pending": [prompt.id for prompt in prompts],
            "slow": sorted(self._slow),
            "num_late": self._num_late,
        }

    def load_state(self, carried: tuple[Group, ...], plain: dict[str, Any] | None) -> None:
        """Restore a state, with nothing in progress; the stream is restored separately.

        The plain values are None at the start of a run, or after synchronous training.
        """
        plain = plain or {"version": 0, "waves": 0, "pending": [], "slow": [], "num_late": 0}
        prompt_of = {prompt.id: prompt for prompt in self.stream.prompts} if plain["pending"] else {}
        self._version = self._steps_taken = plain["version"]
        self._waves, self._num_late, self._slow = plain["waves"], plain["num_late"], set(plain["slow"])
        self._pending = deque(prompt_of[name] for name in plain["pending"])
        self._ready = dict(enumerate(carried, self._serials))
        self._serials += len(carried)  # numbers are never used twice: late results of earlier starts match none
        self._under_way, self._open = {}, {}
        oldest = self._version - self.max_staleness
        # they have been counted
        self._stale = {serial for serial, group in self._ready.items() if group.version < oldest}
