"""Calls tools in a worker, where the code of the user runs. The pool bounds its time and memory."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

from brorl.tools.calls import Failure
from brorl.verification.sandbox.inside.calling import result
from brorl.verification.sandbox.inside.functions import describe, scalar

Outcome = tuple[str, Failure | None]  # a text of a result, and why the call has none


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
