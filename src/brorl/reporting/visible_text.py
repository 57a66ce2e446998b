r"""Model output made safe to show: control characters are written out, such as `\x1b`.

In: any string. Out: a string that a terminal or a page shows literally, on one line if requested.
"""

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
    return "".join(c if c in kept else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    if unicodedata.category(character) not in _ACTING:
        return character
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    code = ord(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
