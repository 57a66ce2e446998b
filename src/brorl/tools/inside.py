"""Calls tools in a worker, where the code of the user runs. The pool bounds its time and memory.

The state of an environment is a function of its row and the calls so far, so that any worker can make any call: it
continues a copy of an object that it has kept, or plays all calls again.
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

Outcome = tuple[str, Failure | None]  # a text of a result, and why the call has none
Step = Sequence[str]  # a call of a method: its name, and its arguments as JSON
_MAX_KEPT = 64
_kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()  # (class, row, steps) -> object after the steps


def call(function: Callable[..., object], arguments: str, max_characters: int, seeded: bool) -> Outcome:
    """Call a function with arguments as a JSON object; `seeded` makes a call that draws random numbers repeatable."""
    seed(arguments if seeded else None)
    return outcome(function, json.loads(arguments), max_characters)


def outcome(function: Callable[..., object], arguments: dict[str, Any], max_characters: int) -> Outcome:
    """Return what a function returns as text, or its exception. A coroutine is run to its end."""
    try:
        value = result(function(**arguments))
    except MemoryError:  # ends the process
        raise
    except BaseException as error:  # also a SystemExit
        return readable(f"error: {describe(error)}", max_characters), Failure.RAISED
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=scalar)
    except MemoryError:
        raise
    except Exception as error:
        return f"error: the result cannot be written as text: {describe(error)}", Failure.NOT_TEXT
    return readable(text, max_characters), None


def readable(text: str, max_characters: int) -> str:
    """Return the first characters of a text, without lone surrogates, which no tokenizer reads."""
    return text[:max_characters].encode("utf-8", "replace").decode()


def seed(text: str | None) -> None:
    """Seed the random numbers of Python and NumPy: other calls in this process have drawn some. None for new ones."""
    random.seed(text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None if text is None else crc32(text.encode("utf-8", "replace")))


def observe(factory: Callable[[], Any], row: str) -> str:
    """Return what an environment says when it is reset with a row, a JSON object; empty if it says nothing."""
    columns = json.loads(row)
    if not isinstance(columns, dict):
        raise TypeError("the reference answer is not a row")
    game = factory()
    seed(row)
    said = result(game.reset(**columns))
    if not isinstance(said, str | None):
        raise TypeError(f"reset returned {type(said).__name__}, not text or None")
    return readable(said or "", len(said or ""))


def step(factory: Callable[[], Any], row: str, before: Sequence[Step], call: Step, max_characters: int) -> Outcome:
    """Call a method of an environment after a reset and earlier steps."""
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
    found = outcome(method, json.loads(arguments), max_characters)
    _keep(factory, row, steps, game)
    return found


def reward(factory: Callable[[], Any], row: str, steps: Sequence[Step]) -> object:
    """Return the reward of an environment after a reset and steps."""
    game = _played(factory, row, steps)
    _seed_step(row, [*steps, ("get_reward", "")])
    return result(game.get_reward())


def _played(factory: Callable[[], Any], row: str, steps: Sequence[Step]) -> Any:
    """Return an object after a reset and steps, which the caller may change."""
    for done in range(len(steps), -1, -1):
        key = _key(factory, row, steps[:done])
        if key in _kept and (game := _copy(_kept[key])) is not None:
            _kept.move_to_end(key)
            break
    else:
        done, game = 0, factory()
        seed(row)
        result(game.reset(**json.loads(row)))
    for number in range(done, len(steps)):
        name, arguments = steps[number]
        _seed_step(row, steps[: number + 1])
        outcome(getattr(game, name), json.loads(arguments), 0)
    _keep(factory, row, steps, game)
    return game


def _keep(factory: Callable[[], Any], row: str, steps: Sequence[Step], game: object) -> None:
    """Keep a copy of an object, instead of the one that was used longest ago."""
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
    """Seed the random numbers of a step by the transcript: a copy and a replay then draw the same ones."""
    seed(json.dumps([row, *steps]))
