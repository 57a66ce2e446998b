"""A place in a list of tokens, and what every part of the grammar does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brorl.verification.domains.formula.expressions import Expression
from brorl.verification.domains.formula.forms import Form
from brorl.verification.domains.formula.tokens import END, Token, UnreadableError, written


class Cursor:
    """Moves through tokens; the classes below it read forms, which may be within each other."""

    listing: Callable[..., Form]  # what stands between brackets, up to the closing one
    bracketed: Callable[[], Form]  # a tuple, an interval, a set, or an expression in brackets
    sum: Callable[[], Form]
    product: Callable[[], Form]
    power: Callable[[], Form]  # a factor with its exponent
    exponent: Callable[[], Expression]
    mixed_number: Callable[[], Form]  # a factor, or a mixed number
    starts_factor: Callable[[Token], bool]  # whether a token goes on with a product without an operator
    starts_unit: Callable[[], bool]  # whether the rest of this item is a unit

    def __init__(self, tokens: Sequence[Token], has_units: bool = True) -> None:
        self.tokens, self.at, self.depth, self.bars = list(tokens), 0, 0, 0
        self.has_units = has_units

    def peek(self, ahead: int = 0) -> Token:
        """Return a token without taking it."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else END

    def take(self) -> Token:
        """Return the next token, and move after it."""
        token = self.peek()
        self.at += 1
        return token

    def accept(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these marks or commands."""
        return self.take() if self.peek().text in texts and self.peek().kind in ("mark", "command") else None

    def expect(self, *texts: str) -> Token:
        """Take the next token, which must be one of these."""
        token = self.accept(*texts)
        if token is None:
            raise UnreadableError(f"expected {' or '.join(texts)}, got {self.peek().text}")
        return token

    def braced(self) -> str:
        """Return what is written in a group of braces, without spaces."""
        self.expect("{")
        start, depth = self.at, 1
        while depth:
            token = self.take()
            if token is END:
                raise UnreadableError("a group does not close")
            depth += (token.text == "{") - (token.text == "}")
        return written(self.tokens[start : self.at - 1]).replace(" ", "")
