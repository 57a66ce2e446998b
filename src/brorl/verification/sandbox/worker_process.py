"""One worker process, as the pool sees it: calls in, results out.

In: one call after the other. Out: its result, or the problem if the process failed before the call began. It starts by
exec, never as a fork of a process that may hold a GPU, and ends when this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from brorl.verification.sandbox.call import Result, VerifierCall
from brorl.verification.sandbox.lifeline import Lifeline
from brorl.verification.sandbox.machine_faults import MAX_STRETCH, ended_from_outside, has_ended, waited_s
from brorl.verification.sandbox.worker import EXIT_OUT_OF_MEMORY, HEADER, MAX_REPLY_BYTES
from brorl.verification.verifier import CRASHED, OUT_OF_MEMORY, RAISED, TIMEOUT, UNVERIFIED

_LOST = f"{UNVERIFIED}: a worker was lost"
_STARVED = f"{UNVERIFIED}: the machine was overloaded"
_EXIT_S = 1.0  # from the end of a process's output to its exit
# One thread each, and the same order of sets in every worker of every run: SymPy's results depend on it.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


class FailedStart(NamedTuple):
    """A worker failed before its call began.

    Attributes:
        why: The problem.
        was_idle: Whether it had finished other calls and then ended: anything may have killed it while it was idle.
        raised: Whether the import of the function raised an exception.
    """

    why: str
    was_idle: bool = False
    raised: bool = False


class WorkerProcess:
    """One process and its current call.

    Attributes:
        number: Index of its call.
        call: Its call.
        deadline: Time (monotonic clock) by which the function must be loaded, then by which the call must end.
        unsent: Bytes that the process has not read yet.
        served: Number of calls that it has finished.
        usable: Whether it can get another call.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._lifeline = Lifeline()
        try:
            self._process = _start(self._lifeline.child_end, memory_bytes)
        except OSError:
            self._lifeline.cut()
            raise
        finally:
            self._lifeline.close_child_end()
        assert self._process.stdin
        assert self._process.stdout
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.number, self.call, self.deadline, self.served = -1, VerifierCall("", None), float("inf"), 0
        self.usable = True
        self._received = bytearray()
        self._ended = self._broke_protocol = False
        self._began: float | None = None
        self._waited_s = 0.0
        self.unsent = _frame({"sys_path": [path or str(Path.cwd()) for path in sys.path]})

    def assign(self, number: int, call: VerifierCall, deadline: float) -> None:
        """Send a call.

        Args:
            number: Index of the call.
            call: The call.
            deadline: Time by which its function must be loaded, in seconds of the monotonic clock.
        """
        self.unsent += _frame({"call": number, "function": call.function, "arguments": call.arguments})
        self.number, self.call, self.deadline, self._began = number, call, deadline, None
        self.send()

    def send(self) -> None:
        """Write as much as the pipe accepts now; a broken pipe shows when the output ends."""
        with contextlib.suppress(BlockingIOError):
            try:
                self.unsent = self.unsent[os.write(self.input, self.unsent) :]
            except BrokenPipeError:
                self.unsent = b""

    def receive(self) -> None:
        """Read the output that is there."""
        with contextlib.suppress(BlockingIOError):
            while len(self._received) <= HEADER.size + MAX_REPLY_BYTES:
                data = os.read(self.output, 1 << 16)
                if not data:
                    self._ended = True
                    return
                self._received += data

    def outcome(self, timeout_s: float) -> Result | FailedStart | None:
        """Parse the received output.

        Returns:
            The call's result; the problem if the worker failed before the call began; None while the call runs.
        """
        try:
            while (message := self._next_message()) is not None:
                if "running" not in message:
                    return self._finish(message)
                self._began, self._waited_s = time.monotonic(), waited_s(self._process.pid)
                self.deadline = self._began + timeout_s
        except (ValueError, KeyError, TypeError, RecursionError):  # something else wrote, or a value is too deep
            self._broke_protocol = True
        if not (self._ended or self._broke_protocol):
            self._extend_deadline(timeout_s)
            if time.monotonic() < self.deadline:
                return None
        return self._give_up(timeout_s)

    def _extend_deadline(self, timeout_s: float) -> None:
        """Move the deadline of a call by the time in which the worker has waited for a processor."""
        if self._began is not None and time.monotonic() >= self.deadline:
            later = min(time.monotonic() + self._time_left(timeout_s), self._began + MAX_STRETCH * timeout_s)
            self.deadline = max(self.deadline, later)

    def _time_left(self, timeout_s: float) -> float:
        """Return the seconds that are left of the limit of a call, without the time of waiting for a processor."""
        assert self._began is not None
        waited = waited_s(self._process.pid) - self._waited_s
        return self._began + timeout_s + waited - time.monotonic()

    def _is_starved(self, timeout_s: float) -> bool:
        """Whether a call has run into the longest wall time with some of its limit left.

        Before that time the limit itself was reached, even if the kernel has counted more waiting since.
        """
        assert self._began is not None
        return time.monotonic() >= self._began + MAX_STRETCH * timeout_s and self._time_left(timeout_s) > 0

    def _next_message(self) -> dict[str, Any] | None:
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack(self._received[: HEADER.size])[0]
        if end > HEADER.size + MAX_REPLY_BYTES:
            raise ValueError("the message is too long")
        if len(self._received) < end:
            return None
        message: dict[str, Any] = json.loads(self._received[HEADER.size : end])
        del self._received[:end]
        if message["call"] != self.number:
            raise ValueError("the message is about another call")
        return message

    def _finish(self, message: dict[str, Any]) -> Result | FailedStart:
        if "unloadable" in message:
            self.usable = False
            return FailedStart(str(message["unloadable"]), raised=True)
        if self._began is None:
            raise ValueError("the result came before the call began")
        seconds = time.monotonic() - self._began
        self.usable, self.served = not (message["retire"] or self._ended), self.served + 1
        if "raised" in message:
            return Result(None, f"{RAISED} {message['raised']}", seconds)
        return Result(message["value"], None, seconds)

    def _give_up(self, timeout_s: float) -> Result | FailedStart:
        self.usable = False
        ended = not self._broke_protocol and has_ended(self._process.pid, _EXIT_S if self._ended else 0.0)
        starved = self._began is not None and not ended and self._is_starved(timeout_s)
        code = self.close()
        if self._began is None:
            why = f"exit code {code}" if ended or self._ended else "it took too long to start"
            return FailedStart("out of memory" if code == EXIT_OUT_OF_MEMORY else why, was_idle=self.served > 0)
        if code == EXIT_OUT_OF_MEMORY:
            failure = OUT_OF_MEMORY
        elif ended:
            failure = _LOST if ended_from_outside(code) else CRASHED
        elif self._ended or self._broke_protocol:
            failure = CRASHED
        else:
            failure = _STARVED if starved else TIMEOUT
        return Result(None, failure, time.monotonic() - self._began)

    def close(self) -> int:
        """Kill the process and all that it started, and return its exit code; it may have ended before."""
        if self._process.returncode is None:  # not reaped yet, so the number of its group is not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._lifeline.cut()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        return self._process.wait()


def _start(lifeline: int, memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start a worker as a separate program, with the arguments that `worker.main` reads."""
    return subprocess.Popen(
        [sys.executable, "-P", "-s", str(Path(__file__).with_name("worker.py")), str(lifeline), str(memory_bytes)],
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
