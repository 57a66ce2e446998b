"""Print the measured tables that the pages of docs/ summarize, as Markdown.

    python scripts/print_tables.py                        # the titles of all sections
    python scripts/print_tables.py study                  # all tables of docs/tables/study.json
    python scripts/print_tables.py study "knee of"        # those of the sections whose title has this text

In: docs/tables/NAME.json, a list of sections, each with a title, notes, and tables of text cells. The tables of the
long runs are no file: `study` computes them from the runs in examples/plateau/results.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brorl.table import Table

ROOT = Path(__file__).resolve().parents[1]
FILES = {file.stem: file for file in sorted((ROOT / "docs" / "tables").glob("*.json"))}
RUNS = "Long runs"  # the section of `study` whose tables are computed


def sections(name: str) -> list[dict[str, Any]]:
    """Return the sections of a file."""
    found: list[dict[str, Any]] = json.loads(FILES[name].read_text("utf-8"))
    return found


def tables_of_runs() -> Iterator[str]:
    """Yield the tables of the runs that the repository holds."""
    sys.path.insert(0, str(ROOT / "examples" / "plateau"))
    import study

    yield from study.tables()


def printed(name: str, part: str) -> Iterator[str]:
    """Yield the parts of the sections whose title has a text: the title, the notes and the tables."""
    for section in sections(name):
        if part.lower() in section["title"].lower():
            yield f"# {section['title']}"
            yield from section["notes"]
            for table in section["tables"]:
                yield Table(table["title"], tuple(table["columns"]), tuple(map(tuple, table["rows"]))).markdown()
            if (name, section["title"]) == ("study", RUNS):
                yield from tables_of_runs()


def main() -> None:
    """Print the titles, or the tables of one file."""
    parser = argparse.ArgumentParser(description="Print the measured tables of a page as Markdown.")
    parser.add_argument("name", nargs="?", choices=FILES, help="the page; without it: the titles of all sections")
    parser.add_argument("part", nargs="?", default="", help="a part of the titles of the wanted sections")
    arguments = parser.parse_args()
    if arguments.name is None:
        parts = [f"{name}: {section['title']}" for name in FILES for section in sections(name)]
    else:
        parts = list(printed(arguments.name, arguments.part))
    print(("\n" if arguments.name is None else "\n\n").join(parts))


if __name__ == "__main__":
    main()
