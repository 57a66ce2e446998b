"""Errors that a user can fix: one line that says what was expected, what came, and what to do."""


class UserError(Exception):
    """Something the user gave does not work; the message names the fix and is shown without a traceback.

    Attributes:
        exit_code: Exit code of the command; 2 for what is found before any work, 1 for what stops a run.
    """

    exit_code = 2


class StorageError(UserError):
    """The disk did not take what had to be written; what was there before is intact."""

    exit_code = 1


class DivergedError(UserError, FloatingPointError):
    """The loss or its gradient is not finite any more."""

    exit_code = 1


class OutOfMemoryError(UserError, MemoryError):
    """A memory limit does not hold the least that is needed."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without a full stop; its type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
