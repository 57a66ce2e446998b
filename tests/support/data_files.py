"""Data files for tests: the same rows in each format that `brorl` reads."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as Parquet, CSV, a JSON list, or JSON Lines, by the suffix of the file; return its path."""
    path = Path(path)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
