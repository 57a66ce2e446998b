"""Loads and calls functions by their path in a trusted process, which contains accidents, not adversaries."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

EXIT_OUT_OF_MEMORY = 77
IN_A_WORKER = "BRORL_VERIFIER_WORKER"  # environment variable that keeps a function's file from starting a run
MAIN_GUARD = 'put all but imports and functions under if __name__ == "__main__":'  # the fix of such a file
REWARD = "reward"  # replaces the number of arguments if a function has TRL's signature
MAX_REPLY_BYTES = 1 << 24
_ERROR_CHARACTERS = 280
_REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "reference")


class Functions:
    """The functions that one trusted process has imported; coroutines run in one event loop.

    The limit is on private writable memory, because libraries reserve far more address space than they use.
    """

    def __init__(self, memory_bytes: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        self._memory_bytes = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._memory_bytes, self._memory_bytes))
        os.environ[IN_A_WORKER] = "1"
        self._pid, self._loaded_bytes = os.getpid(), 0
        self._functions: dict[str, Callable[..., object]] = {}

    def load(self, name: str) -> str | None:
        """Import a function, unless it was imported before; return the problem, None if there is none."""
        if name in self._functions:
            return None
        try:
            self._functions[name] = load(name)
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        except BaseException as error:
            return describe(error)
        self._loaded_bytes = _data_bytes()
        return None

    def call(self, name: str, arguments: str) -> tuple[str | None, str | None, bool]:
        """Call a loaded function with arguments as JSON text.

        Return (value as JSON text, exception, whether the process retains too much memory to go on); value or exception
        is None. If memory runs out the process ends, because an exit code needs no memory.
        """
        text = problem = None
        try:
            text = _encode(_called(self._functions[name], json.loads(arguments)))
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        except BaseException as error:
            problem = describe(error)
        if os.getpid() != self._pid:  # the function forked: the child must not answer too
            os._exit(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        return text, problem, _retains_memory(self._loaded_bytes, self._memory_bytes)


def _called(function: Callable[..., object], arguments: list[Any] | None) -> object:
    is_reward = is_reward_function(function)
    if arguments is None:
        return REWARD if is_reward else next((number for number in (3, 2) if _takes(function, number)), None)
    return rewarded(function, *arguments) if is_reward else _result(function(*arguments))


def _result(value: Any) -> Any:
    """Return a function's value; if the value is a coroutine, run it first."""
    return _runner().run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[object]) -> object:
    return await value


@cache
def _runner() -> asyncio.Runner:
    import asyncio

    return asyncio.Runner()


def is_reward_function(function: Callable[..., object]) -> bool:
    """Return whether a function has TRL's signature, `reward(completions, **columns) -> list[float]`."""
    try:
        return "completions" in inspect.signature(function).parameters
    except ValueError:  # some functions in C have no signature
        return False


def rewarded(function: Callable[..., Any], response: str, reference: str, prompt: str, as_messages: bool) -> object:
    """Call a reward function with TRL's signature on one response, and return its one reward.

        reward(completions, target): target=[reference]
        reward(completions, numbers, target): the reference is the JSON object {"numbers": ..., "target": ...}
        reward(completions, **columns): answer, solution, ground_truth and reference are all [reference]

    Raises a ValueError if a column is missing, or if the function does not return one reward.
    """
    completion: object = [{"role": "assistant", "content": response}] if as_messages else response
    shown: object = [{"role": "user", "content": prompt}] if as_messages else prompt
    known: dict[str, object] = {
        "completions": [completion],
        "prompts": [shown],
        "completion_ids": [[]],
        "trainer_state": None,
    }
    parameters = inspect.signature(function).parameters
    columns = [
        name for name, parameter in parameters.items()
        if name not in known and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]  # fmt: skip
    required = [name for name in columns if parameters[name].default is inspect.Parameter.empty]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in known.items() if open_ended or name in parameters}
    if len(required) > 1:
        given |= {name: [value] for name, value in _columns(reference, required).items()}
    else:
        named = required or [name for name in columns if name in _REFERENCE_COLUMNS]
        given |= {name: [reference] for name in named}
    if open_ended:
        given |= {name: [reference] for name in _REFERENCE_COLUMNS if name not in given}
    rewards = _result(function(**given))
    if hasattr(rewards, "tolist"):  # an array or a tensor
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != 1:
        raise ValueError(f"a reward function returns a list with one reward for each completion, not {rewards!r:.80}")
    return rewards[0]


def _columns(reference: str, names: list[str]) -> dict[str, object]:
    try:
        row = json.loads(reference)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not set(names) <= set(row):
        raise ValueError(
            f"the function needs the columns {', '.join(names)}: the answer column has to hold a JSON object with them"
        )
    return {name: row[name] for name in names}


def _encode(value: object) -> str:
    text = json.dumps(value, default=_scalar)
    if len(text) > MAX_REPLY_BYTES:
        raise ValueError(f"returned {len(text)} bytes, more than {MAX_REPLY_BYTES}")
    return text


def _scalar(value: Any) -> object:
    """Return a numpy or torch scalar, or an array of one number, as a Python value; a fraction or decimal as float."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool | int | float | str | None):
        return plain
    if isinstance(plain, Real | Decimal):
        return float(plain)
    raise TypeError(f"returned a value of type {type(value).__name__}; return bools, numbers, text, lists or dicts")


def load(name: str) -> Callable[..., object]:
    """Import `package.module:function`, found in the current directory too, or `path/to/file.py:function`."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError("not of the form package.module:function or path/to/file.py:function")
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
        raise TypeError(f"{attribute} is of type {type(function).__name__}, which cannot be called")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.absolute()}")
    name = f"_verifier_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    sys.path.append(str(path.absolute().parent))  # the file can import modules beside it, as a program can
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _takes(function: Callable[..., object], number: int) -> bool:
    """Whether a function is known to take this number of arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):  # ValueError: some functions in C have no signature
        return False
    return True


def describe(error: BaseException) -> str:
    """Return an exception's type and message as one short line, even if its `str` raises."""
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
    """Whether finished calls still hold more than half of the memory that was free after loading."""
    bound = (at_start + memory_bytes) // 2
    if _data_bytes() <= bound:
        return False
    gc.collect()
    return _data_bytes() > bound
