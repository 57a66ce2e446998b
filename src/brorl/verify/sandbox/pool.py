"""A pool of worker processes that bounds the time and the memory of what it calls.

In: jobs, each a function by its import path and JSON arguments. Out: for each job its value, or why there is none, in
the same order. A job that overruns its time is killed with all processes that it started, its worker is replaced, and
no other job notices. It contains accidents, not adversaries: a worker is an ordinary process of the same user, with
that user's files and network.

Workers are started when there is work, by exec, never as a copy of a process that may hold a GPU. Loading a function is
not counted as time of a job. The pool has no threads, and serves one `run` at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brorl.errors import UserError
from brorl.verify.sandbox.worker import EXIT_OUT_OF_MEMORY, HEADER, MAX_REPLY_BYTES
from brorl.verify.verifier import CRASHED, OUT_OF_MEMORY, RAISED, TIMEOUT

_LIFELINES: set[int] = set()  # the ends that this process holds; its workers die when they close
_LONGEST_WAIT_S = 1.0
_MAX_STARTS = 3  # new workers that may die while they load a function, before it counts as impossible to load
# One thread each, and sets in the same order in every worker of every run: SymPy's ways depend on it.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


class LoadError(UserError):
    """A function cannot be loaded in a worker; without it nothing can be verified."""


@dataclass(frozen=True)
class Job:
    """One call.

    Args:
        function: `package.module:function` or `path/to/file.py:function`.
        arguments: What it is called with; anything that JSON knows.
    """

    function: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Result:
    """What came of a job.

    Args:
        value: What the function returned, as JSON tells it; None if there is a failure.
        failure: Why there is no value: `timeout`, `out of memory`, `verifier crashed` or `verifier raised ...`.
        seconds: Wall time of the call, without starting the worker or loading the function.
    """

    value: Any
    failure: str | None
    seconds: float


class WorkerPool:
    """Calls functions in worker processes with a bound on time and memory.

    Args:
        num_workers: Most processes at a time, 1 or more; None for one less than the cores of this process.
        timeout_s: Longest wall time of a job in seconds, above 0.
        memory_bytes: Most private memory of a worker, libraries included, at least 64 MiB. It is enforced on Linux.
        start_timeout_s: Longest wall time of starting a worker and importing a function in seconds, above 0.

    Raises:
        ValueError: If an argument is outside of its range.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_s: float = 4.0,
        memory_bytes: int = 1 << 30,
        start_timeout_s: float = 120.0,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers must be 1 or more, got {num_workers}")
        for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be above 0 and finite, got {seconds}")
        if memory_bytes < 1 << 26:
            raise ValueError(f"memory_bytes must be at least 64 MiB ({1 << 26}), got {memory_bytes}")
        self.num_workers = num_workers or max(1, _num_cores() - 1)
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._workers = _Workers()
        # Also at exit, and when the pool is forgotten; never in a child that was forked off this process.
        self._finalizer = weakref.finalize(self, _Workers.close, self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and wait for their end; a later `run` starts new ones."""
        self._workers.close()

    def load(self, function: str) -> tuple[int, int | None]:
        """Import a function in a worker without calling it.

        Args:
            function: Its import path.

        Returns:
            The least and the greatest number of positional arguments that it takes; None is no bound.

        Raises:
            LoadError: If it cannot be imported, is not callable, or its import does not end.
        """
        (result,) = self._run([(function, None)])
        if result.failure:
            raise LoadError(f"cannot read the arguments of {function!r}: {result.failure}")
        least, most = result.value
        return least, most

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Do jobs, one at a time per worker, and wait for all of them.

        Args:
            jobs: Any number of jobs.

        Returns:
            One result per job, in the same order.

        Raises:
            LoadError: If a function cannot be loaded.
            TypeError: If an argument is nothing that JSON knows.
        """
        return self._run([(job.function, job.arguments) for job in jobs])

    def _run(self, calls: Sequence[tuple[str, tuple[object, ...] | None]]) -> list[Result]:
        results: dict[int, Result] = {}
        waiting = deque(range(len(calls)))
        failed_starts: dict[str, int] = {}
        busy: list[_Worker] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.num_workers:
                    worker = self._workers.take(self.memory_bytes)
                    busy.append(worker)
                    worker.assign(waiting[0], *calls[waiting[0]], time.monotonic() + self._start_timeout_s)
                    waiting.popleft()
                for worker in _exchange(busy):
                    outcome = worker.outcome(self.timeout_s)
                    if outcome is None:
                        continue
                    busy.remove(worker)
                    if isinstance(outcome, Result):
                        results[worker.job] = outcome
                    else:
                        _count_failed_start(failed_starts, worker, outcome)
                        waiting.appendleft(worker.job)
                    self._workers.give_back(worker)
        finally:
            for worker in busy:  # an interrupt must leave no worker that still owes an answer
                worker.kill()
        return [results[i] for i in range(len(calls))]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_failed_start(failed_starts: dict[str, int], worker: _Worker, why: str) -> None:
    """Count a worker that ended before its job began; one that had served before may have been killed by anything."""
    if worker.served:
        return
    failed_starts[worker.function] = failed_starts.get(worker.function, 0) + 1
    if failed_starts[worker.function] == _MAX_STARTS:
        raise LoadError(f"cannot load {worker.function!r}: {_MAX_STARTS} new workers ended meanwhile ({why})")


def _exchange(busy: Sequence[_Worker]) -> list[_Worker]:
    """Wait until a worker has something to say, takes more of its job or is overdue; return those to look at."""
    poller = select.poll()
    for worker in busy:
        poller.register(worker.output, select.POLLIN)
        if worker.unsent:
            poller.register(worker.input, select.POLLOUT)
    # A signal that comes just before the wait is only handled after it: no wait is long, so that Ctrl-C always works.
    wait_s = min(min(worker.deadline for worker in busy) - time.monotonic(), _LONGEST_WAIT_S)
    events = {descriptor for descriptor, _ in poller.poll(max(0, ceil(wait_s * 1000)))}
    now = time.monotonic()
    for worker in busy:
        if worker.input in events:
            worker.send()
        if worker.output in events:
            worker.receive()
    return [w for w in busy if w.output in events or now >= w.deadline]


class _Workers:
    """The workers that have nothing to do."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._pid = os.getpid()

    def take(self, memory_bytes: int) -> _Worker:
        if self._pid != os.getpid():
            raise RuntimeError("a WorkerPool cannot be used in a process forked off the one that made it; make another")
        return self._idle.pop() if self._idle else _Worker(memory_bytes)

    def give_back(self, worker: _Worker) -> None:
        if worker.usable:
            self._idle.append(worker)
        else:
            worker.kill()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        while self._idle:
            self._idle.pop().kill()


class _Worker:
    """One process and the job it has.

    Attributes:
        job: Index of its job.
        function: The job's function.
        deadline: When (monotonic clock) the function must have been loaded, then when the job must be done.
        unsent: What the process has not taken yet.
        served: Number of jobs it has done.
        usable: Whether it can be given another job.
    """

    def __init__(self, memory_bytes: int) -> None:
        # One pipe per worker: who is to be killed at its end is a property of the open pipe, not of its reader.
        lifeline, self._lifeline = os.pipe()
        _LIFELINES.add(self._lifeline)
        try:
            self._process = _start(lifeline, memory_bytes)
        except OSError as error:
            _let_go(self._lifeline)
            raise LoadError(f"cannot start a process for verification: {error}; free memory or processes") from None
        finally:
            os.close(lifeline)
        assert self._process.stdin
        assert self._process.stdout
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.job, self.function, self.deadline, self.served = -1, "", float("inf"), 0
        self.usable = True
        self._received = bytearray()
        self._ended = False
        self._began: float | None = None
        self.unsent = _frame({"sys_path": [path or str(Path.cwd()) for path in sys.path]})

    def assign(self, job: int, function: str, arguments: tuple[object, ...] | None, deadline: float) -> None:
        self.unsent += _frame({"job": job, "function": function, "arguments": arguments})
        self.job, self.function, self.deadline, self._began = job, function, deadline, None
        self.send()

    def send(self) -> None:
        """Send what the process takes now; a broken pipe shows when its output ends."""
        with contextlib.suppress(BlockingIOError):
            try:
                self.unsent = self.unsent[os.write(self.input, self.unsent) :]
            except BrokenPipeError:
                self.unsent = b""

    def receive(self) -> None:
        """Take what the process has written."""
        with contextlib.suppress(BlockingIOError):
            while len(self._received) <= HEADER.size + MAX_REPLY_BYTES:
                chunk = os.read(self.output, 1 << 16)
                if not chunk:
                    self._ended = True
                    return
                self._received += chunk

    def outcome(self, timeout_s: float) -> Result | str | None:
        """Look at what was received.

        Returns:
            The job's result; or why the process ended before the job began; or None while it goes on.

        Raises:
            LoadError: If the process says that it cannot load the function.
        """
        try:
            while (message := self._next_message()) is not None:
                if "running" in message:
                    self._began = time.monotonic()
                    self.deadline = self._began + timeout_s
                else:
                    return self._finish(message)
        except (ValueError, KeyError, TypeError):  # not the protocol: something else wrote to the pipe
            self._ended = True
        if self._ended or time.monotonic() >= self.deadline:
            return self._give_up()
        return None

    def _next_message(self) -> dict[str, Any] | None:
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack(self._received[: HEADER.size])[0]
        if end > HEADER.size + MAX_REPLY_BYTES:
            raise ValueError("too long a message")
        if len(self._received) < end:
            return None
        message: dict[str, Any] = json.loads(self._received[HEADER.size : end])
        del self._received[:end]
        if message["job"] != self.job:
            raise ValueError("a message about another job")
        return message

    def _finish(self, message: dict[str, Any]) -> Result:
        if "unloadable" in message:
            raise LoadError(f"cannot load {self.function!r}: {message['unloadable']}")
        if self._began is None:
            raise ValueError("a result before the job began")
        seconds = time.monotonic() - self._began
        self.usable, self.served = not (message["retire"] or self._ended), self.served + 1
        if "raised" in message:
            return Result(None, f"{RAISED} {message['raised']}", seconds)
        return Result(message["value"], None, seconds)

    def _give_up(self) -> Result | str:
        self.usable = False
        code = self.kill()
        if self._began is None:
            late = "it took too long to start" if not self._ended else f"exit code {code}"
            return "out of memory" if code == EXIT_OUT_OF_MEMORY else late
        seconds = time.monotonic() - self._began
        if not self._ended:
            return Result(None, TIMEOUT, seconds)
        return Result(None, OUT_OF_MEMORY if code == EXIT_OUT_OF_MEMORY else CRASHED, seconds)

    def kill(self) -> int:
        """Kill the process and all that it started, and return its exit code; it may have ended before."""
        if self._process.returncode is None:  # not reaped yet, so that its group's number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            _let_go(self._lifeline)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        return self._process.wait()


def _let_go(lifeline: int) -> None:
    """Close this process's end of a lifeline."""
    _LIFELINES.discard(lifeline)
    os.close(lifeline)


def _let_all_go() -> None:
    """Close the ends that a forked child has inherited: they would keep the workers alive when the trainer is not."""
    while _LIFELINES:
        with contextlib.suppress(OSError):
            os.close(_LIFELINES.pop())


os.register_at_fork(after_in_child=_let_all_go)


def _start(lifeline: int, memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a worker as a program of its own; `worker.py` says what its arguments are for."""
    command = [sys.executable, "-P", "-s", str(Path(__file__).with_name("worker.py"))]
    return subprocess.Popen(
        [*command, str(lifeline), str(memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT},
        pass_fds=(lifeline,),
        start_new_session=True,  # Ctrl-C does not reach it, and it can be killed with all that it starts
        bufsize=0,
    )


def _frame(message: dict[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body
