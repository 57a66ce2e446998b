"""The prompts between the stream and a step: waiting, being sampled, or finished.

No more prompts are started than the next `max_staleness` + 1 steps can train on, and steps take the oldest groups
first. So a step trains on a group at most `max_staleness` updates after the weights that sampled it. Stragglers are the
exception: newer groups may fill a step while a prompt is still being sampled. The first step after a straggler finishes
trains on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream


@dataclass(frozen=True)
class PromptStart:
    """One start of a prompt. A prompt can be started several times."""

    serial: int  # number of the start: 0, 1, 2, ...
    prompt: Prompt
    version: int  # version of the newest weights when it began; once done, of the weights that sampled it
    call: int  # which of the `start` calls with this version began it
    index: int  # position of the prompt within the call


@dataclass
class Backlog:
    """Limits and orders the prompts of an asynchronous collector. It does not sample them.

    Staleness is the number of updates between the weights that sampled a group and the weights that train on it.
    """

    stream: PromptStream  # the training prompts
    prompts_per_step: int  # groups per step, P
    max_staleness: int  # maximum staleness of a group, K
    _version: int = 0
    _steps_taken: int = 0  # last step whose groups were taken
    _calls: int = 0
    _serials: int = 0
    _pending: deque[Prompt] = field(default_factory=deque)  # prompts to start before those from the stream
    _under_way: dict[int, PromptStart] = field(default_factory=dict)
    _ready: dict[int, Group] = field(default_factory=dict)  # finished groups that are waiting, in completion order
    _open: dict[int, Prompt] = field(default_factory=dict)  # starts that no step has reported yet
    _stale: set[int] = field(default_factory=set)  # starts whose staleness exceeds `max_staleness`
    _slow: set[str] = field(default_factory=set)  # ids of prompts whose last start became too stale
    _num_late: int = 0  # prompts that became too stale since the last step

    @property
    def num_ready(self) -> int:
        """Number of finished groups that are waiting."""
        return len(self._ready)

    @property
    def capacity(self) -> int:
        """Maximum number of waiting groups plus prompts in progress: P for each step that can train on them in time."""
        return self.prompts_per_step * (self._version + 1 + self.max_staleness - self._steps_taken)

    def start(self) -> list[PromptStart]:
        """Start as many prompts as the capacity allows."""
        prompts = self._next_prompts(self.capacity - len(self._ready) - len(self._under_way))
        if not prompts:
            return []
        self._calls += 1
        starts = [
            PromptStart(self._serials + index, prompt, self._version, self._calls, index)
            for index, prompt in enumerate(prompts)
        ]
        self._serials += len(starts)
        self._under_way |= {start.serial: start for start in starts}
        self._open |= {start.serial: start.prompt for start in starts}
        return starts

    def _next_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return prompts to start: first the pending ones, then those from the stream.

        A straggler is not started again while it is in progress. Otherwise, prompts that are always too slow would
        return in every epoch and use up the capacity. When it is done, it is started only once more, even if the stream
        has returned it several times in the meantime; that many copies would fill whole steps.
        """
        chosen: list[Prompt] = []
        if num_prompts <= 0:
            return chosen
        waiting = self._pending
        self._pending = deque()
        busy = {start.prompt.id for start in self._under_way.values()}
        for _ in range(len(waiting) + num_prompts + self.stream.num_prompts):
            if len(chosen) == num_prompts:
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

    def finish(self, start: PromptStart, group: Group | None) -> bool:
        """Finish a prompt whose rollouts are done. `group` is None if there is nothing to train on.

        Return False if a state was loaded after the prompt started, so it is no longer in progress.
        """
        if self._under_way.pop(start.serial, None) is None:
            return False
        late = {self._under_way[other].prompt.id for other in self._stale & self._under_way.keys()}
        if start.serial not in self._stale and start.prompt.id not in late:
            self._slow.discard(start.prompt.id)
        if group is not None:
            self._ready[start.serial] = group
        return True

    def began(self, start: PromptStart) -> None:
        """Record which weights sampled a prompt that is not yet verified."""
        if start.serial in self._under_way:
            self._under_way[start.serial] = start

    def take(self, step: int) -> tuple[list[Group], dict[str, float]] | None:
        """Return a step's groups and metrics of how far ahead sampling is, or None if too few groups are ready.

        Groups from the oldest weights are chosen first; ties go to the group that finished first.
        """
        if step != self._version + 1:
            raise ValueError(
                f"step {step} needs version {step - 1} of the weights, but the newest is version {self._version}; "
                "publish the weights after every step"
            )
        if len(self._ready) < self.prompts_per_step:
            return None
        # the sort is stable, so groups of one version stay in order of completion
        by_age = sorted(self._ready, key=lambda serial: self._ready[serial].version)
        chosen = sorted(by_age[: self.prompts_per_step])
        rest = {serial: group for serial, group in self._ready.items() if serial not in chosen}
        groups = [self._ready[serial] for serial in chosen]
        self._ready = rest
        self._steps_taken = step
        staleness_G = [self._version - group.version for group in groups]
        ahead = {
            "staleness_mean": sum(staleness_G) / len(groups),
            "staleness_max": max(staleness_G),
            "groups_late": sum(staleness > self.max_staleness for staleness in staleness_G),
            "groups_ready": len(self._ready),
            "prompts_under_way": len(self._under_way),
            "prompts_late": self._num_late,
        }
        self.report()
        return groups, ahead

    def report(self) -> None:
        """Record that a step has reported everything done so far."""
        self._open = {serial: start.prompt for serial, start in sorted(self._under_way.items())}
        self._num_late = 0

    def advance(self, version: int) -> None:
        """Record a new version of the weights. Mark the prompts that are now too stale."""
        if version != self._version:
            self._calls = 0
        self._version = self._steps_taken = version
        begun: dict[int, PromptStart | Group] = {**self._under_way, **self._ready}
        stale = {serial for serial, start in begun.items() if start.version < version - self.max_staleness}
        self._slow |= {begun[serial].prompt.id for serial in stale - self._stale}
        self._num_late += len(stale - self._stale)
        self._stale = stale

    def state(self) -> tuple[tuple[Group, ...], dict[str, Any]]:
        """Return the reported, waiting groups, and the rest as plain values. Other prompts will be sampled again."""
        carried = tuple(group for serial, group in self._ready.items() if serial not in self._open)
        prompts = [*self._pending, *(self._open[serial] for serial in sorted(self._open))]
        return carried, {
            "version": self._version,
            "waves": self._calls,
            "pending": [prompt.id for prompt in prompts],
            "slow": sorted(self._slow),
            "num_late": self._num_late,
        }

    def load_state(self, carried: tuple[Group, ...], plain: dict[str, Any] | None) -> None:
        """Restore a state, with nothing in progress. The caller restores the stream.

        `plain` is None at the start of a run, or after synchronous training.
        """
        plain = plain or {"version": 0, "waves": 0, "pending": [], "slow": [], "num_late": 0}
        prompt_of = {prompt.id: prompt for prompt in self.stream.prompts} if plain["pending"] else {}
        self._version = self._steps_taken = plain["version"]
        self._calls = plain["waves"]
        self._num_late = plain["num_late"]
        self._slow = set(plain["slow"])
        self._pending = deque(prompt_of[name] for name in plain["pending"])
        self._ready = dict(enumerate(carried, self._serials))
        self._serials += len(carried)  # serials are never reused, so late results of earlier starts match nothing
        self._under_way, self._open = {}, {}
        oldest = self._version - self.max_staleness
        # already counted as late before the checkpoint
        self._stale = {serial for serial, group in self._ready.items() if group.version < oldest}
