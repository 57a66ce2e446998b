"""Rows of our own in the columns of the most used multiple-choice datasets, each with the text of its right option."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Schema(NamedTuple):
    """The rows of one schema, and the text of the right option of each."""

    rows: list[dict[str, Any]]
    right: list[str]


SCHEMAS: dict[str, Schema] = {}
"""The schemas by the name of a dataset that has it."""
for _line in Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines():
    _given = json.loads(_line)
    _schema = SCHEMAS.setdefault(_given["schema"], Schema([], []))
    _schema.rows.append(_given["row"])
    _schema.right.append(_given["right"])
