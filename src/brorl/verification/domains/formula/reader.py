r"""A position in an answer's tokens that moves from left to right.

A position is a token and a character in it, because a name may be a run of letters (`ab`, `xsin`), and TeX takes a
single digit as an argument (`\frac12`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from brorl.verification.domains.formula.expressions import FUNCTIONS, INTEGER_FUNCTIONS
from brorl.verification.domains.formula.tokens import END, Token, UnreadableError, closing_brace, word_list, written

FUNCTION_NAMES = frozenset(FUNCTIONS) | frozenset(INTEGER_FUNCTIONS) | {"log"}
CONSTANT_NAMES = {"pi": "\\pi", "infinity": "\\infty", "inf": "\\infty", "infty": "\\infty"}
WORDS_OF_FORMULAS = FUNCTION_NAMES | CONSTANT_NAMES.keys()
_APART = word_list("Re Im abs lg sec max min sign floor ceil")  # never joined to letters: `secx` is s times e ...
_GLUED = sorted({"pi", *FUNCTION_NAMES}.difference(_APART), key=len, reverse=True)
_LETTER = re.compile("|".join([*_GLUED, "."]))  # a letter of a name, or a function or constant joined to letters


class TokenReader:
    """Takes tokens one by one."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tuple(tokens)
        self.at = 0  # the next token
        self.taken = 0  # characters already taken from that token

    def peek(self, ahead: int = 0) -> Token:
        """Return a token without taking it. For a partly taken name, return its next letter."""
        try:
            token = self.tokens[self.at + ahead]
        except IndexError:
            return END
        return token if ahead or not self.taken else _rest_of(token, self.taken)

    def take(self, length: int | None = None) -> Token:
        """Take the next token, or its first `length` characters."""
        token = self.peek()
        if token is END:
            raise UnreadableError("the text ends too early")
        if length is not None:
            token = token._replace(text=token.text[:length])
        self.taken += len(token.text)
        if self.taken == len(self.tokens[self.at].text):
            self.at += 1
            self.taken = 0
        return token

    def take_letter(self) -> Token:
        """Take a letter, or the name of a function or constant; UnreadableError for a word that belongs in text."""
        token = self.peek()
        if len(token.text) == 1 or token.text in WORDS_OF_FORMULAS:
            return self.take()
        if token.is_upright or token.text in ("AM", "PM"):
            raise UnreadableError("words in a formula")
        return self.take(len(_first_letter(token.text)))

    def accept(self, *texts: str) -> Token | None:
        """Take the next token if it is one of these marks or commands."""
        token = self.peek()
        return self.take() if token.text in texts and token.kind in ("mark", "command") else None

    def expect(self, *texts: str) -> Token:
        """Take the next token, which must be one of these marks or commands."""
        token = self.accept(*texts)
        if token is None:
            raise UnreadableError(f"expected {' or '.join(texts)}, got {self.peek().text}")
        return token

    def is_after(self, text: str) -> bool:
        """Return whether this token was the last one taken."""
        return self.at > 0 and self.tokens[self.at - 1].text == text

    def outside_brackets(self, most: int | None = None) -> Iterator[tuple[int, Token]]:
        """Yield (index, token) from here on, skipping tokens inside any brackets opened along the way."""
        depth = 0
        for at in range(self.at, len(self.tokens) if most is None else min(self.at + most, len(self.tokens))):
            text = self.tokens[at].text
            if depth == 0:
                yield at, self.tokens[at]
            depth += (text in ("{", "(", "[", "\\{")) - (text in ("}", ")", "]", "\\}"))

    def raw(self, whole: bool = False) -> str:
        """Take a brace group or one character (with `whole`, one token), and return its text without spaces."""
        token = self.peek()
        if token.text == "{":
            start = self.at + 1
            end = closing_brace(self.tokens, self.at)
            if end is None:
                raise UnreadableError("a group does not close")
            self.at = end + 1
            return written(self.tokens[start:end]).replace(" ", "")
        if token.kind == "mark" and not whole:
            raise UnreadableError("no subscript")
        return self.take(None if whole or token.kind == "command" else 1).text


@lru_cache(maxsize=4096)
def _rest_of(token: Token, taken: int) -> Token:
    """Return the rest of a token after the characters taken."""
    rest = token.text[taken:]
    return Token(token.kind, _first_letter(rest) if token.kind == "name" else rest)


def _first_letter(name: str) -> str:
    match = _LETTER.match(name)
    assert match is not None
    return match[0]
