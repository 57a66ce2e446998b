"""The functions that a worker calls for mathematical answers, with a bound on their CPU time.

Only workers load this file: its alarm needs the main thread, and a value may take all memory that the worker has.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from brorl.verification.domains.formula.agreement import CORRECT, agree, is_readable

T = TypeVar("T")

_REFIRE_S = 0.1  # a bare `except` or a destructor may swallow the alarm's exception; it is then raised again


class _OverrunError(BaseException):
    """The time is up; not an Exception, which libraries catch in many places."""


def compare(reference: str, answer: str, limit_s: float, tolerance: float | None = None) -> dict[str, object]:
    """Compare an answer with its reference, which is LaTeX or plain text.

    Args:
        reference: The right answer.
        answer: The answer that was found in a response.
        limit_s: CPU time of this process for reading and comparing in seconds, above 0; C code may exceed it.
        tolerance: Accepted difference of two numbers, relative to the reference, above 0.

    Returns:
        `correct`, and a `reason`: `correct`, `wrong answer`, `no single answer`, `not parsed`, `reference not parsed`
        or `timeout`.
    """
    reason = _within(limit_s, lambda: agree(reference, answer, tolerance)) or "timeout"
    return {"correct": reason == CORRECT, "reason": reason}


def check(reference: str, limit_s: float) -> bool:
    """Whether a reference can be read, and has a value if it is no text."""
    return bool(_within(limit_s, lambda: is_readable(reference)))


def _within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return the value of a call, None if it does not end in time."""
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
