"""The page of a comparison: complete, in the order of reading, and what others wrote stays text."""

import base64
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from brorl.comparison.next_command import NextCommand
from brorl.comparison.report import comparison_page
from brorl.comparison.results import results_of
from brorl.comparison.tables import tables_of
from brorl.comparison.text import caveats_of, match_words, sentences_of
from comparison.comparisons import synthetic

HOSTILE = "<script>x</script>"


class Links(HTMLParser):
    """Collects what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_one_file_with_the_answer_first_and_the_next_command_last(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    comparison = synthetic(rng, names=("plain", HOSTILE))
    results = results_of(comparison)
    tables, sentences, caveats = tables_of(results), sentences_of(results), caveats_of(results)[:3]
    figure = tmp_path / "comparison.png"
    figure.write_bytes(b"\x89PNG picture")
    page = comparison_page(results, [figure], NextCommand("to go on", f"brorl compare '{HOSTILE}'"))

    order = [sentences[0], match_words(results), tables[0].title, "data:image/png;base64,", tables[1].title,
             tables[-1].title, caveats[-1], f"brorl compare '{HOSTILE}'"]  # fmt: skip
    body = page[page.index("<main>") :]
    places = [body.index(escape(part)) for part in order]
    assert places == sorted(places)
    assert all(escape(line) in page for line in (*sentences, *caveats))
    assert all(escape(cell) in page for table in tables for row in table.rows for cell in row)

    (picture,) = re.findall(r"data:image/png;base64,([^\"]*)", page)
    assert base64.b64decode(picture) == figure.read_bytes()
    links = Links()
    links.feed(page)
    assert links.scripts == 1  # the theme; the arm's name is none
    assert all(source.startswith(("#", "data:")) for source in links.sources)
    assert "default-src 'none'" in page
