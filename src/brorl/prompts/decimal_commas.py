r"""Distinguishes decimal commas from lists and thousands: `32,5` is 32.5, `32, 5` a list, and `32,500` a whole number.

A comma directly between two digits may be a decimal comma, unless

- it groups thousands: one to three digits without a leading zero, then groups of three (`1,234`),
- it is one of several in a row (`1,2,3`), or
- it is inside brackets, where it separates items (`(2,5)`), unless `;` separates them: `(2,5; 3,5)`.

On its own, such a string is ambiguous: `2,5` is 2.5, or 2 and 5. It is certainly a decimal if the list would look odd
because its numbers do not ascend (`32,5`) or one begins with 0 (`3,05`). The column's other values decide the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

_COMMA = re.compile(
    r"(?<![\d.,])(?<!\d\s)(?<!_\{)(?P<whole>\d{1,3}(?:\.\d{3})+|\d+)(?P<mark>,|\{,\})(?P<part>\d+)(?![\d,]|\{,\}|\.\d)"
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,|\{,\})\d{3}")
_DOTTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])")  # `1.234.567`
_BRACKET = re.compile(r"\\[{}]|[()\[\];]")
_NAMED = re.compile(r"[A-Za-z]\w*\s*=\s*|[-+\s$]|\N{MINUS SIGN}")
_SEVERAL = re.compile(r"\d,\s+-?\d|\d,-|\d,\d+,\d(?!\d\d(?!\d))")
_POINT = re.compile(r"(?<![\d.])\d+\.(?!\d{3}(?!\d))\d+(?![\d.])|(?<![\d.])0\.\d+")

_MAX_COMMAS = 40  # strings with more commas are left unchanged

Reading = Literal["decimal", "list"]


class ColumnReading(NamedTuple):
    """How to read the commas between digits in a column."""

    reading: Reading | None  # None if the column's values do not decide
    num_texts: int  # number of values with such a comma
    example: str

    def write(self, text: str) -> str:
        """Rewrite a value of the column unambiguously: `32,5` -> `32.5`, or `32, 5` for a list."""
        if self.reading is None:
            return text
        mark = "." if self.reading == "decimal" else ", "
        return _replaced(text, mark, thousands=self.reading == "decimal") or text


def column_reading(texts: Sequence[str]) -> ColumnReading | None:
    """Return how to read a column's commas; None if no value has a possible decimal comma.

    One certain decimal decides, unless other values have decimal points, or are lists with spaces or of three items.
    """
    with_comma = [text for text in texts if "," in text and with_points(text) is not None]
    if not with_comma:
        return None
    are_lists = any(_SEVERAL.search(text) or _POINT.search(text) for text in texts)
    are_decimals = any(map(has_decimal_comma, with_comma))
    reading: Reading | None = None if are_lists == are_decimals else "list" if are_lists else "decimal"
    return ColumnReading(reading, len(with_comma), next(filter(has_decimal_comma, with_comma), with_comma[0]))


def comma_line(commas: ColumnReading) -> str:
    """Return a line that explains how the commas in a column's answers are read."""
    answers, example = f"the commas in {commas.num_texts:,} answers", f"such as {commas.example[:60]!r}"
    if commas.reading is None:
        return f"{answers}, {example}, can be decimal commas or separate two numbers: write 2.5, or 2, 5 with a space"
    read = f"{answers} are read as {'decimal commas' if commas.reading == 'decimal' else 'list separators'}"
    return f"{read}: {commas.example[:60]!r} is {commas.write(commas.example)[:60]}"


def with_points(text: str) -> str | None:
    """Replace possible decimal commas with points: `x = 2,5` -> `x = 2.5`. Return None if there are none."""
    if text.count(",") > _MAX_COMMAS:
        return None
    if "," not in text:
        return _without_dots(text) if text.count(".") > 1 else None
    return _replaced(text, ".", thousands=False)


def has_decimal_comma(text: str) -> bool:
    """Return whether a string is certainly one number with a decimal comma: `32,5`, `1.234,5`, but not `2,5`."""
    match = _COMMA.search(text) if "," in text else None
    if match is None or text.count(",") > 1 or _is_in_brackets(text, match.start()):
        return False
    if _NAMED.sub("", text[: match.start()]) or _THOUSANDS.fullmatch(match[0]):
        return False
    whole, decimals = match["whole"], match["part"]
    is_odd = "." in whole or match["mark"] != "," or decimals.startswith("0") or (whole[0] == "0" and len(whole) > 1)
    return is_odd or ("-" not in text[: match.start()] and int(whole) >= int(decimals[:18]))


def _replaced(text: str, mark: str, thousands: bool) -> str | None:
    """Replace each possible decimal comma with `mark`. Return None if there are none."""
    pieces: list[str] = []
    at = 0
    for match in _COMMA.finditer(text):
        is_grouping = not thousands and _THOUSANDS.fullmatch(match[0])
        if not is_grouping and not _is_in_brackets(text, match.start()):
            pieces += [text[at : match.start()], match["whole"].replace(".", ""), mark, match["part"]]
            at = match.end()
    return "".join([*pieces, text[at:]]) if pieces else None


def _without_dots(text: str) -> str | None:
    """Return `1.234.567` as `1234567`; None for other strings."""
    plain = _DOTTED.sub(lambda match: match[0].replace(".", ""), text)
    return None if plain == text else plain


def _is_in_brackets(text: str, at: int) -> bool:
    """Return whether a position is inside brackets whose items are not separated by semicolons."""
    opened: list[tuple[int, bool]] = []  # for each open bracket: its position, and whether it contains a semicolon
    for bracket in _BRACKET.finditer(text):
        mark = bracket[0][-1]
        if mark in "([{":
            opened.append((bracket.start(), False))
        elif mark == ";" and opened:
            opened[-1] = (opened[-1][0], True)
        elif mark != ";" and opened:
            start, is_separated = opened.pop()
            if start < at < bracket.start():
                return not is_separated
    return False
