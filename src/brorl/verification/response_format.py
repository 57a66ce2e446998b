"""The format of a response: a pattern for its whole text."""

from __future__ import annotations

import regex

_TIMEOUT_S = 0.5  # a pattern can take exponential time on some texts


def has_format(text: str, pattern: str) -> bool:
    """Return whether a regular expression matches the whole text; white space around it is ignored.

    Args:
        text: The text of a response. One that takes longer than half a second does not match.
        pattern: In the syntax of the package `regex`, an extension of `re`; a dot matches line ends too.
    """
    try:
        return regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=_TIMEOUT_S) is not None
    except TimeoutError:
        return False
