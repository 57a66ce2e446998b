"""A comparison as one HTML file: the answer, the tables, the figures, the conditions and the next command.

In: a comparison in sentences, its tables and the files of its figures. Out: the text of the page. The file is complete,
and its content security policy blocks all requests.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import brorl
from brorl.comparison.results import ComparisonResults
from brorl.comparison.text import ComparisonText, NextCommand, match_words
from brorl.cost import amount
from brorl.format import listed
from brorl.reporting.page.embedding import fill
from brorl.table import Table


def comparison_page(
    results: ComparisonResults,
    text: ComparisonText,
    tables: Sequence[Table],
    figures: Sequence[Path],
    following: NextCommand,
) -> str:
    """Return the page of a comparison.

    Args:
        results: The results.
        text: The answer and the remarks.
        tables: The tables, in the order of reading.
        figures: PNG files, each of which becomes part of the page.
        following: The command to run next.
    """
    answer, *more = text.answer
    matched = match_words(results)
    title = f"{listed(results.names)}, {amount(results.budget, results.comparison.unit)} each"
    remarks = [line for line in text.remarks if line not in matched]
    first, *others = tables
    return fill(_text("comparison.html"), {
        "TITLE": escape(title),
        "STYLE": _text("page.css"),
        "ANSWER": escape(answer),
        "MORE": "".join(f"<p>{escape(line)}</p>" for line in more),
        "MATCHED": escape(" ".join(matched)),
        "FIRST_TABLE": _table(first),
        "FIGURES": "".join(_figure(path, answer) for path in figures),
        "TABLES": "".join(_table(table) for table in others),
        "REMARKS": f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in remarks)}</ul>",
        "WHY": escape(following.why),
        "COMMAND": escape(following.command),
        "VERSION": escape(brorl.__version__),
    })  # fmt: skip


def _table(table: Table) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table._repr_html_()}</div>'


def _figure(path: Path, answer: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img class="figure" alt="{escape(path.stem)}: {escape(answer)}" src="data:image/png;base64,{data}">'


def _text(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")
