"""The format of a response: a pattern for its whole text.

In: text. Out: whether it matches. A pattern can take exponential time on some texts, so each match has a time limit. A
text that reaches the limit does not match.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import regex

_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class ResponseFormat:
    """A regular expression for whole responses.

    Attributes:
        pattern: In the syntax of the package `regex`, an extension of `re`; a dot matches line ends too.

    Raises:
        ValueError: If it is not a regular expression.
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            _ = self._compiled
        except regex.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from error

    @cached_property
    def _compiled(self) -> regex.Pattern[str]:
        return regex.compile(self.pattern, regex.DOTALL)

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches; white space around it is ignored."""
        try:
            return self._compiled.fullmatch(text.strip(), timeout=_TIMEOUT_S) is not None
        except TimeoutError:
            return False
