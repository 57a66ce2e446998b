"""An answer as one HTML file: the answer, its tables, figures and conditions, and the next command."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from brorl.reporting.page.embedding import Section, page
from brorl.table import Table


@dataclass(frozen=True)
class Answer:
    """What a page of an answer shows, in this order."""

    command: str  # the command that found it: brorl compare
    title: str
    sentences: Sequence[str]  # the answer first
    basis: str  # what was matched
    tables: Sequence[Table]  # in the order of reading; the first stands above the figures
    figures: Sequence[Path]  # PNG files
    caveats: Sequence[str]  # what limits the answer
    following: tuple[str, str]  # what the next command is for, and the command


def answer_page(content: Answer) -> str:
    """Return the page of an answer."""
    answer, *more = map(escape, content.sentences)
    first, *others = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table._repr_html_()}</div>'
        for table in content.tables
    ]
    pictures = [(path.stem, base64.b64encode(path.read_bytes()).decode("ascii")) for path in content.figures]
    figures = "".join(
        f'<img class="figure" alt="{escape(name)}: {answer}" src="data:image/png;base64,{data}">'
        for name, data in pictures
    )
    summary = [f'<p class="answer">{answer}</p>', *(f"<p>{line}</p>" for line in more)]
    summary += [f'<p class="explanation">{escape(content.basis)}</p>', first]
    why, command = map(escape, content.following)
    sections = [
        Section("figure", "Figure", figures),
        Section("tables", "Tables", "".join(others)),
        Section("caveats", "Caveats", f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in content.caveats)}</ul>"),
        Section("next", "Next", f'<p>{why}:</p>\n<pre class="prompt-text text">{command}</pre>'),
    ]
    return page(content.command, content.title, "\n".join(summary), sections)
