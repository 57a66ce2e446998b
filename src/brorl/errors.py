"""Errors that a user can fix. One line says what was expected, what came, and what to do, in the user's own words.

An argument is an option on the command line and a keyword in Python. A setting of a data source has one name in a
recipe, and another name where the source is an argument of the command.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

CLOSED = 1  # exit code of a command whose output was closed, as by `| head`; rich uses the same code
STOPPED = 130  # exit code of a command that Ctrl-C, SIGTERM or SIGHUP stopped


class UserError(Exception):
    """An error that the user can fix. Its message names the fix and is printed without a traceback.

    Attributes:
        exit_code: Exit code of the command: 2 for an error before the work starts, 1 for one that ends a run.
    """

    exit_code = 2


class StorageError(UserError):
    """A file could not be written; its earlier content is intact."""

    exit_code = 1


class DivergedError(UserError, FloatingPointError):
    """The logits, the loss or its gradient are no longer finite."""

    exit_code = 1


class OutOfMemoryError(UserError, MemoryError):
    """The memory limit is below the minimum that the work needs."""

    exit_code = 1


class UnverifiedResponsesError(UserError):
    """Most responses could not be verified because of infrastructure failures."""

    exit_code = 1


class BrokenVerifierError(UserError):
    """A verifier has failed on every response so far, so that all of them would count as incorrect."""

    exit_code = 1


class ToolError(UserError):
    """A tool has failed on every call so far, or infrastructure failures kept a call from running."""

    exit_code = 1


class LearnerLostError(UserError):
    """A process of the learner died or stalled; the run can continue from its last checkpoint."""

    exit_code = 1


class EngineLostError(UserError):
    """The engine that samples has died; the run can continue from its last checkpoint."""

    exit_code = 1


class FirstRankError(UserError):
    """Rank 0 of the learner failed; raised on the other ranks, with the error and the machine of rank 0."""


class WorkersLostError(UserError):
    """Worker processes of a cluster were lost more often than the settings allow."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without its period, or the exception's type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def nearest(word: str, names: Collection[str]) -> str:
    """Suggest the nearest name, as `; did you mean NAME?`; empty if no name is near.

    A name is near if its spelling or the start of its last part is similar: `rolouts` for `rollouts_per_prompt`.
    """
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        stem = word.lstrip("-")
        begins = {name.lstrip("-").rpartition(".")[2][: len(stem)]: name for name in reversed([*names])}
        close = [begins[begin] for begin in difflib.get_close_matches(stem, begins, n=1, cutoff=0.75)]
    return f"; did you mean {close[0]}?" if close else ""


SourceWords: TypeAlias = Callable[[str, object], str]  # takes the key of a setting, and a value or None
_ARGUMENTS = {"from": "checkpoint"}  # option -> argument, where the names differ
_in_shell = False


def in_recipe(key: str, value: object) -> str:
    """Name a setting of a source as a recipe does."""
    return f"data.sources[].{key}" if value is None else f"data.sources[].{key}: {value}"


_source_words: SourceWords = in_recipe


@contextmanager
def shell_words() -> Iterator[None]:
    """Name options instead of arguments inside the block, which runs a command of a shell."""
    global _in_shell
    before, _in_shell = _in_shell, True
    try:
        yield
    finally:
        _in_shell = before


def option(name: str, value: object = None) -> str:
    """Return an argument as the user writes it: `--budget 600` in a shell, `budget=600` in Python.

    `name` is the option without its dashes. A value in capitals such as `FILE` is a placeholder; `KEY=V,V` stands for
    a mapping to lists.
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
    """Inside the block, `words(key, value)` names the settings of a source of data."""
    global _source_words
    before, _source_words = _source_words, words
    try:
        yield
    finally:
        _source_words = before


def of_source(key: str, value: object = None) -> str:
    """Return the name of a source's setting, with a value if one is given: in a recipe `data.sources[].path`."""
    return _source_words(key, value)
