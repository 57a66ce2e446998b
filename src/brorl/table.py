"""Tables and command results that render in a terminal (rich), on GitHub and in a notebook.

A table has a title, columns, rows of text, and notes. A terminal never truncates columns of numbers; columns of words
may wrap.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

_WIDTH = 80  # characters per terminal line
_PART = '<pre style="font-family:monospace; line-height:1.2; margin:0; WRAP">{code}</pre>'
_WRAPPED = "white-space:pre-wrap; overflow-wrap:anywhere"
_SCROLLED = "white-space:pre; overflow-x:auto"
_UNBROKEN = 24  # words of up to this many characters are never broken
_HEADING = 9  # headings longer than this many characters wrap, unless the cells are as long


class Result:
    """A command's result: its `parts` are text in a terminal and HTML in a notebook."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return 0

    def parts(self) -> Iterable[Any]:
        """Return the lines and tables in reading order."""
        raise NotImplementedError

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(part) if isinstance(part, str) else part for part in self.parts()))

    def _repr_html_(self) -> str:
        from rich.console import Console
        from rich.text import Text

        console = Console(record=True, file=io.StringIO(), width=100, highlight=False, force_jupyter=False)
        pages = []
        for part in self.parts():
            is_text = isinstance(part, str | Text)  # the page wraps it, so a command is copied as one line
            console.print(Text(part) if isinstance(part, str) else part, soft_wrap=is_text)
            layout = _PART.replace("WRAP", _WRAPPED if is_text else _SCROLLED)
            pages.append(console.export_html(inline_styles=True, code_format=layout))
        return "".join(pages)


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str  # may be empty
    # Headings, with "\n" where the terminal breaks them. If all are empty, the table has no header.
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # each row has one string per column
    notes: tuple[str, ...] = ()  # lines below the table
    # Indices of columns of words. They are left-aligned and wrap on a narrow terminal.
    words: frozenset[int] = frozenset({0})
    strong: frozenset[int] = frozenset()  # indices of bold rows
    colored: frozenset[int] = frozenset()  # indices of rows with a distinct color in a terminal

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"a row of {self.title!r} needs {len(self.columns)} cells, not {len(wrong)}: {wrong}")

    def __rich__(self) -> Any:
        """Return the table for a terminal. The title above and the notes below may be wider than the table."""
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), show_header=any(self.columns))
        for index, column in enumerate(self.columns):
            if index in self.words:
                words = (word for text in (column, *(row[index] for row in self.rows)) for word in text.split())
                longest = max(map(len, words), default=0)
                table.add_column(Text(column), overflow="fold", min_width=min(longest, _UNBROKEN))
            else:
                widest = max((len(row[index]) for row in self.rows), default=0)
                table.add_column(Text(_folded(column, max(widest, _HEADING))), justify="right", no_wrap=True)
        for index, row in enumerate(self.rows):
            style = "bold" if index in self.strong else "cyan" if index in self.colored else None
            table.add_row(*map(Text, row), style=style)
        title = [Text(self.title, style="bold")] if self.title else []
        notes = [Text(line, style="dim") for note in self.notes for line in wrap(note, _WIDTH, break_on_hyphens=False)]
        return Group(*title, table, *notes)

    def markdown(self) -> str:
        """Return the table as GitHub Markdown, with its title as a heading and its notes below."""
        headings = [_cell(column) for column in self._headings()]
        ruler = ["---" if i in self.words else "---:" for i in range(len(headings))]
        rows = [
            [f"**{_cell(c)}**" if i in self.strong and c else _cell(c) for c in row] for i, row in enumerate(self.rows)
        ]
        lines = [f"| {' | '.join(cells)} |" for cells in (headings, ruler, *rows)]
        notes = [line for note in self.notes for line in ("", _cell(note))]
        return "\n".join([*([f"## {_cell(self.title)}", ""] if self.title else []), *lines, *notes])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""

        def cells(tag: str, texts: tuple[str, ...]) -> str:
            aligned = ("left" if i in self.words else "right" for i in range(len(texts)))
            return "".join(
                f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>'
                for side, text in zip(aligned, texts, strict=True)
            )

        caption = f'<caption style="text-align:left"><b>{html.escape(self.title)}</b></caption>' if self.title else ""
        head = f"<thead><tr>{cells('th', self._headings())}</tr></thead>" if any(self.columns) else ""
        body = "".join(f"<tr>{cells('th' if i in self.strong else 'td', row)}</tr>" for i, row in enumerate(self.rows))
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.notes)
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{notes}"

    def _headings(self) -> tuple[str, ...]:
        """Return the headings on one line each."""
        return tuple(re.sub(r"(?<=-)\n|\n(?=/)", "", column).replace("\n", " ") for column in self.columns)


def _folded(heading: str, width: int) -> str:
    """Break a heading into lines of at most `width` characters, between words if possible."""
    return "\n".join(part for line in heading.split("\n") for part in wrap(line, width, break_on_hyphens=False))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
