"""Workers of one kind as Ray actors: starts them, gives each one call after the other, and replaces the lost ones.

In: a function that makes a worker, and jobs. Out: the receipt and the payload of each job. A free worker takes the
oldest job. A worker that dies, or gives no answer in time, is killed and replaced, and its job is the next one to be
given out. A thread does this while the caller computes, so no worker waits for the caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from brorl.distributed.job import Finished, Job, Result
from brorl.distributed.worker_host import Raised, Started, WorkerHost
from brorl.errors import WorkersLostError, first_line

_Host = ray.remote(WorkerHost)
_LONGEST_WAIT_S = 3600.0
_POLL_S = 0.2  # Python handles a signal that comes just before a wait only after it: short waits keep Ctrl-C working


@dataclass(frozen=True)
class WorkerPoolConfig:
    """How many workers there are, where they run, and what they may cost.

    Attributes:
        kind: The kind of the workers in messages: `rollout worker`.
        number: Number of workers, 1 or more.
        options: Returns the options of the Ray actor of a worker, given its place, 0 to `number` - 1.
        timeout_s: Seconds after which a worker that does a job is lost.
        max_restarts: Lost workers that are replaced; one more is an error.
        start_timeout_s: Seconds after which a worker that starts is lost.
    """

    kind: str
    number: int
    options: Callable[[int], Mapping[str, Any]]
    timeout_s: float
    max_restarts: int
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"the number of {self.kind}s must be 1 or more, got {self.number}")
        if not min(self.timeout_s, self.start_timeout_s) > 0:
            raise ValueError(
                f"the timeouts of a {self.kind} must be above 0 seconds, got {self.timeout_s} and "
                f"{self.start_timeout_s} for its start"
            )


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        place: Its place, which its replacement takes over.
        actor: The Ray actor.
        started: The receipt of its start; None before.
        prepared: Number of the last preparation that it has made.
        ticket: The job that it does.
        answer: The receipt that it owes; None if it is free.
        deadline: When it must have given the answer.
    """

    place: int
    actor: Any
    started: Started | None = None
    prepared: int = 0
    ticket: int | None = None
    answer: Any = None
    deadline: float = inf


class Supervisor:
    """Runs jobs on workers; one thread calls its methods.

    Args:
        make: Makes a worker in its process; it can be pickled. See `WorkerHost`.
        staffing: The workers.
        say: Receives a line for each lost worker, from the thread that calls `finished`.

    Raises:
        Exception: The error of a worker that cannot be started.
        WorkersLostError: If more workers than `max_restarts` are lost during the start.
    """

    def __init__(
        self, make: Callable[[], object], pool_config: WorkerPoolConfig, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._make = cloudpickle.dumps(make)  # workers unpickle it in `start`, where an error keeps its type
        self._pool_config = pool_config
        self._say = say
        self._open: set[int] = set()  # tickets whose results the caller waits for
        self._next_ticket = 0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # the work of the thread
        self._outbox: SimpleQueue[Result | str] = SimpleQueue()  # results, and lines for `say`
        self._found: list[Finished] = []  # fetched results
        self._all_started = threading.Event()
        self._failure: BaseException | None = None
        # The thread alone changes these.
        self._jobs: dict[int, Job] = {}
        self._losses: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._preparation: tuple[int, Job | None] = (0, None)
        self._restarts = 0
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(target=self._run, name=f"{pool_config.kind}s", daemon=True)
        self._thread.start()
        try:
            while not self._all_started.wait(_POLL_S):
                self._take_all()
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> list[Started]:
        """The receipts of the workers that have started, by place."""
        return [worker.started for worker in self._workers if worker.started is not None]

    def submit(self, job: Job) -> int:
        """Queue a job.

        Returns:
            Its ticket. Tickets rise from call to call.

        Raises:
            WorkersLostError: If too many workers have been lost.
        """
        self._check()
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._open.add(ticket)
        self._inbox.put(partial(self._queue, ticket, job))
        return ticket

    def prepare(self, job: Job) -> None:
        """Make each worker do a job once, before its next job; it replaces the previous preparation.

        No job starts without it after the return of this method.

        Raises:
            WorkersLostError: If too many workers have been lost.
        """
        accepted = threading.Event()
        self._inbox.put(partial(self._set_preparation, job, accepted))
        while not accepted.wait(_POLL_S):
            self._check()

    def finished(self, timeout_s: float | None = None) -> list[Finished]:
        """Wait until a job is finished, and return all that are; each is returned once.

        Args:
            timeout_s: Longest wait in seconds; None for no limit.

        Returns:
            The finished jobs; none if there is no job, or after the timeout.

        Raises:
            Exception: The exception that a job raised; the job is then finished.
            WorkersLostError: If too many workers have been lost.
        """
        deadline = monotonic() + (inf if timeout_s is None else timeout_s)
        while self._open and not self._found:
            wait_s = min(_POLL_S, deadline - monotonic())
            if not self._take_all(max(wait_s, 0.0)):
                self._check()
                if monotonic() >= deadline:
                    break
        done = [one for one in self._found if not isinstance(one.receipt, Raised)]
        self._found = [one for one in self._found if isinstance(one.receipt, Raised)]
        if self._found and not done:
            raise self._found.pop(0).receipt.error
        return done

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget jobs; a worker finishes the job that it does, and its result is dropped."""
        tickets = {*tickets}
        self._open -= tickets
        self._found = [one for one in self._found if one.ticket not in tickets]
        self._inbox.put(partial(self._forget, tickets))

    def close(self) -> None:
        """Kill all workers."""
        self._failure = self._failure or RuntimeError("the workers have been closed")
        self._inbox.put(lambda: None)
        self._thread.join()

    def _check(self) -> None:
        """Raise the failure that ended the work of all workers, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _take_all(self, timeout_s: float = 0.0) -> bool:
        """Wait for something from the thread, and take all that it has sent; return whether there was something."""
        try:
            self._take(self._outbox.get(timeout=timeout_s))
            while not self._outbox.empty():
                self._take(self._outbox.get())
        except Empty:
            return False
        return True

    def _take(self, result: Result | str) -> None:
        """Fetch a result; a payload that was lost with its machine is made again."""
        if isinstance(result, str):
            self._say(result)
            return
        if result.ticket not in self._open:
            return
        try:
            finished = result.fetch()
        except RayError as error:
            self._inbox.put(partial(self._repeat, result.ticket, result.job, first_line(error)))
            return
        self._open.remove(result.ticket)
        self._found.append(finished)

    # The thread: all methods below run in it.

    def _run(self) -> None:
        try:
            self._workers = [self._start(place) for place in range(self._pool_config.number)]
            while self._failure is None:
                self._handle_next()
                self._replace_stalled()
                self._give_out()
        except BaseException as error:  # `finished` must not wait for a thread that has ended
            self._failure = error
        for worker in self._workers if ray.is_initialized() else ():
            ray.kill(worker.actor)
        self._all_started.set()

    def _handle_next(self) -> None:
        """Wait for a request or an answer, or until a worker is due; handle all that have come."""
        due = min((worker.deadline for worker in self._workers if worker.answer is not None), default=inf)
        try:
            self._inbox.get(timeout=min(max(0.0, due - monotonic()), _LONGEST_WAIT_S))()
            while not self._inbox.empty():
                self._inbox.get()()
        except Empty:
            pass

    def _queue(self, ticket: int, job: Job) -> None:
        self._jobs[ticket] = job
        self._waiting.append(ticket)

    def _repeat(self, ticket: int, job: Job, reason: str) -> None:
        self._jobs[ticket] = job
        if self._count_loss(f"the result of {job.title} was lost: {reason}", "it is made again"):
            self._put_back(ticket, reason)

    def _set_preparation(self, job: Job, accepted: threading.Event) -> None:
        self._preparation = self._preparation[0] + 1, job
        accepted.set()

    def _forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._jobs.pop(ticket, None)
            self._losses.pop(ticket, None)
        self._waiting = deque(ticket for ticket in self._waiting if ticket in self._jobs)

    def _start(self, place: int) -> _Worker:
        options = {**self._pool_config.options(place), "max_restarts": 0, "max_task_retries": 0}
        worker = _Worker(place, _Host.options(**options).remote())
        self._await(
            worker, worker.actor.start.options(num_returns=2).remote(self._make)[0], partial(self._end_start, worker)
        )
        return worker

    def _give_out(self) -> None:
        """Give each free worker the preparation that it lacks, or the oldest job."""
        number, preparation = self._preparation
        for worker in self._workers:
            if worker.answer is not None or worker.started is None:
                continue
            if preparation is not None and worker.prepared < number:
                receipt, _ = self._call(worker, preparation)
                self._await(worker, receipt, partial(self._end_preparation, worker, number))
            elif self._waiting:
                worker.ticket = self._waiting.popleft()
                receipt, payload = self._call(worker, self._jobs[worker.ticket])
                self._await(worker, receipt, partial(self._end_job, worker, payload))

    def _call(self, worker: _Worker, job: Job) -> Any:
        return worker.actor.call.options(num_returns=2).remote(job.method, *job.arguments)

    def _await(self, worker: _Worker, receipt: Any, then: Callable[[Any], None]) -> None:
        """Note the answer that a worker owes; `then` gets it in this thread."""
        worker.answer = receipt
        worker.deadline = monotonic() + self._timeout_s(worker)

        def hand_over(future: Future[Any]) -> None:
            self._inbox.put(partial(self._on_answer, worker, receipt, future, then))

        receipt.future().add_done_callback(hand_over)

    def _on_answer(self, worker: _Worker, receipt: Any, future: Future[Any], then: Callable[[Any], None]) -> None:
        if worker.answer is not receipt:  # it was late, and the worker has been replaced
            return
        error = future.exception()
        if isinstance(error, RayTaskError):  # the receipt could not be pickled
            answer: Any = Raised(error.cause)
        else:
            answer = Raised(error) if isinstance(error, RayError) else future.result()
        if isinstance(answer, Raised) and isinstance(answer.error, RayError):  # a dead actor, or an object that is lost
            self._lose(worker, _cause(answer.error))
            return
        worker.answer = None
        then(answer)

    def _end_start(self, worker: _Worker, answer: Started | Raised) -> None:
        if isinstance(answer, Started):
            worker.started = answer
            if all(other.started is not None for other in self._workers):
                self._all_started.set()
        elif self._all_started.is_set():  # others could be started, so another attempt may succeed
            self._lose(worker, f"it could not be started: {first_line(answer.error)}")
        else:
            self._failure = answer.error

    def _end_preparation(self, worker: _Worker, number: int, receipt: Any) -> None:
        if isinstance(receipt, Raised):
            self._failure = receipt.error
        worker.prepared = number

    def _end_job(self, worker: _Worker, payload: Any, receipt: Any) -> None:
        ticket, worker.ticket = worker.ticket, None
        if ticket in self._jobs:
            self._losses.pop(ticket, None)
            self._outbox.put(Result(ticket, self._jobs.pop(ticket), receipt, payload))

    def _replace_stalled(self) -> None:
        now = monotonic()
        for worker in self._workers:
            if worker.answer is not None and worker.deadline <= now:
                self._lose(worker, f"it gave no answer for {self._timeout_s(worker):g} seconds")

    def _timeout_s(self, worker: _Worker) -> float:
        return self._pool_config.start_timeout_s if worker.started is None else self._pool_config.timeout_s

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Kill a worker, start another one in its place, and put back its job."""
        worker.answer = None
        ray.kill(worker.actor)
        process = "" if worker.started is None else f" ({worker.started.host}, process {worker.started.pid})"
        job = None if worker.ticket is None else self._jobs.get(worker.ticket)
        work = "" if job is None else f" while {job.title}"
        lost = f"{self._pool_config.kind} {worker.place + 1}{process} was lost{work}: {reason}"
        if self._count_loss(lost, "it is replaced" + ("" if job is None else ", and its work is repeated")):
            if worker.ticket is not None:
                self._put_back(worker.ticket, reason)
            self._workers[worker.place] = self._start(worker.place)

    def _count_loss(self, lost: str, remedy: str) -> bool:
        """Report a loss and return True, or end the work of all workers if there have been too many."""
        limit = self._pool_config.max_restarts
        if self._restarts == limit:
            self._failure = WorkersLostError(
                f"{lost}; cluster.max_restarts = {limit} allows no more losses; fix the cause, or raise "
                "cluster.max_restarts, and resume the run"
            )
            return False
        self._restarts += 1
        self._outbox.put(f"{lost}; {remedy} (restart {self._restarts:,} of at most {limit:,})")
        return True

    def _put_back(self, ticket: int, reason: str) -> None:
        """Make a job the next one to be given out, unless it was discarded or has been lost too often."""
        job = self._jobs.get(ticket)
        if job is None:
            return
        self._losses[ticket] = self._losses.get(ticket, 0) + 1
        if job.max_losses is not None and self._losses[ticket] > job.max_losses:
            self._forget([ticket])
            self._outbox.put(Result(ticket, job, None, None, lost=reason))
        else:
            self._waiting.appendleft(ticket)


def _cause(error: BaseException) -> str:
    """Return why an actor died in one line, from a report of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return last.split(" Some common causes include")[0].rstrip(".")
