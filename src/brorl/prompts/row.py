"""A `Row` of a data file, and the `Question` that it asks."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from brorl.prompts.question import Message, Question

Cells = Mapping[str, Any]  # the values of a row: column -> value


class Row(NamedTuple):
    """A row of a data file."""

    location: str  # for messages: `train.jsonl line 7`, or the dataset, split and row
    number: int  # line or row number, from 1
    part: str  # the row's file, relative to the folder; empty if there is only one file
    columns: Sequence[str]  # names of all columns
    values: Cells  # at least those of the requested columns
    problem: str | None = None  # why the row cannot be read, in which case it has no values

    @property
    def key(self) -> str:
        """`number`, or `file:number` if there are several files."""
        return f"{self.part}:{self.number}" if self.part else str(self.number)

    def cell(self, column: str) -> Any:
        """Return the value of a column or of a key inside a column (`column.key`); None if it is missing."""
        with suppress(KeyError):
            return cell_of(self.values, column)
        return None


def cell_of(values: Cells, column: str) -> Any:
    """Return the value of a column or of a key inside a column (`column.key`); raise `KeyError` if it is missing."""
    if column in values:
        return values[column]
    value: Any = values
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(column)
        value = value[name]
    return value


def is_missing(value: Any) -> bool:
    """Return whether a cell is missing, empty or NaN. The caller decides how to handle it."""
    return value is None or (isinstance(value, str) and not value.strip()) or value != value


def decoded(value: Any) -> Any:
    """Decode a string such as `["a", "b"]` or `['a', 'b']` to a list or an object; return other values unchanged."""
    if isinstance(value, str) and value.strip()[:1] + value.strip()[-1:] in ("[]", "{}"):
        for decode in (json.loads, ast.literal_eval):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes such as \d cause warnings
                try:
                    return decode(value.strip())
                except (ValueError, SyntaxError, MemoryError, RecursionError):
                    continue
    return value


class DroppedRow(Exception):  # noqa: N818
    """Raised for a row without a verifiable question. Rows are counted by message, so messages must be general."""


def row_question(text: str, reference: str, domain: str, messages: tuple[Message, ...] = ()) -> Question:
    """Return the question of a row, without id, source and location. A row without a question raises `DroppedRow`."""
    last_turn = messages[-1].content if messages else text
    for value, missing in ((last_turn, "no question"), (reference, "no answer")):
        if not value.strip():
            raise DroppedRow(missing)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DroppedRow("an unpaired surrogate") from None
    return Question("", text, reference, domain, messages=messages)
