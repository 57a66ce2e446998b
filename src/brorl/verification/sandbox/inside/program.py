"""What a sandboxed process does: run one program, or load one and call its functions.

Nothing here protects anything: the program can change all of it. The confined process is the boundary.
"""

from __future__ import annotations

import _thread
import ast
import atexit
import builtins
import contextlib
import gc
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from brorl.verification.sandbox.inside.confinement import MAX_THREADS
from brorl.verification.sandbox.inside.frames import (
    ASKED,
    CALL,
    FAILED,
    LOAD,
    RUN,
    VALUE,
    Frame,
    read_frame,
    write_frame,
)
from brorl.verification.sandbox.values import REQUEST_DEPTH, NotPlainError, decode, encode

OUT_OF_MEMORY = "out of memory"
TOO_MUCH_OUTPUT = "too much output"
TOO_MANY_THREADS = "too many threads"
EXITED_IN_CALL = "exited inside the call"
NO_PLAIN_VALUE = "returned no plain value"
_FILE = "answer.py"
_NO_THREAD = "RuntimeError: can't start new thread"


def serve(requests: int, replies: int) -> NoReturn:
    """Serve the requests that arrive on one descriptor, reply on the other, then end the process."""
    loaded = _Loaded(requests, replies)
    while (frame := read_frame(requests)) is not None:
        if frame.kind == RUN:
            _run(frame, replies)
        loaded.serve(frame)
    os._exit(0)


def _run(frame: Frame, replies: int) -> NoReturn:
    """Run a whole program as `python answer.py` would, and exit with its code."""
    stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    code = _outcome(lambda: _execute(frame.body.decode("utf-8", "surrogatepass"), "__main__", {}), frame, replies)
    code = _outcome(_finish, frame, replies) or code
    for stream in (sys.stdout, stdout):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)


def _finish() -> None:
    """Wait for the program's threads, and call its exit functions."""
    if threading.active_count() > 1:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _outcome(work: Callable[[], object], frame: Frame, replies: int) -> int:
    """Do the work and return the exit code; report an exception to the parent."""
    out_of_memory = Frame(FAILED, frame.token, OUT_OF_MEMORY.encode())
    try:
        work()
    except SystemExit as error:
        return error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
    except MemoryError as error:
        _release(error)
        write_frame(replies, out_of_memory)
        return 1
    except BaseException as error:
        write_frame(replies, Frame(FAILED, frame.token, _last_line(error)))
        return 1
    return 0


def _execute(source: str, name: str, names: dict[str, object]) -> dict[str, Any]:
    """Execute a source as a new module, and return its names."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # the module `site` is not imported
    module = types.ModuleType(name)
    module.__dict__.update(names, __file__=_FILE, __builtins__=builtins)
    sys.modules[name] = module
    exec(compile(source, _FILE, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


class _Loaded:
    """A module that stays, and the parent as the caller of its functions."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies
        self._names: dict[str, Any] = {}
        self._token = 0

    def serve(self, frame: Frame) -> None:
        """Load the module or call a function, and reply."""
        self._token = frame.token
        out_of_memory = Frame(FAILED, frame.token, OUT_OF_MEMORY.encode())
        try:
            self._reply(self._load(frame) if frame.kind == LOAD else self._call(frame))
        except MemoryError as error:
            _release(error)
            write_frame(self._replies, out_of_memory)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            text = EXITED_IN_CALL if frame.kind == CALL else f"exited with code {code}"
            self._reply(Frame(FAILED, 0, text.encode()))
        except NotPlainError as error:
            self._reply(Frame(FAILED, 0, f"{NO_PLAIN_VALUE}: {error}".encode("utf-8", "replace")))
        except BaseException as error:
            self._reply(Frame(FAILED, 0, _last_line(error)))

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
        """Return a function that the judge answers."""

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
    """Return the built-in exception that a text such as `ValueError: negative` describes; else a RuntimeError."""
    name, colon, message = text.partition(":")
    kind = getattr(builtins, name.strip(), None)
    arguments: tuple[object, ...] = (message.strip(),) if colon else ()
    if kind is KeyError and arguments:  # its text is the representation of the key
        with contextlib.suppress(ValueError, SyntaxError):
            arguments = (ast.literal_eval(message.strip()),)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a UnicodeError needs more arguments
            return kind(*arguments)
    return RuntimeError(text)


def _release(error: BaseException) -> None:
    """Free the memory that the frames of an exception hold."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()


def _last_line(error: BaseException) -> bytes:
    """Return the last line of the traceback; the program's own `__str__` may raise anything.

    The limit that kept a thread from starting is named instead: the number of threads, or the memory for its stack.
    """
    try:
        line = traceback.format_exception_only(type(error), error)[-1].strip()[:1000]
        if line == _NO_THREAD:
            line = TOO_MANY_THREADS if _thread._count() >= MAX_THREADS - 1 else OUT_OF_MEMORY
        return line.encode("utf-8", "replace")
    except BaseException:
        return type(error).__name__.encode("utf-8", "replace")
