"""A comparison as one HTML file: the answer, the tables, the figures, the conditions and the next command.

The file is complete, and its content security policy blocks all requests.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

import brorl
from brorl.comparison.results import ComparisonResults
from brorl.comparison.text import ComparisonText, NextCommand, match_words
from brorl.cost import amount
from brorl.format import listed
from brorl.reporting.page.embedding import fill, resource
from brorl.table import Table


def comparison_page(
    results: ComparisonResults,
    text: ComparisonText,
    tables: Sequence[Table],
    figures: Sequence[Path],
    following: NextCommand,
) -> str:
    """Return the page of a comparison, with its tables in the order of reading and its figures (PNG files)."""
    answer, *more = text.answer
    matched = match_words(results)
    title = f"{listed(results.names)}, {amount(results.budget, results.comparison.unit)} each"
    remarks = [line for line in text.remarks if line not in matched]
    shown = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table._repr_html_()}</div>'
        for table in tables
    ]
    pictures = [(path.stem, base64.b64encode(path.read_bytes()).decode("ascii")) for path in figures]
    return fill(resource("comparison.html"), {
        "TITLE": escape(title),
        "STYLE": resource("page.css"),
        "ANSWER": escape(answer),
        "MORE": "".join(f"<p>{escape(line)}</p>" for line in more),
        "MATCHED": escape(" ".join(matched)),
        "FIRST_TABLE": shown[0],
        "FIGURES": "".join(
            f'<img class="figure" alt="{escape(name)}: {escape(answer)}" src="data:image/png;base64,{data}">'
            for name, data in pictures
        ),
        "TABLES": "".join(shown[1:]),
        "REMARKS": f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in remarks)}</ul>",
        "WHY": escape(following.why),
        "COMMAND": escape(following.command),
        "VERSION": escape(brorl.__version__),
    })  # fmt: skip
