r"""Finds the last complete `\boxed{...}` of a text, in time linear in its length."""

from __future__ import annotations

import re

_MAX_BOXES = 4  # open boxes that never close: each takes a pass over the text after it
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
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
                return text[opening + 1 : closing]
        end = start
    return None


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for match in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None
