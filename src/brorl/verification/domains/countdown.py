r"""Verifier of the countdown puzzles.

The answer is an expression of non-negative integers, + - * / and parentheses, which is computed in exact rational
arithmetic. It may be an equation, `22 = 3*5+7`: each side must have the target as its value, and one must use the
numbers. The answer is the whole response, or what a mark in it sets off: `<answer>`, a box, `the answer is`. It may
have the signs of LaTeX. The verifier never calls `eval` and accepts no sign in front of a number, no other operator and
no other text beside the answer.
"""

import re
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction

from brorl.prompts.countdown import CountdownPuzzle, is_countdown_reference
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, Verdict, verdict_of
from brorl.verification.domains.marked_answer import find_answer, writings
from brorl.verification.verifier import TrialResponses

_MAX_CHARACTERS = 256  # without surrounding space
_MAX_DEPTH = 32  # of nested parentheses
_SPACES = " \t\n\r"
# Digits of ASCII alone, and no leading zero.
_TEXT = re.compile(r"(?:[-+*/() \t\n\r]|(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9]))*")
_SYMBOL = re.compile(r"[0-9]+|[-+*/()]")
_OPERATORS = frozenset("+-*/")

_NO_EXPRESSION, _TOO_LONG = "not an expression", "too long"
_MAX_SIDES = 4  # of an equation, after the first
_READ = 2_000  # characters at the end of a response in which an answer is marked
_MARKER = re.compile(
    r"(?:(?:^|[.!\n])[ \t*_#>]*|, )(?:(?:so|thus|hence|therefore)\b,? ?)?(?:(?:the|my|one|a) )?"
    r"(?:(?:final|correct|possible) )?(?:(?:answer|solution|expression|equation|result)\b[*_]*(?: is\b|:| =)[*_:\s]*|"
    r"(?<=so )(?=[(\d])|(?<=so, )(?=[(\d])|(?<=thus, )(?=[(\d]))",
    re.IGNORECASE,
)
_WRITTEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\b(?:is )?equal(?:s| to)\b", "="),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|[\u00d7\u00b7\u22c5]|(?<=[\d)\s])[xX](?=[\d(\s])", "*"),
        (r"\\div(?![a-zA-Z])|\u00f7", "/"),
        (r"\u2212", "-"),
        (r"\\(?:left|right)(?=[()\[\]])", ""),
        (r"\\[,;:! ]", " "),
    )
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")  # the innermost
_MAX_FRACTIONS = 4  # within each other
_BRACKETS = str.maketrans("[]{}", "()()")


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
        return verdict_of(reason, extracted, time.perf_counter() - start)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find the references that are not countdown puzzles."""
        problem = "is not a countdown puzzle of ascending numbers and a target, such as '3 5 7 -> 22'"
        return {reference: problem for reference in references if not is_countdown_reference(reference)}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a solution, and the numbers joined by one operator."""
        del others  # the puzzle alone gives wrong answers
        puzzle = CountdownPuzzle.from_reference(reference)
        return TrialResponses(puzzle.solution or "", [sign.join(map(str, puzzle.numbers)) for sign in "+*-"])


def _verify(puzzle: CountdownPuzzle, response: str) -> tuple[str | None, str]:
    """Return the expression without spaces, None if there is none, and the reason."""
    found = _verify_expression(puzzle, response)
    if found not in ((None, _NO_EXPRESSION), (None, _TOO_LONG)):
        return found
    read = [_verify_equation(puzzle, form) for form in _answers(response)]
    return next((equation for equation in read if equation[0]), found)


def _verify_equation(puzzle: CountdownPuzzle, text: str) -> tuple[str | None, str]:
    """Verify a text of which each side is an expression, and one side is that of the answer."""
    sides = [side.strip(_SPACES) for side in text.split("=", maxsplit=_MAX_SIDES)]
    verified = [_verify_expression(puzzle, side) for side in sides]
    if any(extracted is None for extracted, _ in verified):
        return None, _NO_EXPRESSION
    right = next((side for side in verified if side[1] == CORRECT), verified[0])
    # The other sides are the target, or the expression after a step.
    same = all(_value(side) == puzzle.target for side in sides)
    return right if right[1] != CORRECT or same else (right[0], "an equation of other values")


def _answers(response: str) -> Iterator[str]:
    """Yield the text that a response marks as its answer, in plain notation, without one mark after the other."""
    found = find_answer(response)
    text = "" if found is None else found[-_READ:].strip(_SPACES)
    markers = list(_MARKER.finditer(text))
    head, _, line = text.rpartition("\n")
    text = text[markers[-1].end() :] if markers else line if head.rstrip(_SPACES).endswith(":") else text
    for form in writings(text):
        plain = form[: _MAX_CHARACTERS + 1]
        for pattern, written in _WRITTEN:
            plain = pattern.sub(written, plain)
        for _ in range(_MAX_FRACTIONS):
            plain = _FRACTION.sub(r"((\1)/(\2))", plain)
        yield plain.translate(_BRACKETS)


def _verify_expression(puzzle: CountdownPuzzle, text: str) -> tuple[str | None, str]:
    """Return the expression without spaces, None if the text is none, and the reason."""
    if len(text) > _MAX_CHARACTERS:
        return None, _TOO_LONG
    if not _TEXT.fullmatch(text):
        return None, _NO_EXPRESSION
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


def _value(text: str) -> Fraction | None:
    """Return the value of an expression, None if a text is none."""
    if len(text) > _MAX_CHARACTERS or not _TEXT.fullmatch(text):
        return None
    try:
        return _evaluate(_Parser(_SYMBOL.findall(text)).postfix)
    except (_NotAnExpressionError, ZeroDivisionError):
        return None


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
            raise _NotAnExpressionError(_NO_EXPRESSION)
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
