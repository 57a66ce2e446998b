"""What a worker does with mathematical answers: asks math-verify, with a bound on its time.

In: a reference and an answer. Out: whether they agree, or why that cannot be told. Only workers load this file: it
needs the main thread, and math-verify may take any memory that its caller allows.
"""

import functools
import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from math_verify import parse, verify

T = TypeVar("T")

_REFIRE_S = 0.1  # the alarm's exception may be swallowed by a bare `except` or a destructor; it then comes again

logging.disable(logging.CRITICAL)


class _OverrunError(BaseException):
    """The time is up; not an Exception, which SymPy catches in many places."""


def judge(reference: str, answer: str, limit_s: float) -> dict[str, object]:
    """Compare an answer with its reference.

    Args:
        reference: The right answer, as LaTeX or plain text.
        answer: The answer that was found in a response.
        limit_s: Time of this process's cores for parsing and comparing in seconds, above 0: what others do on the
            machine does not change a verdict. C code may overrun it.

    Returns:
        `correct`, and a `reason`: `correct`, `wrong answer`, `not parsed`, `reference not parsed` or `timeout`.
    """
    reason = _within(limit_s, lambda: _compare(reference, answer)) or "timeout"
    return {"correct": reason == "correct", "reason": reason}


def check(reference: str, limit_s: float) -> bool:
    """Whether a reference can be parsed and agrees with itself, other than as text."""

    def agrees_with_itself() -> bool:
        expressions = [part for part in _parse_reference(reference) if not isinstance(part, str)]
        return bool(verify(expressions, expressions, timeout_seconds=None))

    return bool(_within(limit_s, agrees_with_itself))


def _within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return what a call returns, None if it does not end in time."""
    try:
        signal.signal(signal.SIGPROF, _ring)
        signal.setitimer(signal.ITIMER_PROF, limit_s, _REFIRE_S)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OverrunError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # it rang again before it was switched off
        return None


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise _OverrunError


def _compare(reference: str, answer: str) -> str:
    gold = _parse_reference(reference)
    if not gold:
        return "reference not parsed"
    given = _parse(answer)
    if not given:
        return "not parsed"
    # Text before expressions, which both lists hold in the other order: equal texts need no algebra.
    return "correct" if verify(gold[::-1], given[::-1], timeout_seconds=None) else "wrong answer"


@functools.lru_cache(maxsize=4096)
def _parse_reference(reference: str) -> list[Any]:
    return _parse(reference)


def _parse(text: str) -> list[Any]:
    # As one formula, so that math-verify extracts nothing else; it ignores dollar signs within a formula.
    formula = " ".join(text.replace("\\$", "").replace("$", "").split())
    return list(parse(f"${formula}$", parsing_timeout=None))


judge(r"\frac{1}{2}", "0.5", 60.0)  # what math-verify only loads at its first use is not a job's time
