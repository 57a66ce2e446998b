"""Names of what a user can change, in the words of that user, for errors and advice.

An argument is an option on the command line and a keyword in Python. A setting of a source of data has its own name
where the source is in a recipe, and another one where the source is an argument of the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

SourceWords: TypeAlias = Callable[[str, object], str]  # of the key of a setting and a value or None
_ARGUMENTS = {"from": "checkpoint"}  # options whose argument has another name
_in_shell = False


def in_recipe(key: str, value: object) -> str:
    """Return a setting of a source in a recipe."""
    return f"data.sources[].{key}" if value is None else f"data.sources[].{key}: {value}"


_source_words: SourceWords = in_recipe


@contextmanager
def shell_words() -> Iterator[None]:
    """Name options instead of arguments in the block: it is a command that was called from a shell."""
    global _in_shell
    before, _in_shell = _in_shell, True
    try:
        yield
    finally:
        _in_shell = before


def option(name: str, value: object = None) -> str:
    """Return an argument with a value: `--budget 600` in a shell, `budget=600` in Python; without one, its name.

    The name is that of the option without its dashes. A value in capitals such as `FILE` is a placeholder, and
    `KEY=V,V` one of a mapping to lists.
    """
    if _in_shell:
        return f"--{name}" if value is None else f"--{name} {shlex.quote(str(value))}"
    section, _, argument = name.replace("-", "_").rpartition(".")
    argument = _ARGUMENTS.get(argument, argument)
    if value is None:
        return f"{section}.{argument}" if section else argument
    text = _python_value(str(value)) if isinstance(value, str | Path) else value
    return f"{section}={{'{argument}': {text}}}" if section else f"{argument}={text}"


def _python_value(text: str) -> str:
    key, equals, values = text.partition("=")
    if text.replace(",", "").replace(".", "", 1).isdecimal():
        return text.replace(",", "")
    if not text.isupper():
        return repr(text)
    return f"{{'{key}': [{values.replace(',', ', ')}]}}" if equals else text


@contextmanager
def source_words(words: SourceWords) -> Iterator[None]:
    """Name the settings of a source of data by a function of their key, and of a value or None, in the block."""
    global _source_words
    before, _source_words = _source_words, words
    try:
        yield
    finally:
        _source_words = before


def of_source(key: str, value: object = None) -> str:
    """Return a setting of a source of data, with a value: `data.sources[].path` in a recipe, for `path`."""
    return _source_words(key, value)
