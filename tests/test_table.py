"""Tables as a terminal, Markdown and a notebook show them: every cell once, in its place, nothing cut."""

from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from brorl.table import Table


def rendered(table: Table, width: int) -> str:
    console = Console(width=width, file=StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_a_terminal_never_cuts_numbers_and_takes_brackets_as_text() -> None:
    rows = (("a name of several words", "0.123 [0.100, 0.150]"), ("[b]", "[red]"))
    text = rendered(Table("[bold]title", ("arm", "per\nsecond"), rows, ("a note",)), 34)
    for part in ("[bold]title", "0.123 [0.100, 0.150]", "[b]", "[red]", "a note", "second"):
        assert part in text
    assert "a name of several words" not in text
    words = [line[:10].strip() for line in text.splitlines()]
    assert "".join(words).replace(" ", "").count("anameofseveralwords") == 1


def test_long_headings_are_folded_between_words_unless_the_cells_are_as_long() -> None:
    def heading(cell: str) -> list[str]:
        lines = rendered(Table("", ("x", "correct of 1,000"), (("y", cell),)), 80).splitlines()
        return [line[1:].strip() for line in lines if line.strip()][:-2]

    assert heading("1") == ["correct", "of 1,000"]
    assert heading("0.123 [0.1, 0.2]") == ["correct of 1,000"]


def test_no_header_without_headings() -> None:
    lines = [line.split() for line in rendered(Table("", ("", ""), (("a", "1"), ("b", "2"))), 80).splitlines()]
    assert [line for line in lines if line] == [["a", "1"], ["b", "2"]]


def test_markdown_has_every_cell_escaped() -> None:
    table = Table("a|b", ("arm", "p, one-\ntailed", "tokens\n/s"), (("x|y", "1", ""), ("z\nw", "2", "3")), ("n|",),
                  strong=frozenset({0}))  # fmt: skip
    assert table.markdown().split("\n") == [
        "## a\\|b", "", "| arm | p, one-tailed | tokens/s |", "| --- | ---: | ---: |", "| **x\\|y** | **1** |  |",
        "| z w | 2 | 3 |", "", "n\\|",
    ]  # fmt: skip
    assert Table("", ("a",), ()).markdown().startswith("| a |")


def test_a_notebook_shows_every_cell_escaped() -> None:
    table = Table("<t>", ("arm", "pass\n@1"), (("<b>", "0.5"), ("c", "0.6")), ("a & b",), strong=frozenset({1}))
    found: list[tuple[str, str]] = []

    class Reader(HTMLParser):
        tag = ""

        def handle_starttag(self, tag: str, _: object) -> None:
            self.tag = tag

        def handle_data(self, data: str) -> None:
            found.append((self.tag, data))

    Reader().feed(table._repr_html_())
    cells = [("th", "arm"), ("th", "pass @1"), ("td", "<b>"), ("td", "0.5"), ("th", "c"), ("th", "0.6")]
    assert found == [("b", "<t>"), *cells, ("small", "a & b")]


def test_rows_need_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match="needs 2 cells, not 1"):
        Table("t", ("a", "b"), (("1",),))


def test_notes_and_title_are_as_wide_as_the_terminal_and_not_as_the_table() -> None:
    note = "a note of many words that explains what the cells of this small table mean to its readers"
    lines = rendered(Table("a title that is wider than the table", ("x",), (("1",),), (note,)), 100).splitlines()
    assert lines[0].strip() == "a title that is wider than the table"
    assert " ".join(line.strip() for line in lines[-2:]) == note


def test_a_narrow_terminal_breaks_between_words_only() -> None:
    table = Table("", ("", "before"), (("  averaged weights pass@256", "0.078 [0.017, 0.423]"),))
    for width in (34, 44, 60):
        text = " ".join(rendered(table, width).split())
        assert "weights pass@256" in text.replace("0.078 [0.017, 0.423] ", "")
        assert "0.078 [0.017, 0.423]" in text
