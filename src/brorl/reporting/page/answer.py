"""An answer as one HTML file: the answer, its tables, figures and conditions, and the next command.

The file is complete, and its content security policy blocks all requests.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import brorl
from brorl.reporting.page.embedding import fill, head, resource
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
    answer, *more = content.sentences
    shown = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table._repr_html_()}</div>'
        for table in content.tables
    ]
    pictures = [(path.stem, base64.b64encode(path.read_bytes()).decode("ascii")) for path in content.figures]
    return fill(resource("answer.html"), {
        "HEAD": head(f"{content.command}: {content.title}"),
        "BRAND": escape(content.command),
        "TITLE": escape(content.title),
        "ANSWER": escape(answer),
        "MORE": "".join(f"<p>{escape(line)}</p>" for line in more),
        "MATCHED": escape(content.basis),
        "FIRST_TABLE": shown[0],
        "FIGURES": "".join(
            f'<img class="figure" alt="{escape(name)}: {escape(answer)}" src="data:image/png;base64,{data}">'
            for name, data in pictures
        ),
        "TABLES": "".join(shown[1:]),
        "CAVEATS": f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in content.caveats)}</ul>",
        "WHY": escape(content.following[0]),
        "COMMAND": escape(content.following[1]),
        "VERSION": escape(brorl.__version__),
    })  # fmt: skip
