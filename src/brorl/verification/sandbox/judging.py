"""The loop that runs judges: one per worker at once, each with its programs on one fork server."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Generic

from brorl.verification.sandbox.conversation import Judge, Lost, T
from brorl.verification.sandbox.server import LostError, Server, ServerSettings
from brorl.verification.sandbox.talk import Talk

_LONGEST_WAIT_S = 1.0
_TRIES = 2  # of a judge whose programs the machine ends


class Judging(Generic[T]):
    """Runs a number of judges.

    Args:
        judges: Functions that make a judge.
        settings: How servers are started.
        idle: Servers without work, taken from here and returned.
        num_workers: Maximum number of judges at once.
    """

    def __init__(
        self, judges: Sequence[Callable[[], Judge[T]]], settings: ServerSettings, idle: list[Server], num_workers: int
    ) -> None:
        self._judges = judges
        self._settings = settings
        self._idle = idle
        self._num_workers = num_workers
        self._waiting = deque(range(len(judges)))
        self._tries = [0] * len(judges)
        self._talks: list[Talk[T]] = []
        self._results: dict[int, T | Lost] = {}

    def results(self) -> list[T | Lost]:
        """Run all judges and wait for them.

        Returns:
            For each its decision, or `Lost`, in the same order.

        Raises:
            PreloadError: If a server cannot be set up.
            Exception: Any exception of a judge.
        """
        try:
            while self._waiting or self._talks:
                while self._waiting and len(self._talks) < self._num_workers and self._begin(self._waiting.popleft()):
                    pass
                for talk in self._wait():
                    self._advance(talk)
        finally:
            for talk in self._talks:  # an interrupt, or an exception of a judge
                self._end(talk)
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
            self._talks.append(Talk(number, self._judges[number], server))
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

    def _wait(self) -> list[Talk[T]]:
        """Wait until a talk can continue, and return those that can."""
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
        deadline = min((talk.deadline for talk in self._talks), default=0.0)
        wait_s = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT_S))
        found = {talk_of[descriptor].number for descriptor, _ in poller.poll(ceil(wait_s * 1000))}
        now = time.monotonic()
        return [talk for talk in self._talks if talk.number in found or now >= talk.deadline]

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
                self._results[talk.number] = talk.decisions[0]
                self._idle.append(talk.server)

    def _end(self, talk: Talk[T]) -> None:
        talk.close()
        talk.server.close()
