"""The parent's side of one worker process: sends requests, and reads replies and output.

Everything that arrives is untrusted. Time and output limits are enforced here: a process that exceeds either is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection
from math import ceil, inf
from typing import NamedTuple

from brorl.verification.sandbox.inside import program
from brorl.verification.sandbox.inside.functions import EXIT_OUT_OF_MEMORY
from brorl.verification.sandbox.inside.program import HEADER, NO_PLAIN_VALUE, Frame
from brorl.verification.sandbox.request import REPLY_BYTES, Fault, Limits, LostError, Reply, RequestClock
from brorl.verification.sandbox.server import ProcessEnd, Server
from brorl.verification.sandbox.values import decode, size_of

_START_SECONDS = 120.0  # more than the slowest server needs to import its modules and fork on an idle machine
KILL_SECONDS = 60.0  # a killed process must end within this time
_MIN_WAIT_S = 0.01
_LOADED_CPU_SECONDS = 3600  # for all calls to a loaded program; each call has its own wall-time limit
_FAILURE_CHARACTERS = 300
_PIPE_BYTES, _WIDE_PIPE_BYTES = 1 << 16, 1 << 20  # Linux pipe sizes: the default, and the unprivileged maximum


class OutsideCall(NamedTuple):
    """A program's call to an outside function. The program waits until `Process.give` sends the result."""

    function: str
    arguments: tuple[object, ...]


class Process:
    """One process. With `stdin`, it runs a whole program; without it, it loads a module and calls its functions.

    The first request's memory limit applies for the life of the process. `outside` names the functions that run on this
    side. All methods raise a LostError after an infrastructure failure.

    Attributes:
        number: The server's number for this process.
        deadline: Time (monotonic clock) by which the current request must finish.
    """

    def __init__(self, server: Server, limits: Limits, stdin: str | None = None, outside: Collection[str] = ()) -> None:
        self._server = server
        self._memory_bytes = limits.memory_bytes
        self._is_run = stdin is not None
        self._cpu_seconds = ceil(limits.seconds) + 1 if self._is_run else _LOADED_CPU_SECONDS
        self._outside = outside
        self._token = 0  # the current request's token; -1 after the reply
        self._ending: ProcessEnd | None = None
        self._failure: Fault | None = None  # why this side killed the process
        self._uncaught: str | None = None  # the exception reported by the program
        self._received = bytearray()  # unparsed bytes of replies
        self._output = bytearray()  # the program's stdout
        self._unsent = b""
        self._replies_ended = self._stdout_ended = False
        self._requests = self._replies = self._stdout = -1
        try:
            self._open(stdin)
        except (OSError, LostError) as error:
            self._close_descriptors()
            reason = str(error) if isinstance(error, LostError) else f"a process could not be started: {error}"
            raise LostError(reason) from None
        self.deadline = time.monotonic() + _START_SECONDS
        self._clock: RequestClock | None = None  # None until the process is confined

    def _open(self, stdin: str | None) -> None:
        with contextlib.ExitStack() as theirs:
            requests, self._requests = os.pipe()
            theirs.callback(os.close, requests)
            self._replies, replies = os.pipe()
            theirs.callback(os.close, replies)
            descriptors = [requests, replies]
            if stdin is not None:
                descriptors.append(_sealed_file(stdin.encode("utf-8", "surrogatepass")))
                theirs.callback(os.close, descriptors[-1])
                self._stdout, stdout = os.pipe()
                theirs.callback(os.close, stdout)
                descriptors.append(stdout)
            for descriptor in (*self.readable, self._requests):
                os.set_blocking(descriptor, False)
            self.number = self._server.start(self._memory_bytes, self._cpu_seconds, descriptors)

    @property
    def readable(self) -> list[int]:
        """Descriptors to read from."""
        streams = ((self._replies, self._replies_ended), (self._stdout, self._stdout_ended))
        return [descriptor for descriptor, ended in streams if descriptor >= 0 and not ended]

    @property
    def writable(self) -> list[int]:
        """The request descriptor, if part of the request has not been sent yet."""
        return [self._requests] if self._unsent else []

    @property
    def is_idle(self) -> bool:
        """Whether the process is running and has replied to its last request, so the next judge can use it."""
        return self._token == -1 and self.number in self._server.alive and self._failure is None

    def used_s(self) -> float:
        """Return the seconds that the current request has used."""
        return self._clock.used_s() if self._clock else 0.0

    def time_of(self, seconds: float) -> float:
        """Return when (monotonic clock) the request will have used this many seconds, if it keeps its core."""
        return self._clock.time_of(seconds) if self._clock else inf

    def ask(self, kind: int, body: bytes, limits: Limits) -> None:
        """Send a request and its limits. `kind` is `program.RUN`, `LOAD` or `CALL`."""
        self._limits = limits
        self._has_value = kind == program.CALL
        self._widen(limits.output_bytes)
        if self._clock is not None:
            self._clock.restart()
        self._send(kind, body)

    def give(self, body: bytes) -> None:
        """Answer the program's call to an outside function. The request continues."""
        if self._clock is not None:
            self._clock.resume()
        self._send(program.GIVE, body)

    def _send(self, kind: int, body: bytes) -> None:
        if self._clock is not None:
            self._server.wake(self.number)
            self.deadline = self._clock.time_of(self._limits.seconds)
        self._token = int.from_bytes(os.urandom(8), "big")
        self._unsent += Frame(kind, self._token, body).to_bytes()
        self._write()

    def _widen(self, num_bytes: int) -> None:
        """Enlarge the reply pipe to this size if the system allows it, so the program need not wait for this side."""
        if sys.platform == "linux" and num_bytes > _PIPE_BYTES and self._has_value and not self._server.trusted:
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.fcntl(self._replies, fcntl.F_SETPIPE_SZ, min(num_bytes, _WIDE_PIPE_BYTES))

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
            except BrokenPipeError:
                self._unsent = b""

    def advance(self) -> Reply | OutsideCall | None:
        """Write and read without blocking, enforce the limits, and return the reply once it is complete."""
        if self._unsent:
            self._write()
        self._ending = self._ending or self._server.take_ending(self.number)
        self._read_output()
        reply = self._read_reply() if self._failure is None else None
        if reply is not None:
            return reply
        if self._ending is not None:
            return self._last_reply(self._ending)
        if time.monotonic() >= self.deadline:
            if self._failure is not None:
                raise LostError("a worker did not respond")
            if self._clock is None:
                raise LostError("a process took too long to start")
            self._check_time(self._clock)
        return None

    def _check_time(self, clock: RequestClock) -> None:
        """Stop the program if its time is up; LostError if other processes occupied its core for most of the time."""
        limit = self._limits.seconds
        if clock.used_s() > limit - _MIN_WAIT_S:
            self._stop(Fault.TIMEOUT)
            return
        last = clock.last_time_of(limit)
        if time.monotonic() >= last:
            raise LostError("the machine was overloaded")
        self.deadline = min(clock.time_of(limit), last)

    def _read_output(self) -> None:
        """Read standard output. Stop the program if the output exceeds the limit."""
        limit = self._limits.output_bytes
        while self._stdout >= 0 and not self._stdout_ended and self._failure is None:
            chunk = _read(self._stdout)
            if chunk is None:
                return
            self._stdout_ended = not chunk
            self._output += chunk
            if len(self._output) > limit:
                del self._output[limit:]
                self._stop(Fault.TOO_MUCH_OUTPUT)

    def _read_reply(self) -> Reply | OutsideCall | None:
        """Read frames up to and including the reply, and return the reply; None if it has not arrived."""
        while (frame := self._next_frame()) is not None:
            if frame.kind == program.UNCONFINED and self._clock is None:
                raise LostError(f"a process could not be confined: {_line(frame.body)}")
            if frame.kind == program.READY and self._clock is None:
                self._clock = RequestClock(int(frame.body))
                self.deadline = self._clock.time_of(self._limits.seconds)
                continue
            if self._clock is None or frame.token != self._token:
                self._stop(Fault.BROKE_PROTOCOL)
                return None
            if self._is_run and frame.kind == program.FAILED and self._uncaught is None:
                self._uncaught = _line(frame.body)
                continue
            if not self._is_run and frame.kind in (program.VALUE, program.FAILED, program.ASKED):
                self._token = -1  # a second reply to one request breaks the protocol
                return self._reply(frame)
            self._stop(Fault.BROKE_PROTOCOL)
            return None
        return None

    def _next_frame(self) -> Frame | None:
        """Return the next frame; None if it is incomplete. A frame over the limit stops the program."""
        while True:
            if len(self._received) >= HEADER.size:
                kind, token, length = HEADER.unpack_from(self._received)
                end = HEADER.size + length
                if length > max(self._limits.output_bytes, REPLY_BYTES):
                    self._stop(Fault.TOO_MUCH_OUTPUT)
                    return None
                if len(self._received) >= end:
                    frame = Frame(kind, token, bytes(self._received[HEADER.size : end]))
                    del self._received[:end]
                    return frame
            if self._replies_ended:
                return None
            chunk = _read(self._replies)
            if chunk is None:
                return None
            self._replies_ended = not chunk
            self._received += chunk

    def _reply(self, frame: Frame) -> Reply | OutsideCall:
        if frame.kind == program.FAILED:
            return Reply(None, _line(frame.body), self._reply_s())
        most = self._limits.output_parts
        if most is not None and size_of(frame.body).num_parts > most:
            return Reply(None, Fault.TOO_MUCH_OUTPUT, self._reply_s())
        try:
            value = decode(frame.body.decode())
            if frame.kind == program.ASKED:
                name, arguments = value
                if name not in self._outside or type(arguments) is not tuple:
                    raise ValueError("not a call to an outside function")
                self._reply_s()
                return OutsideCall(name, arguments)
        except (ValueError, TypeError) as error:
            failure = _line(f"{NO_PLAIN_VALUE}: {error}".encode("utf-8", "replace"))
            return Reply(None, failure, self._reply_s())
        return Reply(value if self._has_value else None, None, self._reply_s())

    def _reply_s(self) -> float:
        """Stop the clock, and return the request's seconds so far."""
        if self._clock is not None:
            self._clock.pause()
        return self.used_s()

    def _stop(self, failure: Fault) -> None:
        """Kill the program because of what it did."""
        self._failure = self._failure or failure
        self.deadline = time.monotonic() + KILL_SECONDS
        self._server.kill(self.number)

    def _last_reply(self, ending: ProcessEnd) -> Reply:
        """Return the reply to the request that was running when the process ended."""
        if self._clock is not None:
            self._clock.notice(ending.denied_seconds)
        seconds = self._reply_s()
        if self._clock is None and self._failure is None:  # the answer has not started to run
            raise LostError("a process ended before it was confined")
        failure = self._failure or self._uncaught or self._why(ending)
        output = self._output.decode("utf-8", "replace") if self._is_run else None
        return Reply(output, failure and str(failure), seconds)

    def _why(self, ending: ProcessEnd) -> str | None:
        """Return why the process ended, if this side did not stop it.

        Only an unconfined program can send itself SIGKILL; doing so must not make its response unverified.
        """
        if ending.stopped_for is not None:
            return Fault(ending.stopped_for)
        code = os.waitstatus_to_exitcode(ending.status)
        if self._server.trusted and -code in (signal.SIGKILL, signal.SIGTERM):  # by the kernel, a monitor or a user
            raise LostError("a worker was lost")
        if self._server.trusted and code == EXIT_OUT_OF_MEMORY:
            return Fault.OUT_OF_MEMORY
        if code >= 0:
            return f"{Fault.EXITED} with code {code}" if code or not self._is_run else None
        if -code == signal.SIGKILL:
            if ending.cpu_seconds >= self._cpu_seconds:
                return Fault.TIMEOUT
            if ending.memory_bytes > self._memory_bytes // 2:
                return Fault.OUT_OF_MEMORY
            if self._server.confined:
                raise LostError("a process was killed from outside")
        return Fault.TIMEOUT if -code == signal.SIGXCPU and not self._server.trusted else f"{Fault.KILLED} {-code}"

    def close(self) -> None:
        """Kill the process and close the descriptors."""
        self._server.kill(self.number)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (self._requests, self._replies, self._stdout):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = self._stdout = -1


def _read(descriptor: int) -> bytes | None:
    """Return the bytes that have arrived: None if there are none yet, b"" at the end of the pipe."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _line(body: bytes) -> str:
    """Return untrusted text as a short line of printable characters."""
    text = " ".join(body[:REPLY_BYTES].decode("utf-8", "replace").split())
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:_FAILURE_CHARACTERS])


def _sealed_file(content: bytes) -> int:
    """Return a descriptor for an immutable in-memory file with this content."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())
    import fcntl

    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    return descriptor
