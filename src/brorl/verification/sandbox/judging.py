"""The loop that runs judges: one per worker at once, each with its programs on one fork server."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Generic

from brorl.verification.sandbox.conversation import CutOff, Judge, Lost, T
from brorl.verification.sandbox.server import LostError, Server, ServerSettings
from brorl.verification.sandbox.talk import Talk

_LONGEST_WAIT_S = 1.0
OVER_TIME = "the time of all programs was over (raise verification.batch_timeout_s)"
_TRIES = 2  # of a judge whose programs the machine ends


class Judging(Generic[T]):
    """Runs a number of judges.

    Args:
        judges: Functions that make a judge.
        settings: How servers are started.
        idle: Servers without work, taken from here and returned.
        num_workers: Maximum number of judges at once.
        timeout_s: Wall time of all judges in seconds. Each gets an equal part of half of it first, in its turn. Those
            that need more run again after all others.
    """

    def __init__(
        self,
        judges: Sequence[Callable[[], Judge[T]]],
        settings: ServerSettings,
        idle: list[Server],
        num_workers: int,
        timeout_s: float = inf,
    ) -> None:
        self._judges = judges
        self._settings = settings
        self._idle = idle
        self._num_workers = num_workers
        self._waiting = deque(range(len(judges)))
        self._had_part: set[int] = set()
        self._part_s = timeout_s * num_workers / (2 * max(len(judges), 1))
        self._end_at = time.monotonic() + timeout_s
        self._tries = [0] * len(judges)
        self._talks: list[Talk[T]] = []
        self._results: dict[int, T | Lost] = {}

    def results(self) -> list[T | Lost]:
        """Run all judges and wait for them.

        Returns:
            For each its decision, in the same order; `CutOff` if it used its part and the time was over before it could
            decide; `Lost` if the time was over before that, or the machine ended its programs twice.

        Raises:
            PreloadError: If a server cannot be set up.
            Exception: Any exception of a judge.
        """
        try:
            while (self._waiting or self._talks) and time.monotonic() < self._end_at:
                while self._waiting and len(self._talks) < self._num_workers and self._begin(self._waiting.popleft()):
                    pass
                talk = self._wait()
                if talk is not None:
                    self._advance(talk)
            for talk in self._talks:
                if talk.decisions:
                    self._results[talk.number] = talk.decisions[0]
                elif talk.used_part:
                    self._had_part.add(talk.number)
        finally:
            for talk in self._talks:  # the time is over, or an interrupt, or an exception of a judge
                self._end(talk)
        for number in range(len(self._judges)):
            without = CutOff if number in self._had_part else Lost
            self._results.setdefault(number, without(OVER_TIME))
        return [self._results[number] for number in range(len(self._judges))]

    def _begin(self, number: int) -> bool:
        """Begin a judge; return whether another one can begin too."""
        try:
            server = self._take_server()
        except LostError as error:
            if self._talks:  # it waits for one of their servers
                self._waiting.appendleft(number)
                return False
            self._lose(number, str(error))
        else:
            part_s = inf if number in self._had_part else self._part_s
            self._talks.append(Talk(number, self._judges[number], server, part_s))
        return True

    def _take_server(self) -> Server:
        while self._idle:
            server = self._idle.pop()
            if server.usable:
                server.forget_endings()
                return server
            server.close()
        return Server(self._settings)

    def _lose(self, number: int, reason: str) -> None:
        """Run a judge once more, unless that was the second time."""
        self._tries[number] += 1
        if self._tries[number] < _TRIES:
            self._waiting.append(number)
        else:
            self._results[number] = Lost(reason)

    def _wait(self) -> Talk[T] | None:
        """Wait until a talk can continue, and return the one that could do so first."""
        talk_of: dict[int, Talk[T]] = {}
        poller = select.poll()
        for talk in self._talks:
            process = talk.process
            readable = process.readable if process else []
            for descriptor in (talk.server.control.fileno(), *readable):
                poller.register(descriptor, select.POLLIN)
                talk_of[descriptor] = talk
            for descriptor in process.writable if process else []:
                poller.register(descriptor, select.POLLOUT)
                talk_of[descriptor] = talk
        # Python handles a signal that comes just before the wait only after it: short waits keep Ctrl-C working.
        deadline = min((min(talk.deadline, talk.ready_at) for talk in self._talks), default=0.0)
        deadline = min(deadline, self._end_at)
        wait_s = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT_S))
        found = [talk_of[descriptor] for descriptor, _ in poller.poll(ceil(wait_s * 1000))]
        now = time.monotonic()
        for talk in found:
            talk.ready_at = min(talk.ready_at, now)
        first = min(self._talks, key=lambda talk: min(talk.deadline, talk.ready_at), default=None)
        return first if first is not None and min(first.deadline, first.ready_at) <= now else None

    def _advance(self, talk: Talk[T]) -> None:
        try:
            talk.server.receive()
            talk.advance()
        except LostError as error:
            self._end(talk)
            self._talks.remove(talk)
            self._lose(talk.number, str(error))
        else:
            if talk.over:
                self._talks.remove(talk)
                self._idle.append(talk.server)
                if talk.decisions:
                    self._results[talk.number] = talk.decisions[0]
                else:
                    self._had_part.add(talk.number)
                    self._waiting.append(talk.number)

    def _end(self, talk: Talk[T]) -> None:
        talk.close()
        talk.server.close()
