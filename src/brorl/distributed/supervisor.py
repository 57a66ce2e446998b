"""Supervises workers of one kind, which are Ray actors: starts them, gives out calls, and replaces lost workers.

A free worker takes the oldest call. A worker that dies, or gives no answer in time, is killed and replaced, and its
call is given out next. Each worker has a thread here that waits for it while the caller computes. Ray could restart
actors and repeat tasks itself, but it has no time limit, and a restarted actor would lack its weights.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from brorl.activity import Echo
from brorl.errors import WorkersLostError, first_line

_POLL_S = 0.2  # Python handles a signal that comes just before a wait only after it: short waits keep Ctrl-C working
_GRACE_S = 10.0  # longest wait for a thread to end after its worker was killed


@dataclass(frozen=True)
class WorkerPoolConfig:
    """How many workers there are, where they run, and their limits."""

    kind: str  # the name of a worker in messages: `rollout worker`
    number: int  # number of workers, 1 or more
    # index of a worker, 0 to `number` - 1 -> options of its Ray actor
    options: Callable[[int], Mapping[str, Any]]
    timeout_s: float  # a call that takes longer means that the worker is lost
    max_restarts: int  # lost workers that are replaced; one more is an error
    start_timeout_s: float = 1800.0  # a start that takes longer means that the worker is lost


@dataclass(frozen=True)
class WorkerCall:
    """A method call that any worker can do."""

    method: str
    arguments: tuple[Any, ...]
    title: str  # what messages call the work: `sampling prompt 3`
    max_losses: int | None = None  # repeats after a lost worker, before the call is given up; None for no limit


class FinishedCall(NamedTuple):
    """A finished call."""

    ticket: int  # the number that `submit` returned
    receipt: Any  # first result of the method, small
    payload: Any  # second result of the method; a Ray reference until it is fetched
    lost: str | None = None  # why the call was given up; None if it was done


class StartReceipt(NamedTuple):
    """Says where a worker has started."""

    host: str  # name and address of the machine
    pid: int  # its process id there


class FailedCall(NamedTuple):
    """Replaces the receipt of a call that raised an exception; the process is intact."""

    error: Exception


class WorkerHost:
    """Runs in a worker's process: makes the worker, then calls its methods; Ray makes this class an actor.

    Every method of the worker returns a receipt, which the driver reads at once, and a payload, which stays
    where it was made until the driver fetches it.
    """

    def start(self, make: bytes) -> StartReceipt | FailedCall:
        """Make the worker. In an actor's constructor, an exception would lose its type."""
        try:
            self._worker = pickle.loads(make)()
            return StartReceipt(f"{socket.gethostname()} at {ray.util.get_node_ip_address()}", os.getpid())
        except Exception as error:
            return _raised(error)

    def call(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method of the worker; return its receipt and payload, or `FailedCall` and None."""
        try:
            receipt, payload = getattr(self._worker, method)(*arguments)
        except Exception as error:
            return _raised(error), None
        return receipt, payload


def _raised(error: Exception) -> FailedCall:
    """Wrap an exception for the way to the driver. Pickling drops the traceback, so a note keeps its text."""
    error.add_note(f"In a worker on {socket.gethostname()}:\n{''.join(traceback.format_exception(error))}")
    return FailedCall(error)


_Host = ray.remote(WorkerHost)


@dataclass(eq=False)
class _Worker:
    """A worker process, and the ticket that it works on."""

    actor: Any
    started: StartReceipt | None = None
    ticket: int | None = None


class _LostError(Exception):
    """A worker has died, or it has given no answer in time."""


class Supervisor:
    """Gives calls to workers. Only one thread may use it; `echo` gets a line for each lost worker.

    `make` makes a worker in its process, and must be picklable. If it fails, or too many workers are lost, the start
    fails.
    """

    def __init__(self, make: Callable[[], object], pool_config: WorkerPoolConfig, echo: Echo = lambda _: None) -> None:
        self._make = cloudpickle.dumps(make)  # workers unpickle it in `start`, where an error keeps its type
        self._config, self._echo = pool_config, echo
        self._num_tickets = 0
        self._outbox: SimpleQueue[FinishedCall | str] = SimpleQueue()  # what the threads send: calls, lines for `echo`
        self._fetched: list[FinishedCall] = []
        self._all_started = threading.Event()  # set also when the start has failed
        self._changed = threading.Condition()  # guards all fields below
        self._failure: BaseException | None = None
        self._open: dict[int, WorkerCall] = {}  # ticket -> a call that is not finished
        self._waiting: deque[int] = deque()
        self._losses: Counter[int] = Counter()
        self._preparation: tuple[int, WorkerCall | None] = (0, None)
        self._restarts = 0
        self._workers: list[_Worker | None] = [None] * pool_config.number
        self._threads = [
            threading.Thread(target=self._keep, args=(index,), name=f"{pool_config.kind} {index + 1}", daemon=True)
            for index in range(pool_config.number)
        ]
        for thread in self._threads:
            thread.start()
        try:
            while not self._all_started.wait(_POLL_S):
                self._take_all()
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> list[StartReceipt]:
        """The receipts of the workers that have started, by index."""
        return [worker.started for worker in self._workers if worker is not None and worker.started is not None]

    def submit(self, call: WorkerCall) -> int:
        """Queue a call; return its ticket. Tickets rise from call to call."""
        self._check()
        with self._changed:
            ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
            self._open[ticket] = call
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def prepare(self, call: WorkerCall) -> None:
        """Have each worker do a call once, before its next ticket. It replaces the previous preparation."""
        self._check()
        with self._changed:
            self._preparation = self._preparation[0] + 1, call
            self._changed.notify_all()

    def finished(self, timeout_s: float | None = None) -> list[FinishedCall]:
        """Wait until a call is finished; return all finished calls, each once; none after the timeout.

        If a call raised an exception, raise it here; the call is then finished.
        """
        deadline = monotonic() + (inf if timeout_s is None else timeout_s)
        while self._open and not self._fetched:
            if not self._take_all(max(0.0, min(_POLL_S, deadline - monotonic()))):
                self._check()
                if monotonic() >= deadline:
                    break
        done = [call for call in self._fetched if not isinstance(call.receipt, FailedCall)]
        self._fetched = [call for call in self._fetched if isinstance(call.receipt, FailedCall)]
        if self._fetched and not done:
            raise self._fetched.pop(0).receipt.error
        return done

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget calls. A worker that is doing one finishes it, and the result is dropped."""
        tickets = {*tickets}
        with self._changed:
            for ticket in tickets:
                self._open.pop(ticket, None)
            self._waiting = deque(ticket for ticket in self._waiting if ticket in self._open)
        self._fetched = [call for call in self._fetched if call.ticket not in tickets]

    def close(self) -> None:
        """Kill all workers."""
        self._end(RuntimeError("the workers have been closed"))
        for thread in self._threads if ray.is_initialized() else ():
            thread.join(_GRACE_S)

    def _check(self) -> None:
        """Raise the failure that ended the work of all workers, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _take_all(self, timeout_s: float = 0.0) -> bool:
        """Wait for news from the threads, and take all of it; return whether there was any."""
        try:
            self._take(self._outbox.get(timeout=timeout_s))
            while not self._outbox.empty():
                self._take(self._outbox.get())
        except Empty:
            return False
        return True

    def _take(self, news: FinishedCall | str) -> None:
        """Take a line, or a finished call and its payload; repeat the call if the payload was lost with its machine."""
        if isinstance(news, str):
            self._echo(news)
            return
        call = self._open.get(news.ticket)
        if call is None:
            return
        try:
            if news.lost is None and not isinstance(news.receipt, FailedCall):
                news = news._replace(payload=ray.get(news.payload))
        except RayError as error:
            reason = first_line(error)
            with self._changed:
                if self._count_loss(f"the result of {call.title} was lost: {reason}", "it is made again"):
                    self._put_back(news.ticket, reason)
            return
        with self._changed:
            del self._open[news.ticket]
        self._losses.pop(news.ticket, None)
        self._fetched.append(news)

    # The threads: all methods below run in them, except that any thread can end the work.

    def _keep(self, index: int) -> None:
        """Keep one worker running: start it, give it calls, and replace it whenever it is lost."""
        options = {**self._config.options(index), "max_restarts": 0, "max_task_retries": 0}
        try:
            while True:
                with self._changed:
                    if self._failure is not None:
                        return
                    worker = self._workers[index] = _Worker(_Host.options(**options).remote())
                try:
                    self._serve(worker)
                except _LostError as error:
                    self._lose(index, worker, str(error))
        except BaseException as error:  # `finished` must not wait for a thread that has ended
            self._end(error)

    def _serve(self, worker: _Worker) -> None:
        """Start a worker, and give it calls until all workers end."""
        started = _answer(worker.actor.start.remote(self._make), self._config.start_timeout_s)
        if isinstance(started, FailedCall):
            if not self._all_started.is_set():
                raise started.error
            raise _LostError(f"it could not be started: {first_line(started.error)}")  # others could, so try again
        worker.started = started
        if len(self.started) == self._config.number:
            self._all_started.set()
        prepared = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure or self._waiting or prepared < self._preparation[0])  # noqa: B023
                if self._failure is not None:
                    return
                if prepared < self._preparation[0]:
                    prepared, call = self._preparation
                    assert call is not None
                else:
                    worker.ticket = self._waiting.popleft()
                    call = self._open[worker.ticket]
                receipt, payload = worker.actor.call.options(num_returns=2).remote(call.method, *call.arguments)
            answer = _answer(receipt, self._config.timeout_s)
            if worker.ticket is not None:
                self._outbox.put(FinishedCall(worker.ticket, answer, payload))
            elif isinstance(answer, FailedCall):
                raise answer.error
            worker.ticket = None

    def _lose(self, index: int, worker: _Worker, reason: str) -> None:
        """Kill a worker, and put back its call."""
        with self._changed:
            if self._failure is not None:
                return
            ray.kill(worker.actor)
            process = "" if worker.started is None else f" ({worker.started.host}, process {worker.started.pid})"
            call = None if worker.ticket is None else self._open.get(worker.ticket)
            work = "" if call is None else f" while {call.title}"
            lost = f"{self._config.kind} {index + 1}{process} was lost{work}: {reason}"
            if self._count_loss(lost, "it is replaced" + ("" if call is None else ", and its work is repeated")):
                self._put_back(worker.ticket, reason)

    def _count_loss(self, lost: str, remedy: str) -> bool:
        """Report a loss and return True. After too many losses, end all workers and return False."""
        limit = self._config.max_restarts
        if self._restarts == limit:
            self._end(
                WorkersLostError(
                    f"{lost}; cluster.max_restarts = {limit} allows no more losses; fix the cause, or raise "
                    "cluster.max_restarts, and resume the run"
                )
            )
            return False
        self._restarts += 1
        self._outbox.put(f"{lost}; {remedy} (restart {self._restarts:,} of at most {limit:,})")
        return True

    def _put_back(self, ticket: int | None, reason: str) -> None:
        """Give out a call again, before all others, unless it was discarded or has been lost too often."""
        call = None if ticket is None else self._open.get(ticket)
        if ticket is None or call is None:
            return
        self._losses[ticket] += 1
        if call.max_losses is not None and self._losses[ticket] > call.max_losses:
            self._outbox.put(FinishedCall(ticket, None, None, lost=reason))
        else:
            self._waiting.appendleft(ticket)
            self._changed.notify()

    def _end(self, failure: BaseException) -> None:
        """End all workers. The caller gets the first failure."""
        with self._changed:
            self._failure = self._failure or failure
            for worker in self._workers if ray.is_initialized() else ():
                if worker is not None:
                    ray.kill(worker.actor)
            self._changed.notify_all()
        self._all_started.set()


def _answer(receipt: Any, timeout_s: float) -> Any:
    """Wait for the receipt of a call."""
    try:
        answer = receipt.future().result(timeout_s)
    except RayTaskError as error:  # the receipt could not be pickled
        answer = FailedCall(error.cause)
    except RayError as error:
        answer = FailedCall(error)
    except TimeoutError:
        raise _LostError(f"it gave no answer for {timeout_s:g} seconds") from None
    if isinstance(answer, FailedCall) and isinstance(answer.error, RayError):
        lines = [line.strip() for line in str(answer.error).splitlines() if line.strip()]
        last = lines[-1] if lines else type(answer.error).__name__
        raise _LostError(last.split(" Some common causes include")[0].rstrip("."))
    return answer
