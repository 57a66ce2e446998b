"""Tables of cases in files beside their tests: `test_choice.rows` has those of `test_choice.py`.

A table begins with a line such as `== named_options: response, letter`, its name and its columns. Each line below it
is a row: literals of Python, with commas between them. Lines that begin with `#` are comments.
"""

import ast
from functools import lru_cache
from pathlib import Path
from typing import Any

Table = tuple[list[str], list[tuple[Any, ...]]]


def table(test_file: str, name: str) -> Table:
    """Return the columns and the rows of a table, as `parametrize` and `each_row` take them."""
    return _tables(Path(test_file).with_suffix(".rows"))[name]


@lru_cache
def _tables(path: Path) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if line.startswith("== "):
            name, _, columns = line.removeprefix("== ").partition(": ")
            tables[name] = ([column.strip() for column in columns.split(",")], [])
        elif line and not line.startswith("#"):
            columns, table = list(tables.values())[-1]
            row = ast.literal_eval(f"({line},)")
            assert len(row) == len(columns), f"{path} line {number} has {len(row)} cells, and {columns} are needed"
            table.append(row)
    return tables
