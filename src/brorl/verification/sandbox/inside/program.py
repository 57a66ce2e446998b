"""The code in a worker process: runs one program, or loads one and calls its functions, and communicates over pipes.

A message is a `Frame`. Nothing here provides protection, because the program can change all of it. The security
boundary is the confined process.
"""

from __future__ import annotations

import _thread
import ast
import atexit
import builtins
import contextlib
import gc
import os
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from brorl.verification.sandbox.inside.confinement import MAX_THREADS
from brorl.verification.sandbox.values import REQUEST_DEPTH, NotPlainError, decode, encode

OUT_OF_MEMORY = "out of memory"
_OUT_OF_MEMORY = OUT_OF_MEMORY.encode()
TOO_MUCH_OUTPUT = "too much output"
TOO_MANY_THREADS = "too many threads"
EXITED = "exited"
NO_PLAIN_VALUE = "did not return a plain value"
_FILE = "answer.py"
_NO_THREAD = "RuntimeError: can't start new thread"
HEADER = struct.Struct(">BQI")

# Kinds of frames from the parent. The body of RUN is the source; all other bodies are text encoded by `values`.
RUN, LOAD, CALL, GIVE = 1, 2, 3, 4
# Kinds of frames from the program. READY (with the process id) or UNCONFINED comes before any untrusted code runs.
READY, UNCONFINED, FAILED, VALUE, ASKED = 11, 12, 13, 14, 15


class Frame(NamedTuple):
    """One message on a pipe. `token` is the request's random token, 0 before the first request.

    A reply repeats the token, so that a program cannot reply to a request that it has not received.
    """

    kind: int
    token: int
    body: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the header and the body."""
        return HEADER.pack(self.kind, self.token, len(self.body)) + self.body


def read_frame(descriptor: int) -> Frame | None:
    """Wait for a message and read it; None at the end of the pipe."""
    header = _read_all(descriptor, HEADER.size)
    if header is None:
        return None
    kind, token, length = HEADER.unpack(header)
    body = _read_all(descriptor, length)
    return None if body is None else Frame(kind, token, body)


def write_frame(descriptor: int, frame: Frame) -> None:
    """Write a message. Wait while the pipe is full."""
    data = memoryview(frame.to_bytes())
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, length: int) -> bytes | None:
    chunks = []
    while length:
        chunk = os.read(descriptor, min(length, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def serve(requests: int, replies: int, names: dict[str, Any]) -> NoReturn:
    """Serve requests from one descriptor, reply on the other, and end the process when the requests end.

    `names` contains functions that can be called without loading anything.
    """
    loaded = _Loaded(requests, replies, names)
    while (frame := read_frame(requests)) is not None:
        if frame.kind == RUN:
            _run(frame, replies)
        loaded.serve(frame)
    os._exit(0)


def _run(frame: Frame, replies: int) -> NoReturn:
    """Run a whole program as `python answer.py` would, and exit with its exit code."""
    stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    code = 0
    for work in (lambda: _execute(frame.body.decode("utf-8", "surrogatepass"), "__main__", {}), _finish):
        try:
            work()
        except SystemExit as error:
            code = _code(error) & 255 or code
        except BaseException as error:
            write_frame(replies, Frame(FAILED, frame.token, _failure(error)))
            code = 1
    for stream in (sys.stdout, stdout):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def _finish() -> None:
    """Wait for the program's threads, and call its exit handlers."""
    if threading.active_count() > 1:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _code(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _execute(source: str, name: str, names: dict[str, object]) -> dict[str, Any]:
    """Execute source code as a new module, and return its names."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # the module `site` is not imported
    module = types.ModuleType(name)
    module.__dict__.update(names, __file__=_FILE, __builtins__=builtins)
    sys.modules[name] = module
    exec(compile(source, _FILE, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


class _Loaded:
    """A module that stays loaded so that the parent can call its functions."""

    def __init__(self, requests: int, replies: int, names: dict[str, Any]) -> None:
        self._requests, self._replies = requests, replies
        self._names = names
        self._token = 0

    def serve(self, frame: Frame) -> None:
        """Load the module or call a function, and reply."""
        self._token = frame.token
        try:
            self._reply(self._load(frame) if frame.kind == LOAD else self._call(frame))
        except BaseException as error:
            self._reply(Frame(FAILED, 0, _failure(error)))

    def _load(self, frame: Frame) -> Frame:
        source, outside = decode(frame.body.decode(), REQUEST_DEPTH)
        self._names = _execute(source, "answer", {name: self._outside(name) for name in outside})
        return Frame(VALUE, 0, encode(None).encode())

    def _call(self, frame: Frame) -> Frame:
        path, arguments, output_bytes = decode(frame.body.decode(), REQUEST_DEPTH)
        first, *attributes = path.split(".")
        if first not in self._names:
            raise NameError(f"name {first!r} is not defined")
        function = self._names[first]
        if attributes and isinstance(function, type):
            function = function()
        for name in attributes:
            function = getattr(function, name)
        body = encode(function(*arguments)).encode()
        if len(body) > output_bytes:
            return Frame(FAILED, 0, TOO_MUCH_OUTPUT.encode())
        return Frame(VALUE, 0, body)

    def _reply(self, frame: Frame) -> None:
        write_frame(self._replies, frame._replace(token=self._token))

    def _outside(self, name: str) -> Callable[..., object]:
        """Return a function that sends its arguments to the judge and returns the judge's answer."""

        def ask(*arguments: object) -> object:
            self._reply(Frame(ASKED, 0, encode((name, arguments)).encode()))
            frame = read_frame(self._requests)
            if frame is None:
                os._exit(0)
            self._token = frame.token
            value, error = decode(frame.body.decode(), REQUEST_DEPTH)
            if error is not None:
                raise _exception(error)
            return value

        ask.__name__ = ask.__qualname__ = name
        return ask


def _exception(text: str) -> BaseException:
    """Return the built-in exception that a string such as `ValueError: negative` names; otherwise a RuntimeError."""
    name, colon, message = text.partition(":")
    kind = getattr(builtins, name.strip(), None)
    arguments: tuple[object, ...] = (message.strip(),) if colon else ()
    if kind is KeyError and arguments:  # `KeyError: 'a'`: the message is the key's repr
        with contextlib.suppress(ValueError, SyntaxError):
            arguments = (ast.literal_eval(message.strip()),)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a UnicodeError needs more arguments
            return kind(*arguments)
    return RuntimeError(text)


def _failure(error: BaseException) -> bytes:
    """Return a failure message: for an exception, the last line of its traceback.

    The program's `__str__` may raise anything. If a thread could not start, the message instead names the limit that
    was hit: the number of threads, or the memory for the thread's stack.
    """
    if isinstance(error, MemoryError):  # free the objects that the exception's frames hold
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        return _OUT_OF_MEMORY
    try:
        if isinstance(error, SystemExit):
            return f"{EXITED} with code {_code(error)}".encode()
        if isinstance(error, NotPlainError):
            return f"{NO_PLAIN_VALUE}: {error}".encode("utf-8", "replace")
        line = traceback.format_exception_only(type(error), error)[-1].strip()[:1000]
        if line == _NO_THREAD:
            line = TOO_MANY_THREADS if _thread._count() >= MAX_THREADS - 1 else OUT_OF_MEMORY
        return line.encode("utf-8", "replace")
    except BaseException:
        return type(error).__name__.encode("utf-8", "replace")
