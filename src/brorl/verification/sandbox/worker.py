"""A verification worker: one process that calls functions for `pool.WorkerPool`, one after the other.

In: calls on standard input, as length-prefixed JSON. Out: for each call `running` once its function is loaded, then its
value or the exception. It is a separate program (`python -P -s worker.py lifeline-fd memory-bytes`) and imports only
the standard library and the functions of the calls.

It dies with its parent immediately, even inside C code that never lets a Python thread run: the kernel sends SIGKILL to
the worker's process group when the last write end of the lifeline pipe closes. On systems without such a signal, the
end of standard input ends it after its call.
"""

import fcntl
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

EXIT_OUT_OF_MEMORY = 77
HEADER = struct.Struct(">I")
MAX_REPLY_BYTES = 1 << 24
_ERROR_CHARACTERS = 300


def main() -> None:
    """Serve calls until standard input ends."""
    lifeline, memory_bytes = map(int, sys.argv[1:])
    die_with_parent(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a comparison blocks SIGTERM; a user's programs need it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A limit of private writable memory: libraries reserve far more address space than they use.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory_bytes = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    requests, replies = _take_pipes()
    start = _read(requests)
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    loaded = _Loaded({}, 0)
    while (call := _read(requests)) is not None:
        _serve(call, loaded, replies, memory_bytes)


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process and its children when its parent ends; exit now if the parent has ended.

    The parent holds the other end of the lifeline and never writes to it. The signal of a parent's death (PDEATHSIG)
    does not help: a thread of the parent that ends early can send it before the lifeline closes, and it kills this
    process alone. No process would then receive the lifeline's signal, and the children would live on.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())  # the whole group, with the children of a verifier
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # nothing is ever written to it
        os._exit(0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from descriptors 0 and 1, out of reach of a verifier's prints and reads."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return requests, replies


def _read(requests: BinaryIO) -> dict[str, Any] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = requests.read(size)
    message: dict[str, Any] | None = json.loads(body) if len(body) == size else None
    return message


def _encode(message: dict[str, object]) -> bytes:
    # Scalars of numpy and torch have `item`; any other type is an error of the function's author.
    body = json.dumps(message, default=lambda value: value.item()).encode()
    if len(body) > MAX_REPLY_BYTES:
        raise ValueError(f"returned {len(body)} bytes, more than {MAX_REPLY_BYTES}")
    return body


def _write(replies: BinaryIO, body: bytes) -> None:
    replies.write(HEADER.pack(len(body)) + body)
    replies.flush()


@dataclass
class _Loaded:
    """The loaded functions, and the memory in use after the last of them was loaded."""

    functions: dict[str, Callable[..., object]]
    data_bytes: int


def _serve(call: dict[str, Any], loaded: _Loaded, replies: BinaryIO, memory_bytes: int) -> None:
    """Make one call. Out of memory ends the process: an exit code needs no memory."""
    number, name, arguments = call["call"], call["function"], call["arguments"]
    pid = os.getpid()
    try:
        if name not in loaded.functions:
            loaded.functions[name] = load(name)
            loaded.data_bytes = _data_bytes()
        function = loaded.functions[name]
        accepted = _accepted(function) if arguments is None else None
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    except BaseException as error:
        _write(replies, _encode({"call": number, "unloadable": describe(error)}))
        return
    _write(replies, _encode({"call": number, "running": True}))
    try:
        value = accepted if arguments is None else function(*arguments)
        retire = _retains_memory(loaded.data_bytes, memory_bytes)
        reply = _encode({"call": number, "retire": retire, "value": value})
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    except BaseException as error:
        retire = _retains_memory(loaded.data_bytes, memory_bytes)
        reply = _encode({"call": number, "retire": retire, "raised": describe(error)})
    if os.getpid() != pid:  # the function forked: the child must not answer too
        os._exit(0)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    _write(replies, reply)


def load(name: str) -> Callable[..., object]:
    """Import a function by `package.module:function` or `path/to/file.py:function`.

    Args:
        name: The import path; the current directory is searched for modules too.

    Raises:
        Exception: Any exception of the import.
        TypeError: If the imported object cannot be called.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError("not of the form package.module:function or path/to/file.py:function")
    if place.endswith(".py"):
        module = _load_file(Path(place))
    else:
        if os.getcwd() not in sys.path:  # noqa: PTH109 (strings are what sys.path holds)
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        module = importlib.import_module(place)
    function: object = module
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{attribute} is of type {type(function).__name__}, which cannot be called")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.absolute()}")
    name = f"_verifier_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    sys.path.append(str(path.absolute().parent))  # modules beside it, as for a program
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _accepted(function: Callable[..., object]) -> tuple[int, int | None]:
    """Return the least and the greatest number of positional arguments of a function; None means no bound."""
    least, most = 0, 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return least, None
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            most += 1
            least += parameter.default is parameter.empty
    return least, most


def describe(error: BaseException) -> str:
    """Return type and message of an exception as one short line; its `str` may raise."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}"[:_ERROR_CHARACTERS]


def _data_bytes() -> int:
    """Return the memory in use that counts toward the limit; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _retains_memory(at_start: int, memory_bytes: int) -> bool:
    """Whether finished calls left more than half of the memory in use that was free after loading."""
    bound = (at_start + memory_bytes) // 2
    if _data_bytes() <= bound:
        return False
    gc.collect()
    return _data_bytes() > bound


if __name__ == "__main__":
    main()
