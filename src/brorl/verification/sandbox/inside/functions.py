"""Loads and calls functions by path in a trusted process, which guards against accidents, not adversaries."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from brorl.verification.sandbox.inside.calling import called, result, takes

EXIT_OUT_OF_MEMORY = 77
IN_A_WORKER = "BRORL_VERIFIER_WORKER"  # environment variable that keeps a function's file from starting a run
MAIN_GUARD = 'move everything except imports and functions under if __name__ == "__main__":'  # the fix for such a file
MAX_REPLY_BYTES = 1 << 24
_ERROR_CHARACTERS = 280


class Functions:
    """The functions that a trusted process has imported. Coroutines run in one event loop.

    The limit applies to private writable memory, because libraries reserve far more address space than they use.
    """

    def __init__(self, memory_bytes: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        self._memory_bytes = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._memory_bytes, self._memory_bytes))
        os.environ[IN_A_WORKER] = "1"
        self._pid = os.getpid()
        self._loaded_bytes = 0
        self._functions: dict[str, Callable[..., object]] = {}

    def load(self, *names: str | None) -> str | None:
        """Import functions that have not been imported yet, and return the first problem, or None."""
        for name in names:
            if name is None or name in self._functions:
                continue
            try:
                self._functions[name] = load(name)
            except MemoryError:
                os._exit(EXIT_OUT_OF_MEMORY)
            except BaseException as error:
                return describe(error)
            self._loaded_bytes = _data_bytes()
        return None

    def call(self, name: str, arguments: str, through: str | None = None) -> tuple[str | None, str | None, bool]:
        """Call a loaded function with JSON arguments, or call `through` with the function and the arguments.

        Return (value as JSON text, exception, whether the process retains too much memory to continue); the value or
        the exception is None. If memory runs out, the process exits, since an exit code allocates nothing.
        """
        text = problem = None
        try:
            function = self._functions[name]
            values = json.loads(arguments)
            text = _encode(self._functions[through](function, *values) if through else _called(function, values))
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        except BaseException as error:
            problem = describe(error)
        if os.getpid() != self._pid:  # the function forked: the child must not answer too
            os._exit(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        return text, problem, _retains_memory(self._loaded_bytes, self._memory_bytes)


def _called(function: Callable[..., object], arguments: Any) -> object:
    """Call a function with positional values, or a user's with values by role. Without values, return its roles."""
    if arguments is None:
        try:
            return {"takes": takes(function)}
        except ValueError as error:
            return {"problem": str(error)}
    return called(function, arguments) if isinstance(arguments, dict) else result(function(*arguments))


def _encode(value: object) -> str:
    text = json.dumps(value, default=scalar)
    if len(text) > MAX_REPLY_BYTES:
        raise ValueError(f"returned {len(text)} bytes, more than {MAX_REPLY_BYTES}")
    return text


def scalar(value: Any) -> object:
    """Return a numpy or torch scalar, or a one-element array, as a Python value; a fraction or decimal as a float."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool | int | float | str | None):
        return plain
    if isinstance(plain, Real | Decimal):
        return float(plain)
    raise TypeError(f"returned a value of type {type(value).__name__}; return bools, numbers, text, lists or dicts")


def load(name: str) -> Callable[..., object]:
    """Import `package.module:function`, possibly from the current directory, or `path/to/file.py:function`.

    `path/to/file.pkl:function` is a function that Python code passed to a run; the file contains only that function.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError("not of the form package.module:function or path/to/file.py:function")
    if module_name.endswith(".pkl"):
        return _load_pickle(Path(module_name))
    if module_name.endswith(".py"):
        module = _load_file(Path(module_name))
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        module = importlib.import_module(module_name)
    function: object = module
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{attribute} has type {type(function).__name__}, which is not callable")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.absolute()}")
    name = f"_verifier_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    sys.path.append(str(path.absolute().parent))  # the file can import its neighbors, as a script can
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_pickle(path: Path) -> Callable[..., object]:
    """Load a function from the run directory. Loading executes code, as importing a file does."""
    stored = pickle.loads(path.read_bytes())
    if stored["python"] != sys.version_info[:2]:
        raise RuntimeError("the function was stored by Python {}.{}; use that version".format(*stored["python"]))
    sys.path += [folder for folder in stored["folders"] if folder not in sys.path]
    function: Callable[..., object] = pickle.loads(stored["function"])
    return function


def describe(error: BaseException) -> str:
    """Return an exception's type and message as a short line, even if its `str` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}"[:_ERROR_CHARACTERS]


def _data_bytes() -> int:
    """Return the memory use that counts toward the limit; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[5]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _retains_memory(at_start: int, memory_bytes: int) -> bool:
    """Return whether finished calls still hold more than half of the memory that was free after loading."""
    bound = (at_start + memory_bytes) // 2
    if _data_bytes() <= bound:
        return False
    gc.collect()
    return _data_bytes() > bound
