r"""Finds the last complete `\boxed{...}` of a text, in time linear in its length."""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_BOXES = 4  # open boxes that never close: each takes a pass over the text after it
_OPEN = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    """A box in a text."""

    start: int  # place of its backslash
    end: int  # place after its closing brace
    content: str  # what is in it


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    box = find_last_box(text)
    return box.content if box else None


def find_last_box(text: str) -> Box | None:
    r"""Return the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    end = len(text)
    for _ in range(_MAX_BOXES):
        start = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        if start < 0:
            return None
        opening = start + (6 if text.startswith(r"\boxed", start) else 5)
        while opening < len(text) and text[opening].isspace():
            opening += 1
        if text.startswith("{", opening):
            closing = _closing_brace(text, opening)
            if closing is not None:
                return Box(start, closing + 1, text[opening + 1 : closing])
        end = start
    return None


def has_open_box(text: str) -> bool:
    r"""Whether a box begins in a text; one that has no complete box was cut off."""
    return _OPEN.search(text) is not None


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for match in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None
