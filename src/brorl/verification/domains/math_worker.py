"""The functions that a worker calls for mathematical answers, with a bound on their CPU time.

Only workers load this file: its alarm needs the main thread, and a value may take all memory that the worker has.
"""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import TypeVar

from brorl.verification.domains.formula.agreement import agree, is_readable

T = TypeVar("T")

_REFIRE_S = 0.1  # a bare `except` or a destructor may swallow the alarm's exception; it is then raised again


class _OverrunError(BaseException):
    """The time is up; not an Exception, which libraries catch in many places."""


def compare(pairs: Sequence[tuple[str, str, float | None]], limit_s: float) -> list[str]:
    """Return the reason of the verdict on each reference, answer and tolerance, as `agree` does, or `timeout`.

    The limit is CPU time of this process for each of them in seconds, above 0; C code may exceed it.
    """
    return [_within(limit_s, partial(agree, *pair)) or "timeout" for pair in pairs]


def are_readable(references: Sequence[str], limit_s: float) -> list[bool]:
    """Whether each reference can be read within the CPU time, and has a value if it is no text."""
    return [bool(_within(limit_s, partial(is_readable, reference))) for reference in references]


def _within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return the value of a call; None if it does not end in time."""
    try:
        signal.signal(signal.SIGPROF, _ring)
        signal.setitimer(signal.ITIMER_PROF, limit_s, _REFIRE_S)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OverrunError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm went off again before it was stopped
        return None


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise _OverrunError
