"""Calls tools in a worker, where the user's code runs. The pool limits its time and memory.

An environment's state is a function of its row and the calls so far, so any worker can make any call: it continues from
a copy of an object it has kept, or it replays all calls.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from brorl.tools.calls import Failure
from brorl.verification.sandbox.inside.calling import result
from brorl.verification.sandbox.inside.functions import describe, scalar

Outcome = tuple[str, Failure | None]  # a result's text, and why the call failed
Step = Sequence[str]  # a method call: the name, and the arguments as JSON
_MAX_KEPT = 64
_kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()  # (class, row, steps) -> object after the steps


def call(function: Callable[..., object], arguments: str, max_characters: int, seeded: bool) -> Outcome:
    """Call a function with arguments from a JSON object. `seeded` makes its random numbers repeatable."""
    seed(arguments if seeded else None)
    return outcome(function, json.loads(arguments), max_characters)


def outcome(function: Callable[..., object], arguments: dict[str, Any], max_characters: int) -> Outcome:
    """Return a function's result as text, or its exception. A coroutine is run to completion."""
    try:
        value = result(function(**arguments))
    except MemoryError:  # ends the process
        raise
    except BaseException as error:  # includes SystemExit
        return readable(f"error: {describe(error)}", max_characters), Failure.RAISED
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=scalar)
    except MemoryError:
        raise
    except Exception as error:
        return f"error: the result cannot be written as text: {describe(error)}", Failure.NOT_TEXT
    return readable(text, max_characters), None


def readable(text: str, max_characters: int) -> str:
    """Truncate text, and replace lone surrogates, which tokenizers cannot read."""
    return text[:max_characters].encode("utf-8", "replace").decode()


def seed(text: str | None) -> None:
    """Seed the generators of Python and NumPy, which earlier calls may have used; None seeds them from the system."""
    random.seed(text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None if text is None else crc32(text.encode("utf-8", "replace")))


def observe(factory: Callable[[], Any], row: str) -> str:
    """Return the text that an environment's reset returns for a row (a JSON object); empty if it returns None."""
    columns = json.loads(row)
    if not isinstance(columns, dict):
        raise TypeError("the reference answer is not a row")
    game = factory()
    seed(row)
    text = result(game.reset(**columns))
    if not isinstance(text, str | None):
        raise TypeError(f"reset returned {type(text).__name__}, not text or None")
    return readable(text or "", len(text or ""))


def step(factory: Callable[[], Any], row: str, before: Sequence[Step], call: Step, max_characters: int) -> Outcome:
    """Call an environment's method after a reset and earlier steps."""
    try:
        game = _played(factory, row, before)
        name, arguments = call
        method = getattr(game, name)
    except MemoryError:
        raise
    except BaseException as error:
        return readable(f"error: {describe(error)}", max_characters), Failure.RAISED
    steps = [*before, call]
    _seed_step(row, steps)
    answer = outcome(method, json.loads(arguments), max_characters)
    _keep(factory, row, steps, game)
    return answer


def reward(factory: Callable[[], Any], row: str, steps: Sequence[Step]) -> object:
    """Return an environment's reward after a reset and steps."""
    game = _played(factory, row, steps)
    _seed_step(row, [*steps, ("get_reward", "")])
    return result(game.get_reward())


def _played(factory: Callable[[], Any], row: str, steps: Sequence[Step]) -> Any:
    """Return an environment after a reset and steps. The caller may modify it."""
    for num_kept in range(len(steps), -1, -1):
        key = _key(factory, row, steps[:num_kept])
        if key in _kept and (game := _copy(_kept[key])) is not None:
            _kept.move_to_end(key)
            break
    else:
        num_kept = 0
        game = factory()
        seed(row)
        result(game.reset(**json.loads(row)))
    for i in range(num_kept, len(steps)):
        name, arguments = steps[i]
        _seed_step(row, steps[: i + 1])
        outcome(getattr(game, name), json.loads(arguments), 0)
    _keep(factory, row, steps, game)
    return game


def _keep(factory: Callable[[], Any], row: str, steps: Sequence[Step], game: object) -> None:
    """Keep a copy of an environment. If there are too many copies, drop the least recently used one."""
    key = _key(factory, row, steps)
    if key not in _kept and (copied := _copy(game)) is not None:
        _kept[key] = copied
        if len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)


def _copy(game: Any) -> Any:
    """Return a copy of an object; None if it cannot be copied."""
    try:
        return copy.deepcopy(game)
    except MemoryError:
        raise
    except Exception:
        return None


def _key(factory: Callable[[], Any], row: str, steps: Sequence[Step]) -> tuple[object, ...]:
    return (factory, row, *map(tuple, steps))


def _seed_step(row: str, steps: Sequence[Step]) -> None:
    """Seed a step's random numbers from the transcript, so that a copy and a replay draw the same ones."""
    seed(json.dumps([row, *steps]))
