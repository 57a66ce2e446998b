"""Supervises Ray actors of one kind: starts them, assigns calls, and replaces lost ones.

An idle actor takes the oldest call. An actor that dies or does not answer in time is killed and replaced, and its call
is assigned next. All of this happens in the caller's thread, during calls to `Supervisor`. Ray could also restart
actors and repeat tasks, but without a time limit, and a restarted actor would lack its weights.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic
from typing import Any, NamedTuple, NoReturn

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from brorl.activity import Echo
from brorl.distributed.cluster import POLL_S
from brorl.errors import WorkersLostError, first_line


@dataclass(frozen=True)
class PoolConfig:
    """The number of actors, their placement and their limits."""

    kind: str  # an actor's name in messages: `rollout worker`
    number: int  # number of actors, 1 or more
    # index of an actor, 0 to `number` - 1 -> its Ray options
    options: Callable[[int], Mapping[str, Any]]
    timeout_s: float  # an actor whose call takes longer counts as lost
    max_restarts: int  # number of lost actors to replace; one more is an error
    start_timeout_s: float = 1800.0  # an actor that takes longer to start counts as lost


@dataclass(frozen=True)
class ActorCall:
    """A method call that any actor can make."""

    method: str
    arguments: tuple[Any, ...]
    title: str  # the work's name in messages: `sampling prompt 3`
    max_losses: int | None = None  # repeats after lost actors before the call is abandoned; None for no limit


class FinishedCall(NamedTuple):
    """A finished call."""

    ticket: int  # the number that `submit` returned
    receipt: Any  # the method's first result, which is small
    payload: Any = None  # second result of the method
    is_lost: bool = False  # whether the call was abandoned after too many lost actors


class StartReceipt(NamedTuple):
    """Where an actor started."""

    host: str  # name and address of the machine
    pid: int  # its process id there


class FailedCall(NamedTuple):
    """Replaces the receipt of a call that raised an exception. The process is intact."""

    error: Exception


class ActorHost:
    """The Ray actor class: makes an object in its process, and calls the object's methods.

    Every method returns a receipt and a payload.
    """

    def start(self, make: bytes) -> StartReceipt | FailedCall:
        """Make the object here: an exception in an actor's constructor would lose its type."""
        try:
            self._object = pickle.loads(make)()
            return StartReceipt(f"{socket.gethostname()} at {ray.util.get_node_ip_address()}", os.getpid())
        except Exception as error:
            return _raised(error)

    def call(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method of the object and return its receipt and payload, or `FailedCall` and None."""
        try:
            receipt, payload = getattr(self._object, method)(*arguments)
        except Exception as error:
            return _raised(error), None
        return receipt, payload


def _raised(error: Exception) -> FailedCall:
    """Wrap an exception for transfer to the driver. Pickling drops the traceback, so a note keeps its text."""
    error.add_note(f"In an actor on {socket.gethostname()}:\n{''.join(traceback.format_exception(error))}")
    return FailedCall(error)


_Host = ray.remote(ActorHost)


@dataclass(eq=False)
class _Actor:
    """An actor and its pending answer."""

    index: int
    handle: Any
    answer: list[Any]  # Ray's references to the receipt and the payload; empty if the actor is free
    deadline: float  # the actor is lost if it has not answered by then
    ticket: int | None = None  # the call it is working on
    prepared: int = 0  # number of its last preparation
    started: StartReceipt | None = None


class Supervisor:
    """Assigns calls to actors. Only one thread may use it. `echo` receives a line for each lost actor.

    `make` makes an actor's object in the actor's process and must be picklable. If it raises an exception, or too many
    actors are lost, startup fails.
    """

    def __init__(self, make: Callable[[], object], pool_config: PoolConfig, echo: Echo = lambda _: None) -> None:
        self._make = cloudpickle.dumps(make)  # actors unpickle it in `start`, where an error keeps its type
        self._config = pool_config
        self._echo = echo
        self._tickets = count()
        self._open: dict[int, ActorCall] = {}  # ticket -> a call that is not finished
        self._waiting: deque[int] = deque()  # tickets not assigned to an actor
        self._losses: Counter[int] = Counter()  # ticket -> actors lost with the call
        self._finished: list[FinishedCall] = []
        self._preparation: tuple[int, ActorCall | None] = (0, None)
        self._restarts = 0
        self._failure: BaseException | None = None  # the error that ended all actors
        self._all_started = False
        self._actors = [self._start(index) for index in range(pool_config.number)]
        try:
            while not self._all_started:
                self._advance(POLL_S)
                self._all_started = len(self.started) == pool_config.number
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> list[StartReceipt]:
        """The receipts of the actors that have started, by index."""
        return [actor.started for actor in self._actors if actor.started is not None]

    def submit(self, call: ActorCall) -> int:
        """Queue a call and return its ticket. Tickets increase with each call."""
        self._check()
        ticket = next(self._tickets)
        self._open[ticket] = call
        self._waiting.append(ticket)
        self._give_out()
        return ticket

    def prepare(self, call: ActorCall) -> None:
        """Have each actor make a call once, before its next ticket. This replaces any previous preparation."""
        self._check()
        self._preparation = self._preparation[0] + 1, call
        self._give_out()

    def finished(self, timeout_s: float | None = None) -> list[FinishedCall]:
        """Wait until a call finishes and return all newly finished calls, or none after the timeout.

        If a call raised an exception, re-raise it here; the call is then finished.
        """
        deadline = monotonic() + (inf if timeout_s is None else timeout_s)
        while self._open and not self._finished:
            self._advance(max(0.0, min(POLL_S, deadline - monotonic())))
            if monotonic() >= deadline:
                break
        done = [call for call in self._finished if not isinstance(call.receipt, FailedCall)]
        self._finished = [call for call in self._finished if isinstance(call.receipt, FailedCall)]
        if self._finished and not done:
            raise self._finished.pop(0).receipt.error
        return done

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget calls. An actor that is running one finishes it, and the result is dropped."""
        tickets = {*tickets}
        for ticket in tickets:
            self._open.pop(ticket, None)
        self._waiting = deque(ticket for ticket in self._waiting if ticket in self._open)
        self._finished = [call for call in self._finished if call.ticket not in tickets]

    def close(self) -> None:
        """Kill all actors."""
        self._failure = self._failure or RuntimeError("the actors have been closed")
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor.handle)

    def _check(self) -> None:
        """Raise the error that ended all actors, if any."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: BaseException) -> NoReturn:
        """End all actors and raise the error that caused it."""
        self._failure = failure
        self.close()
        raise failure

    def _start(self, index: int) -> _Actor:
        options = {**self._config.options(index), "max_restarts": 0, "max_task_retries": 0}
        handle: Any = _Host.options(**options).remote()
        return _Actor(index, handle, [handle.start.remote(self._make)], monotonic() + self._config.start_timeout_s)

    def _give_out(self) -> None:
        """Assign each idle actor its preparation or the next call. The actor whose last call is oldest goes first."""
        for actor in sorted(self._actors, key=lambda actor: actor.deadline):
            number, preparation = self._preparation
            if actor.answer:
                continue
            if actor.prepared < number:
                assert preparation is not None
                actor.prepared = number
                call = preparation
            elif self._waiting:
                actor.ticket = self._waiting.popleft()
                call = self._open[actor.ticket]
            else:
                continue
            actor.answer = actor.handle.call.options(num_returns=2).remote(call.method, *call.arguments)
            actor.deadline = monotonic() + self._config.timeout_s

    def _advance(self, timeout_s: float) -> None:
        """Assign calls, wait for an actor to answer, take all answers, and replace late actors."""
        self._check()
        self._give_out()
        owing = {actor.answer[0]: actor for actor in self._actors if actor.answer}
        ray.wait([*owing], timeout=timeout_s)
        answered, missing = ray.wait([*owing], num_returns=len(owing), timeout=0)
        for receipt in answered:
            self._take(owing[receipt])
        for receipt in missing:
            if monotonic() > owing[receipt].deadline:
                limit_s = self._config.timeout_s if owing[receipt].started else self._config.start_timeout_s
                self._lose(owing[receipt], f"it did not answer for {limit_s:g} seconds")
        self._give_out()

    def _take(self, actor: _Actor) -> None:
        """Take the answer of an actor, or replace the actor."""
        try:
            receipt, *payload = ray.get(actor.answer)
        except RayTaskError as error:  # the result could not be pickled
            receipt, payload = FailedCall(error.cause), []
        except RayError as error:
            receipt, payload = FailedCall(error), []
        if isinstance(receipt, FailedCall) and isinstance(receipt.error, RayError):
            lines = [line.strip() for line in str(receipt.error).splitlines() if line.strip()]
            last = lines[-1] if lines else type(receipt.error).__name__
            self._lose(actor, last.split(" Some common causes include")[0].rstrip("."))
        elif actor.started is None and isinstance(receipt, FailedCall) and self._all_started:
            self._lose(actor, f"it could not be started: {first_line(receipt.error)}")  # others did, so try again
        elif actor.ticket is None and isinstance(receipt, FailedCall):
            self._fail(receipt.error)
        else:
            if actor.started is None:
                actor.started = receipt
            elif actor.ticket is not None:
                self._finish(FinishedCall(actor.ticket, receipt, *payload))
            actor.answer, actor.ticket = [], None

    def _finish(self, call: FinishedCall) -> None:
        """Record a finished call, unless it was discarded."""
        if self._open.pop(call.ticket, None) is not None:
            self._finished.append(call)

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Replace an actor. Its call goes to the front of the queue, unless it was discarded or lost too often."""
        ray.kill(actor.handle)
        process = "" if actor.started is None else f" ({actor.started.host}, process {actor.started.pid})"
        ticket = actor.ticket
        limit = self._config.max_restarts
        call = None if ticket is None else self._open.get(ticket)
        work = "" if call is None else f" while {call.title}"
        lost = f"{self._config.kind} {actor.index + 1}{process} was lost{work}: {reason}"
        if self._restarts == limit:
            self._fail(
                WorkersLostError(
                    f"{lost}; cluster.max_restarts = {limit} allows no more losses; fix the cause, or raise "
                    "cluster.max_restarts, and resume the run"
                )
            )
        self._restarts += 1
        remedy = "it is replaced" if call is None else "it is replaced, and its work is repeated"
        self._echo(f"{lost}; {remedy} (restart {self._restarts:,} of at most {limit:,})")
        self._actors[actor.index] = self._start(actor.index)
        if ticket is not None and call is not None:
            self._losses[ticket] += 1
            if call.max_losses is not None and self._losses[ticket] > call.max_losses:
                self._finish(FinishedCall(ticket, None, is_lost=True))
            else:
                self._waiting.appendleft(ticket)
