"""Verifier of the countdown puzzles.

In: prompts whose reference is a `CountdownPuzzle`, and responses. Out: verdicts. A response is parsed as an expression
of non-negative integers, + - * / and parentheses, and computed in exact rational arithmetic. The verifier never calls
`eval` and accepts no sign in front of a number, no other operator, no equation and no text around the expression.
"""

import re
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from brorl.prompts.countdown import CountdownPuzzle, is_countdown_reference
from brorl.prompts.prompt import Prompt
from brorl.verification.verifier import CORRECT, TrialResponses, Verdict

_MAX_CHARACTERS = 256  # without surrounding space
_MAX_DEPTH = 32  # of nested parentheses
_SPACES = " \t\n\r"
# Digits of ASCII alone, and no leading zero.
_TEXT = re.compile(r"(?:[-+*/() \t\n\r]|(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9]))*")
_SYMBOL = re.compile(r"[0-9]+|[-+*/()]")
_OPERATORS = frozenset("+-*/")


class CountdownVerifier:
    """Accepts an expression that uses every number exactly once and has the target as its value.

    Args:
        with_answers: Add the canonical form of the expression to verdicts of correct responses.
    """

    def __init__(self, with_answers: bool = False) -> None:
        self._with_answers = with_answers

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify pairs of a countdown prompt and a response, one after the other; see `verify`."""
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        """Verify one response.

        Args:
            prompt: A countdown prompt.
            response: Any string.

        Returns:
            A verdict with the reason `correct`, `wrong value 7`, `numbers used do not match`, `division by zero`, `not
            an expression`, `too long` or `too deep`; `extracted` is the expression without spaces.

        Raises:
            ValueError: If the prompt's reference is no countdown puzzle.
        """
        start = time.perf_counter()
        extracted, reason = _verify(CountdownPuzzle.from_reference(prompt.reference), response.strip(_SPACES))
        correct = reason == CORRECT
        answer = canonical_form(extracted) if correct and extracted and self._with_answers else None
        return Verdict(correct, float(correct), extracted, reason, time.perf_counter() - start, answer)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that are no countdown puzzles."""
        problem = "is not a countdown puzzle of ascending numbers and a target, such as '3 5 7 -> 22'"
        return {reference: problem for reference in references if not is_countdown_reference(reference)}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a solution, and the numbers joined by one operator."""
        del others  # the puzzle alone gives wrong answers
        puzzle = CountdownPuzzle.from_reference(reference)
        return TrialResponses(puzzle.solution or "", [sign.join(map(str, puzzle.numbers)) for sign in "+*-"])


def canonical_form(expression: str) -> str:
    """Return the form that all notations of one computation share; it is an expression of the same value.

    a - b is read as a + (-b), and a / b as a * (1/b). Sums and products then lose their order and their grouping:
    `7-(5-3)`, `3+7-5` and `(7 - 5) + 3` become `3+7-5`. Distributivity, signs within a product, and numbers without
    an effect are not simplified: `2*3+2*4` and `2*(3+4)`, `(2-3)*(4-5)` and `(3-2)*(5-4)`, `6*1` and `6/1` differ.

    Args:
        expression: An expression that the verifier accepts.
    """
    stack: list[_Form] = []
    for symbol in _Parser(_SYMBOL.findall(expression)).postfix:
        if symbol in _OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append(_joined(left, symbol, right))
        else:
            stack.append(_Form("", (symbol,), ()))
    return stack.pop().text


class _Form(NamedTuple):
    """A sum, a product or a number: the canonical forms of its parts, sorted.

    Attributes:
        kind: "+" for a sum, "*" for a product, "" for a number.
        direct: Terms that are added, or factors.
        inverse: Terms that are subtracted, or divisors.
    """

    kind: str
    direct: tuple[str, ...]
    inverse: tuple[str, ...]

    @property
    def text(self) -> str:
        inverse_sign = "-" if self.kind == "+" else "/"
        return self.kind.join(self.direct) + "".join(inverse_sign + part for part in self.inverse)


def _joined(left: _Form, sign: str, right: _Form) -> _Form:
    """Return the form of `left sign right`; an operand of the same kind is merged into it."""
    kind = "+" if sign in "+-" else "*"
    direct, inverse = _parts(left, kind)
    more, less = _parts(right, kind)
    if sign in "-/":
        more, less = less, more
    return _Form(kind, tuple(sorted(direct + more)), tuple(sorted(inverse + less)))


def _parts(form: _Form, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if form.kind == kind:
        return form.direct, form.inverse
    return (f"({form.text})" if form.kind == "+" else form.text,), ()


def _verify(puzzle: CountdownPuzzle, text: str) -> tuple[str | None, str]:
    """Return the expression without spaces, None if there is none, and the reason."""
    if len(text) > _MAX_CHARACTERS:
        return None, "too long"
    if not _TEXT.fullmatch(text):
        return None, "not an expression"
    symbols = _SYMBOL.findall(text)
    try:
        postfix = _Parser(symbols).postfix
    except _NotAnExpressionError as error:
        return None, str(error)
    extracted = "".join(symbols)
    # The numbers are compared as text before any arithmetic, which keeps all values small.
    if sorted(symbol for symbol in symbols if symbol.isdigit()) != sorted(map(str, puzzle.numbers)):
        return extracted, "numbers used do not match"
    try:
        value = _evaluate(postfix)
    except ZeroDivisionError:
        return extracted, "division by zero"
    return extracted, CORRECT if value == puzzle.target else f"wrong value {value}"


class _NotAnExpressionError(Exception):
    """The text is outside of the grammar; the message is the verdict's reason."""


class _Parser:
    """The postfix form of an expression.

    Grammar: sum = product {(+|-) product}; product = atom {(*|/) atom}; atom = number | "(" sum ")".
    """

    def __init__(self, symbols: Sequence[str]) -> None:
        self.postfix: list[str] = []
        self._left = ["", *reversed(symbols)]
        self._sum(_MAX_DEPTH)
        self._expect("")

    def _sum(self, depth_left: int) -> None:
        self._product(depth_left)
        while (sign := self._left[-1]) in ("+", "-"):
            self._left.pop()
            self._product(depth_left)
            self.postfix.append(sign)

    def _product(self, depth_left: int) -> None:
        self._atom(depth_left)
        while (sign := self._left[-1]) in ("*", "/"):
            self._left.pop()
            self._atom(depth_left)
            self.postfix.append(sign)

    def _atom(self, depth_left: int) -> None:
        if self._left[-1].isdigit():
            self.postfix.append(self._left.pop())
            return
        self._expect("(")
        if depth_left == 0:
            raise _NotAnExpressionError("too deep")
        self._sum(depth_left - 1)
        self._expect(")")

    def _expect(self, symbol: str) -> None:
        if self._left[-1] != symbol:
            raise _NotAnExpressionError("not an expression")
        self._left.pop()


def _evaluate(postfix: Sequence[str]) -> Fraction:
    """Compute the value with numerators and denominators, which takes a third of the time of fractions."""
    stack: list[tuple[int, int]] = []
    for symbol in postfix:
        if symbol not in _OPERATORS:
            stack.append((int(symbol), 1))
            continue
        (c, d), (a, b) = stack.pop(), stack.pop()
        match symbol:
            case "+":
                stack.append((a * d + c * b, b * d))
            case "-":
                stack.append((a * d - c * b, b * d))
            case "*":
                stack.append((a * c, b * d))
            case _:
                if not c:
                    raise ZeroDivisionError
                stack.append((a * d, b * c))
    return Fraction(*stack.pop())
