r"""Decides whether an answer agrees with its reference: `x = 0.5` with `\frac{1}{2}`, but not `[0, 1]` with `(0, 1)`.

A string with a comma between digits can have two readings (`decimal_commas`). `comparison` compares the parsed forms.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from types import FrameType

from brorl.prompts.decimal_commas import has_decimal_comma, with_points
from brorl.verification.domains.formula.comparison import FormComparison
from brorl.verification.domains.formula.expressions import Bracketed, Listing, Relation, Text, variables
from brorl.verification.domains.formula.grammar import read
from brorl.verification.domains.formula.normal import have_other_units
from brorl.verification.domains.formula.values import IMAGINARY

CORRECT, WRONG, SEVERAL, OTHER_UNIT = "correct", "wrong answer", "no single answer", "different unit"
NOT_EVALUATED = "not evaluated"
UNREAD, UNREAD_REFERENCE = "not parsed", "reference not parsed"
_SPACE = re.compile(r"\\[,;! ]|[\s$]")
_CHOICE = re.compile(  # `\\textbf{(B)}\\ 12`
    r"\\(?:text(?:bf|rm|sf|it)?|mathrm|mathbf|mbox) ?\{ ?\(([A-J])\)(?:\\?[ ~])*\}(?:\\[ ,;:]|\\q?quad\b|[ ~:])*"
    r"([^ ].*)",
    re.DOTALL,
)
_REFIRE_S = 0.1  # the alarm repeats, because a bare `except` or a destructor may swallow its exception


class _OverrunError(BaseException):
    """Time is up. Not an Exception, because libraries catch those in many places."""


def agree_each(pairs: Sequence[tuple[str, str, float | None]], limit_s: float) -> list[str]:
    """Return the reason from `agree`, or `timeout`, for each (reference, answer, tolerance).

    Only workers call this, because the alarm needs the main thread. Each comparison may take `limit_s` (above 0) of CPU
    time, which C code may exceed.
    """
    return [str(_within(limit_s, partial(agree, *pair)) or "timeout") for pair in pairs]


def are_readable(references: Sequence[str], limit_s: float) -> list[bool]:
    """Return whether each reference can be read within the CPU time limit and, unless it is a `Text`, has a value."""
    return [bool(_within(limit_s, partial(is_readable, reference))) for reference in references]


def _within(limit_s: float, call: Callable[[], object]) -> object:
    """Return a call's value; None if it does not finish in time."""
    try:
        signal.signal(signal.SIGPROF, _ring)
        signal.setitimer(signal.ITIMER_PROF, limit_s, _REFIRE_S)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OverrunError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the alarm fired again before it was stopped
        return None


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise _OverrunError


def agree(reference: str, answer: str, tolerance: float | None = None) -> str:
    """Return the verdict's reason for an answer. Reference and answer are LaTeX or plain text.

    `tolerance` is the accepted difference between two measured numbers, relative to the reference. It is at least a
    millionth, unless both numbers are whole. With None, decimals are compared to the digits given. A string with a
    comma between digits may have two readings; either may agree, unless the reference is clearly one number.
    """
    if choice := _choice_of(reference):
        return _agree_with_choice(*choice, answer, tolerance)
    if has_decimal_comma(reference) and _SPACE.sub("", reference) != _SPACE.sub("", answer):
        reference = with_points(reference) or reference
    reasons = (_agree(*pair, tolerance) for pair in product(_readings(reference), _readings(answer)))
    first = next(reasons)
    return CORRECT if first == CORRECT or CORRECT in reasons else first


def _readings(text: str) -> list[str]:
    """Return the string, and its decimal-comma reading if it has one."""
    reading = with_points(text)
    return [text] if reading is None else [text, reading]


def _agree(reference: str, answer: str, tolerance: float | None) -> str:
    """Return the verdict's reason for one reading of each string."""
    reference_form, answer_form = read(reference), read(answer)
    if isinstance(reference_form, Text) and not any(map(str.isalnum, reference_form.words)):
        return UNREAD_REFERENCE
    names = variables(reference_form)
    is_complex = IMAGINARY in names and "j" not in names
    is_complex = is_complex or (not names and variables(answer_form) == {IMAGINARY})
    exact_tolerance = None if tolerance is None else Fraction(tolerance)
    if FormComparison(is_complex, exact_tolerance, must_evaluate=True).agrees(reference_form, answer_form):
        return CORRECT
    if FormComparison(is_complex, exact_tolerance).agrees(reference_form, answer_form):
        return NOT_EVALUATED
    if isinstance(answer_form, Text) and not isinstance(reference_form, Text):
        return UNREAD
    if tolerance is not None and have_other_units(reference_form, answer_form):
        return OTHER_UNIT
    several = isinstance(answer_form, Listing) and not isinstance(reference_form, Listing | Bracketed)
    return SEVERAL if several or isinstance(answer_form, Relation) else WRONG


def _choice_of(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and the value after it; None for any other string."""
    match = _CHOICE.fullmatch(text)
    return (match[1], match[2]) if match else None


def _agree_with_choice(letter: str, value: str, answer: str, tolerance: float | None) -> str:
    """Return the verdict's reason if the reference is a choice with its value: for `(B) 12`, `B` or `12` is correct."""
    if choice := _choice_of(answer):
        reasons = [agree(letter, choice[0]), agree(value, choice[1], tolerance)]
        return next((reason for reason in reasons if reason != CORRECT), CORRECT)
    return CORRECT if agree(letter, answer) == CORRECT else agree(value, answer, tolerance)


def is_readable(reference: str) -> bool:
    """Return whether any answer can agree with a reference: it must have a value, or be words or balanced notation."""
    if choice := _choice_of(reference):
        return is_readable(choice[1])
    form = read(reference)
    if isinstance(form, Text):
        is_balanced = all(reference.count(a) == reference.count(b) for a, b in ("{}", ("\\begin", "\\end")))
        return is_balanced and any(map(str.isalnum, form.words))
    return FormComparison(False, None).agrees(form, form)
