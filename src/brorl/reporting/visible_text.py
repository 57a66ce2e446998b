r"""Model output made safe to show: control characters are written out, such as `\x1b`."""

from __future__ import annotations

import unicodedata

_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, formats (directions, zero width), lone surrogates, separators


def visible_text(text: str, one_line: bool = False) -> str:
    r"""Return text with its control characters written out.

    Args:
        text: Any string.
        one_line: Write out line ends and tabs too, as `\n` and `\t`.
    """
    kept = "" if one_line else "\n\t"
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _ACTING and c not in kept else c for c in text
    )
