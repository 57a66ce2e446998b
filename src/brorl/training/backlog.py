"""The prompts between the stream and a step: those that wait, those that are being sampled, and finished groups.

In: finished groups, published versions, steps. Out: the prompts that may start, and the groups of a step. A group
trains at most `max_staleness` steps after the weights that sampled its first token. No more prompts start than the
steps within this bound can train, so only prompts that take much longer than others become too stale. These are
dropped, counted, and started again before all others.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptSupply
from brorl.training.flight import Start
from brorl.training.source import Lead


@dataclass(frozen=True, eq=False)
class _Ready:
    """A finished group that waits for its step."""

    start: Start
    group: Group


@dataclass
class Backlog:
    """Bounds and orders the prompts of an asynchronous source; it samples nothing.

    The number of groups that wait and prompts under way is at most P times the number of steps that can still train
    on the newest weights. Staleness is the number of updates between the weights that sampled the first token of a
    group and those that it trains.

    Attributes:
        stream: The training prompts.
        prompts_per_step: Groups of a step, P.
        max_staleness: Largest staleness of a group.
    """

    stream: PromptSupply
    prompts_per_step: int
    max_staleness: int
    _version: int = 0
    _steps_taken: int = 0  # the last step whose groups were taken
    _waves: int = 0
    _serials: int = 0
    _pending: deque[Prompt] = field(default_factory=deque)  # they start before those of the stream
    _under_way: dict[int, Start] = field(default_factory=dict)
    _ready: list[_Ready] = field(default_factory=list)
    _open: dict[int, Prompt] = field(default_factory=dict)  # all starts that no step has reported yet
    _drops: dict[str, int] = field(default_factory=dict)  # of each prompt in a row
    _dropped_at: Counter[int] = field(default_factory=Counter)  # since the last step, by length

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
        """Most groups and prompts under way that the steps of the newest weights can train."""
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
            Start(self._serials + place, prompt, self._version, self._waves, place)
            for place, prompt in enumerate(prompts)
        ]
        self._serials += len(starts)
        self._under_way |= {start.serial: start for start in starts}
        self._open |= {start.serial: start.prompt for start in starts}
        return starts

    def _next_prompts(self, number: int) -> list[Prompt]:
        """Return prompts to begin: those that wait, then those of the stream.

        A prompt that was dropped does not begin again while it is under way. Otherwise, prompts that are always too
        slow would come again with every epoch, and fill the capacity.
        """
        chosen: list[Prompt] = []
        waiting, self._pending = self._pending, deque()
        busy = {start.prompt.id for start in self._under_way.values()}
        for _ in range(len(waiting) + number + self.stream.num_prompts):
            if len(chosen) == number:
                break
            prompt = waiting.popleft() if waiting else self.stream.take(1)[0]
            if prompt.id in self._drops and prompt.id in busy:
                self._pending.append(prompt)
            else:
                chosen.append(prompt)
                busy.add(prompt.id)
        self._pending += waiting
        return chosen

    def began(self, start: Start) -> None:
        """Note the version of the weights that sampled the first tokens of a prompt."""
        if start.serial in self._under_way:
            self._under_way[start.serial] = start

    def finish(self, serial: int, group: Group | None) -> bool:
        """Take a prompt whose rollouts are done.

        Args:
            serial: Number of its start.
            group: Its group; None if it is not trained on.

        Returns:
            Whether the prompt was under way. False if it was dropped.
        """
        start = self._under_way.pop(serial, None)
        if start is None:
            return False
        self._drops.pop(start.prompt.id, None)
        if group is not None:
            self._ready.append(_Ready(start, group))
        return True

    def take(self, step: int) -> tuple[list[Group], Lead] | None:
        """Return the groups of a step; None if there are too few.

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
        by_age = sorted(self._ready, key=lambda one: one.start.version)  # stable: the order of completion
        chosen = sorted(by_age[: self.prompts_per_step], key=lambda one: one.start.serial)
        taken = {one.start.serial for one in chosen}
        self._ready = [one for one in self._ready if one.start.serial not in taken]
        self._steps_taken = step
        groups = [one.group for one in chosen]
        staleness = tuple(self._version - one.start.version for one in chosen)
        lead = Lead(staleness, len(self._ready), len(self._under_way), dict(self._dropped_at), self._most_drops())
        self.report()
        return groups, lead

    def report(self) -> None:
        """Note that everything that is done has been reported."""
        self._open = {serial: start.prompt for serial, start in sorted(self._under_way.items())}
        self._dropped_at.clear()

    def advance(self, version: int, length_of: dict[int, int]) -> set[int]:
        """Note a new version of the weights; drop the prompts that are too stale for its step.

        Args:
            version: The version.
            length_of: Tokens of the longest response so far, by start, of prompts under way.

        Returns:
            The starts under way that were dropped.
        """
        if version != self._version:
            self._waves = 0
        self._version = self._steps_taken = version
        oldest = version - self.max_staleness
        late = {serial: start for serial, start in self._under_way.items() if start.version < oldest}
        gone = {one.start.serial: one for one in self._ready if one.start.version < oldest}
        lengths = {serial: length_of.get(serial, 0) for serial in late}
        lengths |= {serial: int(one.group.tree.length.max()) for serial, one in gone.items()}
        starts = late | {serial: one.start for serial, one in gone.items()}
        for serial in sorted(starts, reverse=True):
            prompt = starts[serial].prompt
            self._pending.appendleft(prompt)
            self._open.pop(serial, None)
            self._drops[prompt.id] = self._drops.get(prompt.id, 0) + 1
            self._dropped_at[1 << lengths[serial].bit_length() - 1 if lengths[serial] else 0] += 1
        self._under_way = {serial: start for serial, start in self._under_way.items() if serial not in late}
        self._ready = [one for one in self._ready if one.start.serial not in gone]
        return set(late)

    def state(self) -> tuple[tuple[Group, ...], dict[str, Any]]:
        """Return the reported groups that wait, and the rest as plain values; all other prompts are sampled again."""
        waiting = tuple(one.group for one in self._ready if one.start.serial not in self._open)
        prompts = [*self._pending, *(self._open[serial] for serial in sorted(self._open))]
        return waiting, {
            "version": self._version,
            "waves": self._waves,
            "pending": [prompt.id for prompt in prompts],
            "drops": dict(self._drops),
            "dropped_at": [list(item) for item in sorted(self._dropped_at.items())],
        }

    def load_state(self, waiting: tuple[Group, ...], plain: dict[str, Any] | None) -> None:
        """Restore a state, with nothing under way; the stream is restored separately.

        Args:
            waiting: Groups that wait.
            plain: The rest of the state; None at the start of a run, or after synchronous training.
        """
        plain = plain or {"version": 0, "waves": 0, "pending": [], "drops": {}, "dropped_at": []}
        prompt_of = {prompt.id: prompt for prompt in self.stream.prompts} if plain["pending"] else {}
        self._version = self._steps_taken = plain["version"]
        self._waves = plain["waves"]
        self._pending = deque(prompt_of[name] for name in plain["pending"])
        starts = [Start(i, group.prompt, group.version, 0, 0) for i, group in enumerate(waiting, self._serials)]
        self._serials += len(starts)  # numbers are never used twice: late results of earlier starts match none
        self._ready = [_Ready(start, group) for start, group in zip(starts, waiting, strict=True)]
        self._under_way, self._open = {}, {}
        self._drops = dict(plain["drops"])
        self._dropped_at = Counter(dict(plain["dropped_at"]))

    def _most_drops(self) -> int:
        return max(self._drops.values(), default=0)
