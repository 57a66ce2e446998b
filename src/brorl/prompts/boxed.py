r"""Finds the last complete `\boxed{...}` of a text, in time linear in its length; a box in a box is part of it."""

from __future__ import annotations

import re
from typing import NamedTuple

_MAX_BOXES = 6  # boxes that are tried; one that never closes takes a pass over the text after it
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
    r"""Return the last complete `\boxed{...}` or `\fbox{...}` that no other one contains; None if there is none."""
    found: Box | None = None
    start = len(text)
    for _ in range(_MAX_BOXES):
        start, opening = _opening_before(text, start)
        if start < 0:
            break
        closing = _closing_brace(text, opening) if text.startswith("{", opening) else None
        if closing is not None and (found is None or closing >= found.end):
            found = Box(start, closing + 1, text[opening + 1 : closing])
    return found


def _opening_before(text: str, end: int) -> tuple[int, int]:
    r"""Return where the last `\boxed` or `\fbox` before a place begins, and where its brace should be; -1 for none."""
    while (at := text.rfind("box", 0, end)) > 0:
        start = at - 1 if text.startswith("boxed", at) else at - 2
        if text[max(start, 0) : at] in ("\\", "\\f"):
            opening = at + (5 if start == at - 1 else 3)
            while opening < len(text) and text[opening].isspace():
                opening += 1
            return start, opening
        end = at
    return -1, -1


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
