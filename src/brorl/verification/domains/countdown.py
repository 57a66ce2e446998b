"""Verifier of the countdown puzzles.

A response is parsed as an expression of non-negative integers, + - * / and parentheses, and computed in exact rational
arithmetic. The verifier never calls `eval` and accepts no sign in front of a number, no other operator, no equation and
no text around the expression.
"""

import re
import time
from collections.abc import Sequence
from fractions import Fraction

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
    """Accepts an expression that uses every number exactly once and has the target as its value."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify pairs of a countdown prompt and a response, one after the other; see `verify`."""
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        """Verify one response; `extracted` is the expression without spaces.

        The reasons are `correct`, `wrong value 7`, `numbers used do not match`, `division by zero`, `not an
        expression`, `too long` and `too deep`.

        Raises:
            ValueError: If the prompt's reference is no countdown puzzle.
        """
        start = time.perf_counter()
        extracted, reason = _verify(CountdownPuzzle.from_reference(prompt.reference), response.strip(_SPACES))
        correct = reason == CORRECT
        return Verdict(correct, float(correct), extracted, reason, time.perf_counter() - start)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that are not countdown puzzles."""
        problem = "is not a countdown puzzle of ascending numbers and a target, such as '3 5 7 -> 22'"
        return {reference: problem for reference in references if not is_countdown_reference(reference)}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a solution, and the numbers joined by one operator."""
        del others  # the puzzle alone gives wrong answers
        puzzle = CountdownPuzzle.from_reference(reference)
        return TrialResponses(puzzle.solution or "", [sign.join(map(str, puzzle.numbers)) for sign in "+*-"])


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
