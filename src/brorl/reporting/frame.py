"""The frame of every page (a self-contained HTML file whose policy blocks all requests), and the answer page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import brorl
from brorl.table import Table


@dataclass(frozen=True)
class PageSection:
    """A section of a page."""

    id: str
    title: str  # its heading and link text
    body: str  # HTML


def page_json(value: Any) -> str:
    r"""Return a value as ASCII JSON without `<`, `>`, `&` and `'`, which could end the surrounding element.

    Numbers have 7 significant digits; non-finite ones become null. Lone surrogates stay as `\ud800`.
    """
    return re.sub("[<>&']", lambda match: f"\\u{ord(match[0]):04x}", _json(value))


def compressed(value: Any) -> str:
    """Return a value as gzipped JSON in base64."""
    return base64.b64encode(gzip.compress(_json(value).encode("ascii"), 6, mtime=0)).decode("ascii")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `{{NAME}}` in a template with its part. Names inside parts are not replaced."""
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: parts[match[1]], template)


def framed_page(
    command: str,
    name: str,
    summary: str,
    sections: Sequence[PageSection],
    *,
    mark: str = "",
    controls: str = "",
    credit: str = "",
    scripts: str = "",
) -> str:
    """Return a page with a summary above its sections.

    `summary`, `controls` (in the header) and `scripts` (after the sections) are HTML. `mark` is a comment on the first
    line, and `credit` is a sentence at the end.
    """
    shown = [f'<section id="summary" aria-label="Summary">\n{summary}\n</section>']
    shown += [
        f'<section id="{s.id}" aria-labelledby="{s.id}-title"><h2 id="{s.id}-title">{escape(s.title)}</h2>\n{s.body}\n'
        "</section>"
        for s in sections
    ]
    return fill(resource("page.html"), {
        "TITLE": escape(f"{command}: {name}"),
        "STYLE": resource("page.css"),
        "MARK": mark,
        "SECOND": sections[0].id,
        "BRAND": escape(command),
        "NAME": escape(name),
        "NAV": "\n".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in sections),
        "CONTROLS": controls,
        "SECTIONS": "\n".join(shown),
        "VERSION": escape(brorl.__version__),
        "CREDIT": credit,
        "SCRIPTS": scripts,
    })  # fmt: skip


def resource(name: str) -> str:
    """Return the text of a file in `assets`."""
    return (files(__package__) / "assets" / name).read_text("utf-8")


def _json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}") if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in (int, str) else _plain(v) for v in value]  # most lists are long, with plain values
    return value


@dataclass(frozen=True)
class AnswerParts:
    """The parts of an answer page, in order."""

    command: str  # the command that found it, such as brorl compare
    title: str
    sentences: Sequence[str]  # the answer first
    basis: str  # what was matched
    tables: Sequence[Table]  # the first one is above the figures
    figures: Sequence[Path]  # PNG files
    caveats: Sequence[str]  # what limits the answer
    following: tuple[str, str]  # the purpose of the next command, and the command


def answer_page(content: AnswerParts) -> str:
    """Return the HTML page for an answer."""
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
        PageSection("figure", "Figure", figures),
        PageSection("tables", "Tables", "".join(others)),
        PageSection(
            "caveats", "Caveats", f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in content.caveats)}</ul>"
        ),
        PageSection("next", "Next", f'<p>{why}:</p>\n<pre class="prompt-text text">{command}</pre>'),
    ]
    return framed_page(content.command, content.title, "\n".join(summary), sections)
