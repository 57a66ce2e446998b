"""A table as plain text cells, drawn for the console or as GitHub Markdown, and how its numbers are written.

In: numbers, estimates, costs. Out: short strings, and tables made of them. Nothing is computed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import floor, isfinite, log10
from textwrap import wrap

from rich import box
from rich.table import Table
from rich.text import Text

from brorl.comparison.matching import Spread
from brorl.cost import Unit
from brorl.evaluation.pass_at_k import Estimate
from brorl.format import plain

_WIDTH = 80  # of a console
_HEADING = 9  # characters that a heading may always take; a longer one is broken, unless the numbers below are as long


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: What it shows.
        columns: Headings; a new line where the console breaks them.
        rows: Text of the cells.
        notes: What a reader must know, below it.
        words: Columns of words: aligned to the left, and folded where the console is too narrow. The first one is.
        strong: Rows to be stressed.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: frozenset[int] = frozenset({0})
    strong: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"a row of {self.title!r} needs {len(self.columns)} cells, not {len(wrong)}: {wrong}")


def rich_table(sheet: Sheet) -> Table:
    """Return a table for the console: columns of numbers are never cut, columns of words may take several lines."""
    table = Table(
        title=Text(sheet.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0), caption=Text("\n".join(sheet.notes), style="dim") if sheet.notes else None,
        caption_justify="left",
    )  # fmt: skip
    for index, column in enumerate(sheet.columns):
        if index in sheet.words:
            table.add_column(Text(column), overflow="fold")
        else:
            widest = max((len(row[index]) for row in sheet.rows), default=0)
            table.add_column(Text(_folded(column, max(widest, _HEADING))), justify="right", no_wrap=True)
    for index, row in enumerate(sheet.rows):
        table.add_row(*map(Text, row), style="bold" if index in sheet.strong else None)
    return table


def _folded(heading: str, width: int) -> str:
    """Break a heading's lines where they are longer than a width: between words, and in words that are longer."""
    return "\n".join(part for line in heading.split("\n") for part in wrap(line, width, break_on_hyphens=False))


def markdown_table(sheet: Sheet) -> str:
    """Return a table as GitHub Markdown, with its title as a heading and its notes below."""
    headings = [_cell(re.sub(r"(?<=-)\n|\n(?=/)", "", column)) for column in sheet.columns]
    ruler = ["---" if i in sheet.words else "---:" for i in range(len(headings))]
    rows = [
        [f"**{_cell(c)}**" if i in sheet.strong and c else _cell(c) for c in row] for i, row in enumerate(sheet.rows)
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ruler, *rows)]
    notes = [line for note in sheet.notes for line in ("", _cell(note))]
    return "\n".join([f"## {_cell(sheet.title)}", "", *lines, *notes])


def parts(sheet: Sheet, width: int = _WIDTH) -> list[Sheet]:
    """Split a sheet too wide for a console into several that repeat the first column; notes stay with the last."""
    widths = [
        max(max((len(row[i]) for row in sheet.rows), default=0), *map(len, _folded(column, _HEADING).split("\n")))
        for i, column in enumerate(sheet.columns)
    ]
    number = len(sheet.columns) - 1
    sizes = [-(-number // num_parts) for num_parts in range(1, number + 1)]  # as even as can be
    size = next((s for s in sizes if _fit(widths, s, width)), 1)
    if size == number:
        return [sheet]
    starts = range(1, number + 1, size)
    return [
        replace(
            sheet,
            title=sheet.title if start == 1 else f"{sheet.title}, continued",
            columns=(sheet.columns[0], *sheet.columns[start : start + size]),
            rows=tuple((row[0], *row[start : start + size]) for row in sheet.rows),
            notes=sheet.notes if start == starts[-1] else (),
        )
        for start in starts
    ]


def _fit(widths: list[int], size: int, width: int) -> bool:
    """Return whether the first column and any part of so many others fit, 2 characters apart."""
    return all(widths[0] + sum(w + 2 for w in widths[i : i + size]) <= width for i in range(1, len(widths), size))


def interval(estimate: Estimate, digits: int = 3, sign: str = "") -> str:
    """Return a number with its 95% interval; without one if the data give none."""
    if not isfinite(estimate.value):
        return "-"
    value = f"{estimate.value:{sign}.{digits}f}"
    if not (isfinite(estimate.low) and isfinite(estimate.high)):
        return value
    return f"{value} [{estimate.low:{sign}.{digits}f}, {estimate.high:{sign}.{digits}f}]"


def signed(estimate: Estimate, digits: int = 3) -> str:
    """Return a difference with its 95% interval."""
    return interval(estimate, digits, "+")


def three_digits(estimate: Estimate) -> str:
    """Return a positive number with its interval, to three significant digits of the number."""
    if not isfinite(estimate.value) or estimate.value <= 0:
        return interval(estimate, 1)
    digits = 2 - floor(log10(estimate.value))
    if digits >= 0:
        return interval(estimate, digits)
    if not (isfinite(estimate.low) and isfinite(estimate.high)):
        return f"{estimate.value:,.0f}"
    return f"{estimate.value:,.0f} [{estimate.low:,.0f}, {estimate.high:,.0f}]"


def spread(values: Spread | None, digits: int = 1) -> str:
    """Return a mean over runs with its range; whole numbers alone where all runs have the same."""
    if values is None:
        return "-"
    if values.least == values.most:
        return f"{values.mean:,.0f}" if values.mean == round(values.mean) else f"{values.mean:,.{digits}f}"
    low, high = (f"{v:,.0f}" if v == round(v) else f"{v:,.{digits}f}" for v in (values.least, values.most))
    return f"{values.mean:,.{digits}f} ({low}-{high})"


def short(count: float) -> str:
    """Return a count to three digits: 870, 12.3k, 1.23M."""
    for limit, size, suffix in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (float("inf"), 1e9, "G")):
        if count < limit:
            scaled = count / size
            digits = 0 if scaled >= 99.95 or (size == 1 and scaled == round(scaled)) else 1 if scaled >= 9.995 else 2
            return f"{scaled:,.{digits}f}{suffix}"
    raise AssertionError("no count is above infinity")


def short_time(seconds: float) -> str:
    """Return a time to three digits, in the unit that suits it: 61.9 s, 320 s, 12.3 min, 13.2 h."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 599.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7197 else f"{seconds / 3600:,.1f} h"


def cost_text(value: float, unit: Unit) -> str:
    """Return an amount in short, as a table or an axis holds it."""
    if unit == "steps":
        return f"{value:,.0f}"
    text = short_time(value) if unit == "seconds" else short(value)
    return re.sub(r"\.0*(?=\D*$)|(?<=[1-9])0+(?=\D*$)", "", text) if "." in text else text


def times(ratio: float) -> str:
    """Return a ratio to three digits: 0.351, 11.3."""
    return plain(ratio)


def p_value(p: float) -> str:
    """Return a p value with as many digits as it deserves."""
    if not isfinite(p):
        return "-"
    if p >= 0.001:
        return f"{p:.3f}"
    if p < 1e-99:
        return "below 1e-99"
    mantissa, exponent = f"{p:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
