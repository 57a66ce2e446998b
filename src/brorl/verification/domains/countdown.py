r"""Verifier for countdown puzzles: reads integers, + - * / and parentheses, and computes with exact fractions.

    `3 5 7 -> 22`: accepts `3*5+7` and the equation `22 = 3*5+7`

Each side of an equation must equal the target, and one side must use the numbers. The verifier never evaluates a
response as code. It rejects signs before numbers, other operators and any other text.
"""

import operator
import re
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

from brorl.prompts.countdown import CountdownPuzzle, is_countdown_reference
from brorl.prompts.prompt import Prompt
from brorl.verdict import CORRECT, Verdict, verdict_of
from brorl.verification.domains.marked_answer import find_answer, writings
from brorl.verification.verifier import TrialResponses

_MAX_CHARACTERS = 256  # longest expression, not counting surrounding space
_MAX_DEPTH = 32  # nested parentheses
_SPACES = " \t\n\r"
# ASCII digits only, without leading zeros.
_TEXT = re.compile(r"(?:[-+*/() \t\n\r]|(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9]))*")
_SYMBOL, _NUMBER = re.compile(r"[0-9]+|[-+*/()]"), re.compile(r"[0-9]+")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_BINDS = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}  # operator precedence; evaluation stops at an open bracket
# Two adjacent operators or operands, an empty bracket, a sign before a number.
_MALFORMED = re.compile(r"[-+*/(]\s*(?:[-+*/)]|$)|^\s*(?:[-+*/)]|$)|[\d)]\s*\(|\)\s*\d|\d\s+\d")

_NO_EXPRESSION, _TOO_LONG, _TOO_DEEP = "not an expression", "too long", "too deep"
_MAX_SIDES = 4  # sides of an equation after the first
_READ = 2_000  # characters read from the end of a response to find its marked answer
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
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")  # an innermost \frac
_MAX_FRACTIONS = 4  # nested \frac
_BRACKETS = str.maketrans("[]{}", "()()")


class CountdownVerifier:
    """Accepts an expression that uses every number exactly once and equals the target."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify (countdown prompt, response) pairs one by one. See `verify`."""
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        """Verify one response. `extracted` is the expression without spaces.

        The reasons are `correct`, `wrong value 7`, `numbers used do not match`, `division by zero`, `not an
        expression`, `different values in the equation`, `too long` and `too deep`.

        Raises:
            ValueError: If the prompt is not a countdown puzzle.
        """
        start = time.perf_counter()
        extracted, reason = _verify(CountdownPuzzle.from_reference(prompt.reference), response.strip(_SPACES))
        return verdict_of(reason, extracted, time.perf_counter() - start)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that are not countdown puzzles."""
        problem = "is not a countdown puzzle with ascending numbers and a target, such as '3 5 7 -> 22'"
        return {reference: problem for reference in references if not is_countdown_reference(reference)}

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return a solution, and the numbers joined by one operator."""
        del others  # wrong answers come from the puzzle itself
        puzzle = CountdownPuzzle.from_reference(reference)
        return TrialResponses(puzzle.solution or "", [sign.join(map(str, puzzle.numbers)) for sign in "+*-"])


def _verify(puzzle: CountdownPuzzle, response: str) -> tuple[str | None, str]:
    """Return (expression without spaces, reason). The expression is None if none is found."""
    verified = _verify_expression(puzzle, response)
    if verified not in ((None, _NO_EXPRESSION), (None, _TOO_LONG)):
        return verified
    equations = [_verify_equation(puzzle, form) for form in _answers(response)]
    return next((equation for equation in equations if equation[0]), verified)


def _verify_equation(puzzle: CountdownPuzzle, text: str) -> tuple[str | None, str]:
    """Verify an equation with the answer on one of its sides."""
    sides = [side.strip(_SPACES) for side in text.split("=", maxsplit=_MAX_SIDES)]
    verified = [_verify_expression(puzzle, side) for side in sides]
    if any(extracted is None for extracted, _ in verified):
        return None, _NO_EXPRESSION
    right = next((side for side in verified if side[1] == CORRECT), verified[0])
    # The other sides are the target or later steps in evaluating the expression.
    same = all(_value(side) == puzzle.target for side in sides)
    return right if right[1] != CORRECT or same else (right[0], "different values in the equation")


def _answers(response: str) -> Iterator[str]:
    """Yield a response's marked answer in plain notation, first as is, then with its marks removed."""
    text = (find_answer(response) or "")[-_READ:].strip(_SPACES)
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
    """Return (expression without spaces, reason). The expression is None if the text is not an expression."""
    value = _value(text)
    if value in (_NO_EXPRESSION, _TOO_LONG, _TOO_DEEP):
        return None, str(value)
    extracted = "".join(_SYMBOL.findall(text))
    if sorted(_NUMBER.findall(text)) != sorted(map(str, puzzle.numbers)):
        return extracted, "numbers used do not match"
    if isinstance(value, str):
        return extracted, value
    return extracted, CORRECT if value == puzzle.target else f"wrong value {value}"


def _value(text: str) -> Fraction | str:
    """Return the value of an expression, or the reason it has none."""
    if len(text) > _MAX_CHARACTERS:
        return _TOO_LONG
    if not _TEXT.fullmatch(text):
        return _NO_EXPRESSION
    depths = [0, *accumulate(1 if symbol == "(" else -1 for symbol in re.findall(r"[()]", text))]
    if max(depths) > _MAX_DEPTH:
        return _TOO_DEEP
    if min(depths) < 0 or depths[-1] or _MALFORMED.search(text):
        return _NO_EXPRESSION
    try:
        return _evaluate(_SYMBOL.findall(text))
    except ZeroDivisionError:
        return "division by zero"


def _evaluate(symbols: Sequence[str]) -> Fraction:
    """Return the value of a well-formed expression.

    Values and operators wait on two stacks until an operator of equal or lower precedence arrives.
    """
    values: list[Fraction] = []
    waiting = ["("]

    def apply(binds: int) -> None:
        while _BINDS[waiting[-1]] >= binds:
            right = values.pop()
            values[-1] = Fraction(_OPERATORS[waiting.pop()](values[-1], right))

    for symbol in [*symbols, ")"]:
        if symbol == "(":
            waiting.append(symbol)
        elif symbol == ")":
            apply(1)
            waiting.pop()
        elif symbol in _OPERATORS:
            apply(_BINDS[symbol])
            waiting.append(symbol)
        else:
            values.append(Fraction(symbol))
    return values[0]
