"""The functions of math-verify that a worker calls, with a bound on their CPU time.

`single_answer` rejects what is not one value. math-verify reads the rest as LaTeX, all of it or nothing. Two verdicts
of math-verify are corrected: numbers below a thousandth agree if they differ by at most half a unit of the third digit
(math-verify compares six decimals, or ignores a difference of 1e-15), and `II` is no number (it is i times i there)
unless the reference is complex. Only workers load this file: it needs the main thread, and math-verify may take all
memory that the worker has.
"""

import functools
import logging
import signal
from cmath import isfinite
from collections.abc import Callable
from dataclasses import replace
from math import floor, log10
from types import FrameType
from typing import Any, TypeVar

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, FiniteSet, I, Interval, Mul, Tuple, preorder_traversal

from brorl.verification.domains.single_answer import (
    SEVERAL_ANSWERS,
    as_interval,
    has_order,
    is_several,
    plain,
    sides_of,
    without_unit,
    words,
)

T = TypeVar("T")

_SMALL = 1e-3  # below, rounding to six decimals leaves fewer than three digits
_HALF_UNIT = 0.5 * (1 + 1e-9)  # of the third digit; the rest is the error of a double
# Units are removed here, and text that is not LaTeX has no value: math-verify on its own ignores what it cannot read.
_LATEX = LatexExtractionConfig()
_LATEX = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))
_REFIRE_S = 0.1  # a bare `except` or a destructor may swallow the alarm's exception; it is then raised again

logging.disable(logging.CRITICAL)


class _OverrunError(BaseException):
    """The time is up; not an Exception, which SymPy catches in many places."""


def compare(reference: str, answer: str, limit_s: float, tolerance: float | None = None) -> dict[str, object]:
    """Compare an answer with its reference, which is LaTeX or plain text.

    Args:
        reference: The right answer.
        answer: The answer that was found in a response.
        limit_s: CPU time of this process for parsing and comparing in seconds, above 0; C code may exceed it.
        tolerance: Accepted difference of two numbers, relative to the reference, above 0.

    Returns:
        `correct`, and a `reason`: `correct`, `wrong answer`, `no single answer`, `not parsed`, `reference not parsed`
        or `timeout`.
    """
    reason = _within(limit_s, lambda: _compare(reference, answer, tolerance)) or "timeout"
    return {"correct": reason == "correct", "reason": reason}


def _number(parsed: list[Any]) -> complex | None:
    """Return the value of the first expression without variables, None if there is none or it is not finite."""
    return next((_value(part) for part in parsed if isinstance(part, Expr) and part.is_number), None)


def _value(expression: Expr) -> complex | None:
    try:
        value = complex(expression.evalf(20))
    except (TypeError, ValueError, OverflowError):
        return None
    return value if isfinite(value) else None


def _first_value(parsed: list[Any]) -> Any:
    """Return the first expression, of an equation its right side; None if there is none."""
    part = next((part for part in parsed if not isinstance(part, str)), None)
    return part.rhs if isinstance(part, Eq) else part


def _values(parsed: list[Any]) -> list[complex]:
    """Return the numbers of the first expression: of a number, of the right side of an equation, or of its elements."""
    part = _first_value(parsed)
    parts = part.args if isinstance(part, FiniteSet | Interval | Tuple) else [part]
    values = [_value(part) for part in parts if isinstance(part, Expr) and part.is_number]
    return sorted((value for value in values if value is not None), key=lambda value: (value.real, value.imag))


def _small_numbers_differ(right: list[complex], given: list[complex]) -> bool:
    """Whether numbers that math-verify rounds to few digits or none differ by more than rounding to three digits."""
    return len(right) == len(given) and any(
        0 < abs(value) < _SMALL and not _agree_in_three_digits(value, other)
        for value, other in zip(right, given, strict=True)
    )


def _agree_in_three_digits(value: complex, other: complex) -> bool:
    """Whether two numbers other than 0 differ by at most half a unit of the third digit of the smaller one."""
    smaller = min(abs(value), abs(other))
    return smaller > 0 and abs(other - value) <= _HALF_UNIT * 10.0 ** (floor(log10(smaller)) - 2)


def _is_rounded(gold: list[Any], given: list[Any]) -> bool:
    """Whether plain numbers below a thousandth agree in three digits; six decimals may separate them."""
    right, answer = _number(gold), _number(given)
    if right is None or answer is None:
        return False
    return 0 < abs(right) < _SMALL and _agree_in_three_digits(right, answer)


def _multiplies_letters(parsed: list[Any]) -> bool:
    """Whether an expression has the letters `II`, which math-verify reads as i times i."""
    part = _first_value(parsed)
    return part is not None and any(
        isinstance(node, Mul) and node.args.count(I) > 1 for node in preorder_traversal(part)
    )


def _is_complex(parsed: list[Any]) -> bool:
    """Whether a number is complex: it has the imaginary unit, or the letter i and no other one."""
    parts = [part for part in parsed if not isinstance(part, str)]
    return any(part.has(I) or (_letters_i(part) and len(part.free_symbols) == 1) for part in parts)


def check(reference: str, limit_s: float) -> bool:
    """Whether a reference can be parsed, and its expressions (not its text) agree with themselves."""

    def agrees_with_itself() -> bool:
        expressions = [part for part in _read_reference(reference)[1] if not isinstance(part, str)]
        return bool(verify(expressions, expressions, timeout_seconds=None))

    return bool(_within(limit_s, agrees_with_itself))


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


def _compare(reference: str, answer: str, tolerance: float | None) -> str:
    """Return the reason of the verdict; two numbers may differ by a tolerance, if there is one."""
    right, gold = _read_reference(reference)
    if not gold:
        return "reference not parsed"
    answer = plain(answer)
    if is_several(right, answer):
        return SEVERAL_ANSWERS
    if words(right) == words(answer) != "":
        return "correct"
    given = _given(right, gold, answer)
    if not given:
        return "not parsed" if given is None else "wrong answer"
    if tolerance is not None:
        value, number = _number(gold), _number(given)
        if value is not None and number is not None and not any(map(_multiplies_letters, (gold, given))):
            return "correct" if abs(number - value) <= tolerance * abs(value) else "wrong answer"
    # Text before expressions (both lists have the other order): equal texts need no algebra.
    if not verify(gold[::-1], given[::-1], timeout_seconds=None) and not _is_rounded(gold, given):
        return "wrong answer"
    for letters, other in ((given, gold), (gold, given)):
        if _multiplies_letters(letters) and not _is_complex(other):
            return "wrong answer"
    return "wrong answer" if _small_numbers_differ(_values(gold), _values(given)) else "correct"


def _given(right: str, gold: list[Any], answer: str) -> list[Any] | None:
    """Return an answer as math-verify reads it: of an equation the side that counts. It is empty if sides differ."""
    is_number = not any(isinstance(part, Expr) and part.free_symbols for part in gold)
    is_equation = len(sides_of(right)) > 1
    sides = [without_unit(side, is_number) for side in sides_of(answer)]
    if len(sides) > 1:
        read = [_parse(side) for side in sides]
        is_complex = _is_complex(gold)
        numbers = [parsed for parsed in read if _number(parsed) is not None and _is_complex(parsed) <= is_complex]
        if any(not verify(numbers[0], other, timeout_seconds=None) for other in numbers[1:]):
            return []
        if not is_equation:
            return numbers[-1] if numbers else read[-1]
    text = "=".join(sides)
    if not has_order(right):
        text = as_interval(text) or text
    given = _parse(text)
    return _imaginary(given) if _is_complex(gold) else given


@functools.lru_cache(maxsize=4096)
def _read_reference(reference: str) -> tuple[str, list[Any]]:
    """Return a reference in plain notation, and as math-verify reads it."""
    text = plain(reference)
    gold = _parse("=".join(without_unit(side, is_number=False) for side in sides_of(text)))
    return text, _imaginary(gold) if _is_complex(gold) else gold


def _parse(text: str) -> list[Any]:
    return list(parse(f"${text}$", extraction_config=[_LATEX], parsing_timeout=None))


def _imaginary(parsed: list[Any]) -> list[Any]:
    """Read the letter i as the imaginary unit."""
    return [part if isinstance(part, str) else part.subs(dict.fromkeys(_letters_i(part), I)) for part in parsed]


def _letters_i(part: Any) -> list[Any]:
    return [symbol for symbol in part.free_symbols if symbol.name == "i"]


compare(r"\frac{1}{2}", "0.5", 60.0)  # math-verify loads parts at its first use, outside of the time of a call
