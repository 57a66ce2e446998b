"""Errors that a user can fix: one line says what was expected, what was found, and what to do.

Messages name arguments and settings, whose names are the same in a shell, in Python and in a recipe.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

CLOSED = 1  # exit code of a command whose output was closed, as by `| head`; rich uses the same code
STOPPED = 130  # exit code of a command that Ctrl-C, SIGTERM or SIGHUP stopped


class UserError(Exception):
    """An error that the user can fix. Its message names the fix and is printed without a traceback.

    Attributes:
        exit_code: Exit code of the command: 2 for an error before the work starts, 1 for an error that ends a run.
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
    """A verifier has failed on every response so far, so all of them would count as incorrect."""

    exit_code = 1


class ToolError(UserError):
    """A tool has failed on every call so far, or infrastructure failures kept a call from running."""

    exit_code = 1


class LearnerLostError(UserError):
    """A process of the learner died or stalled; the run can resume from its last checkpoint."""

    exit_code = 1


class EngineLostError(UserError):
    """The sampling engine died; the run can resume from its last checkpoint."""

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
    """Return `; did you mean NAME?` with the closest name; empty if no name is close.

    A name is close if its spelling or the start of its last part is similar: `rolouts` for `rollouts_per_prompt`.
    """
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        stem = word.lstrip("-")
        begins = {name.lstrip("-").rpartition(".")[2][: len(stem)]: name for name in reversed([*names])}
        close = [begins[begin] for begin in difflib.get_close_matches(stem, begins, n=1, cutoff=0.75)]
    return f"; did you mean {close[0]}?" if close else ""


def option(name: str, value: object = None) -> str:
    """Format an argument for a message: `jobs` or `jobs=4`, which a shell spells `--jobs=4`."""
    argument = name.replace("-", "_")
    return f"`{argument}`" if value is None else f"`{argument}={value}`"


def source_setting(key: str, value: object = None) -> str:
    """Format a data source's setting for a message: `path`, or `domain: math`."""
    return f"`{key}`" if value is None else f"`{key}: {value}`"
