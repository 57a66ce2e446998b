"""Errors of the commands, and advice in their results, in the words of Python: keyword arguments and no options.

Commands to run in a shell stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from brorl.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_ARGUMENTS = {"from": "checkpoint"}  # options whose argument has another name
_WORDS = "seconds|samples|unique_tokens|steps|cpu|wall|native|vllm|cuda"
_NUMBER = r"\d[\d,.]*e[+-]?\d+|\d[\d,]*\.\d+|\d[\d,]*\d|\d"
_VALUE = rf"""[\w.]+=[^\s;)]+ | '[^']*' | \d+x\w+ | (?:{_NUMBER})(?![\w/]) | \.\.\. | null\b | (?:{_WORDS})\b
    | [A-Z]+\b(?!') | [\w.~-]*/[^\s,;:)]*[^\s,;:).]"""
_PARTS = re.compile(
    rf"""brorl\ [a-z]+\ [^;()]*                                     # a command
    | (?<![\w-])--(?P<option>[a-z][\w-]*(?:\.\w+)*)(?:[ =](?P<value>{_VALUE}))?""",
    re.VERBOSE,
)


def with_python_words(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of `brorl` whose errors and results name its arguments."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = function(*args, **kwargs)
        except UserError as error:
            error.args = (in_python(str(error)),)
            raise
        if callable(getattr(type(result), "words", None)):
            object.__setattr__(result, "words", in_python)
        return result

    call.__module__ = "brorl"  # where it is found, also by pickle
    return call


def in_python(message: str) -> str:
    """Return a message with `budget=600` instead of `--budget 600`, and `budget` instead of `--budget`."""
    return _PARTS.sub(_argument, message)


def _argument(part: re.Match[str]) -> str:
    if not part["option"]:
        return part[0]
    name, value = part["option"].replace("-", "_"), part["value"]
    name = _ARGUMENTS.get(name, name)
    if value is None:
        return name
    section, _, setting = name.rpartition(".")
    text = _python_value(value)
    return f"{section}={{'{setting}': {text}}}" if section else f"{name}={text}"


def _python_value(value: str) -> str:
    """Return the value of an option as Python writes it; placeholders such as FILE stay."""
    if re.fullmatch(_NUMBER, value):
        return value.replace(",", "")
    if value == "null":
        return "None"
    name, equals, values = value.partition("=")
    if equals:
        return f"{{'{name}': [{values.replace(',', ', ')}]}}"
    is_text = re.fullmatch(rf"{_WORDS}|.*/.*|\d+x\w+", value)
    return repr(value) if is_text else value
