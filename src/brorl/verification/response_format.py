"""The format of a response: a pattern for its whole text."""

from __future__ import annotations

import regex

_TIMEOUT_S = 0.5  # a pattern can take exponential time on some texts


def has_format(text: str, pattern: str) -> bool:
    """Return whether a pattern of the package `regex` matches the whole stripped text within half a second."""
    try:
        return regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=_TIMEOUT_S) is not None
    except TimeoutError:
        return False
