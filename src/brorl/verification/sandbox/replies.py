"""The limits of what a program is asked, its reply, and the ways in which it can end.

Nothing here knows the right answer: expected values stay with the judge, and never enter a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brorl.verification.sandbox.inside import program

REPLY_BYTES = 1 << 12
"""Output limit of a request whose reply contains no value, or a short one; the text of any failure fits in."""


class LostError(Exception):
    """An infrastructure failure: something other than the program ended or stopped it. The message names it."""


class Fault(StrEnum):
    """The end of a program other than an exception: the beginning of the text of a failure.

    `exited` and `killed by signal` are followed by more words: `exited with code 3`, `killed by signal 11`.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = program.OUT_OF_MEMORY
    TOO_MUCH_OUTPUT = program.TOO_MUCH_OUTPUT
    TOO_MANY_THREADS = program.TOO_MANY_THREADS
    BROKE_PROTOCOL = "broke the protocol of the sandbox"
    EXITED = program.EXITED
    KILLED = "killed by signal"


def fault_of(failure: str) -> Fault | None:
    """Return the fault that the text of a failure names; None for an exception and for a value that is not plain.

    The program may have written the text: a fault of that name is a failure too.
    """
    return next((fault for fault in Fault if failure == fault or failure.startswith(f"{fault} ")), None)


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    # Wall time. Time in which the program waited for a core of a busy machine does not count, up to ten times the
    # limit.
    seconds: float = 4.0
    # memory of the program; after a load, also of later calls
    memory_bytes: int = 1 << 29
    # Size of its output, or of the text of a returned value. A longer text is not read.
    output_bytes: int = 1 << 20
    # Parts of the text of a returned value, see `values.Size`. A text of more is not decoded: each takes this process
    # up to 10 microseconds. None for as many as the text has room for.
    output_parts: int | None = None


@dataclass(frozen=True)
class Reply:
    """A program has run or has been loaded, or a call has ended."""

    # The output of a whole program, also of one that failed, decoded as UTF-8 with replacement. The value that a
    # function returned, of builtin types. None after loading and after a failed call.
    value: Any
    # A `Fault`, such as `timeout` or `exited with code 3`, or the last line of an uncaught exception; of a call also
    # `exited inside the call` and `returned no plain value`. None after a normal end.
    failure: str | None
    # wall time without that in which others had its core, and with that in which this process reads the value
    seconds: float


@dataclass(frozen=True)
class Undecided:
    """The decision that could not be reached because of an infrastructure failure, not of the response: unverified."""

    reason: str  # for example `a worker was lost`


class JudgeTimeout(Undecided):
    """The time of the batch was over, and the programs of the judge had used their part of it: a time-out."""
