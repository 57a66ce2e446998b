"""Verifier of the countdown puzzles.

In: a prompt whose reference is a `CountdownPuzzle`, and a response. Out: a verdict, by parsing the
response as an expression of non-negative integers, + - * / and parentheses, and computing it in
exact rational arithmetic. It never calls `eval`, accepts no sign in front of a number, no other
operator, no equation and no text around the expression.
"""

import time
from collections.abc import Sequence
from fractions import Fraction

from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.prompt import Prompt
from brorl.verify.verifier import Verdict

_DIGITS = frozenset("0123456789")  # str.isdigit would also take digits of other scripts
_SPACES = " \t\n\r"


class CountdownVerifier:
    """Judges expressions: correct if every number is used exactly once and the value is the target.

    Args:
        max_characters: Longest response that is parsed, without surrounding space, 1 to 10,000.
        max_depth: Deepest nesting of parentheses that is parsed, 0 to 100.

    Raises:
        ValueError: If a bound is outside of its range.
    """

    def __init__(self, max_characters: int = 256, max_depth: int = 32) -> None:
        if not 1 <= max_characters <= 10_000:
            raise ValueError(f"max_characters must be 1 to 10000, got {max_characters}")
        if not 0 <= max_depth <= 100:
            raise ValueError(f"max_depth must be 0 to 100, got {max_depth}")
        self._max_characters = max_characters
        self._max_depth = max_depth

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Judge pairs of a countdown prompt and a response, one after the other; see `verify`."""
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        """Judge one response.

        Args:
            prompt: A countdown prompt.
            response: Any string.

        Returns:
            A verdict with the reason `correct`, `wrong value 7`, `numbers used do not match`,
            `division by zero`, `not an expression`, `too long` or `too deep`; `extracted` is the
            expression without spaces.

        Raises:
            ValueError: If the prompt's reference is no countdown puzzle.
        """
        start = time.perf_counter()
        puzzle = CountdownPuzzle.from_reference(prompt.reference)
        extracted, reason = self._judge(puzzle, response)
        correct = reason == "correct"
        return Verdict(correct, float(correct), extracted, reason, time.perf_counter() - start)

    def _judge(self, puzzle: CountdownPuzzle, response: str) -> tuple[str | None, str]:
        text = response.strip(_SPACES)
        if len(text) > self._max_characters:
            return None, "too long"
        try:
            expression = _Expression(text, self._max_depth)
        except _NotAnExpressionError as error:
            return None, str(error)
        extracted = "".join(expression.symbols)
        # Compared as written, before any arithmetic: the values stay as small as the puzzle's
        # numbers make them.
        if sorted(expression.numbers) != sorted(map(str, puzzle.numbers)):
            return extracted, "numbers used do not match"
        try:
            value = _evaluate(expression.postfix)
        except ZeroDivisionError:
            return extracted, "division by zero"
        return extracted, "correct" if value == puzzle.target else f"wrong value {value}"


class _NotAnExpressionError(Exception):
    """The text is outside of the grammar; the message is the verdict's reason."""


class _Expression:
    """A parsed text: its symbols in order, its numbers as written, and its postfix form.

    Grammar: sum = product {(+|-) product}; product = atom {(*|/) atom}; atom = number | "(" sum
    ")"; a number has no leading zero.
    """

    def __init__(self, text: str, max_depth: int) -> None:
        self.symbols = _symbols(text)
        self.postfix: list[str] = []
        self._position = 0
        self._sum(max_depth)
        if self._position != len(self.symbols):
            raise _NotAnExpressionError("not an expression")

    @property
    def numbers(self) -> list[str]:
        return [symbol for symbol in self.postfix if symbol[0] in _DIGITS]

    def _sum(self, depth_left: int) -> None:
        self._product(depth_left)
        while (operator := self._peek()) in ("+", "-"):
            self._position += 1
            self._product(depth_left)
            self.postfix.append(operator)

    def _product(self, depth_left: int) -> None:
        self._atom(depth_left)
        while (operator := self._peek()) in ("*", "/"):
            self._position += 1
            self._atom(depth_left)
            self.postfix.append(operator)

    def _atom(self, depth_left: int) -> None:
        symbol = self._peek()
        self._position += 1
        if symbol == "(":
            if depth_left == 0:
                raise _NotAnExpressionError("too deep")
            self._sum(depth_left - 1)
            if self._peek() != ")":
                raise _NotAnExpressionError("not an expression")
            self._position += 1
        elif symbol and symbol[0] in _DIGITS:
            self.postfix.append(symbol)
        else:
            raise _NotAnExpressionError("not an expression")

    def _peek(self) -> str:
        return self.symbols[self._position] if self._position < len(self.symbols) else ""


def _symbols(text: str) -> list[str]:
    symbols: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        end = position + 1
        if character in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if character == "0" and end - position > 1:
                raise _NotAnExpressionError("not an expression")
            symbols.append(text[position:end])
        elif character in "+-*/()":
            symbols.append(character)
        elif character not in _SPACES:
            raise _NotAnExpressionError("not an expression")
        position = end
    return symbols


def _evaluate(postfix: list[str]) -> Fraction:
    stack: list[Fraction] = []
    for symbol in postfix:
        if symbol[0] in _DIGITS:
            stack.append(Fraction(int(symbol)))
            continue
        right, left = stack.pop(), stack.pop()
        match symbol:
            case "+":
                stack.append(left + right)
            case "-":
                stack.append(left - right)
            case "*":
                stack.append(left * right)
            case _:
                stack.append(left / right)
    return stack.pop()
