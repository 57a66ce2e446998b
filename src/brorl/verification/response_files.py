"""Reads stored responses from files: a user's own, or rollouts and evaluations that brorl stored.

A row without a response raises an error that names its location.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brorl.errors import UserError, option
from brorl.prompts.json_text import JSON_NAMES
from brorl.prompts.row import Row, cell_of
from brorl.prompts.row_readers import read_rows
from brorl.verification.grade import StoredResponse

_IDS = ("prompt_id", "question_id", "id", "task_id", "problem_id")
_PROMPT = "prompt"
_QUESTIONS = ("question", _PROMPT, "problem", "instruction")
_VERDICTS = ("correct", "is_correct", "passed")
_REASON = "reason"


@dataclass(frozen=True)
class ResponseColumns:
    """Column names in response files; None means the first conventional name in the row."""

    response: str = "response"  # text of the response
    question_id: str | None = None  # id of its question
    correct: str | None = None  # stored verdict, true or false


def read_responses(path: str, columns: ResponseColumns) -> Iterator[StoredResponse]:
    """Yield the responses in a file, in a folder, or in all files that match a glob pattern, in file-name order."""
    named = [columns.response, columns.question_id, columns.correct]
    wanted = {*_IDS, *_QUESTIONS, *_VERDICTS, _REASON, *(name for name in named if name)}
    for row in read_rows(path, None, "train", wanted):
        yield _response(row, columns)


def _response(row: Row, columns: ResponseColumns) -> StoredResponse:
    """Return the response in a row. It must be a string, and the row must identify its question."""
    text = _named(row, columns.response, f"set {option('response-column')}")
    if not isinstance(text, str):
        kind = _kind(text)
        raise UserError(f"{row.location}: {columns.response} must be a string, got {kind}; write one response per row")
    question_id = _id(row, columns)
    question = _question(_first(row, _QUESTIONS))
    if question_id is None and question is None:
        listed = ", ".join(row.columns) or "none"
        raise UserError(
            f"{row.location} has neither the id nor the text of its question (columns: {listed}; expected "
            f"{', '.join((*_IDS, *_QUESTIONS))}); add one, or set {option('id-column')}"
        )
    reason = _first(row, (_REASON,))
    correct = _verdict(row, columns)
    prompt = _first(row, (_PROMPT,))
    return StoredResponse(
        str(row.location),
        question_id,
        question,
        text,
        prompt if isinstance(prompt, str) else None,
        correct,
        None if reason is None else str(reason),
    )


def _named(row: Row, column: str, fix: str) -> Any:
    """Return the value of a column that the user named."""
    try:
        return cell_of(row.values, column)
    except KeyError:
        columns = ", ".join(row.columns) or "none"
        raise UserError(f"{row.location} has no column {column!r} (columns: {columns}); {fix}") from None


def _id(row: Row, columns: ResponseColumns) -> str | None:
    """Return the question's id as a string, such as "3" for 3.0; None if there is none."""
    column = columns.question_id
    value = _named(row, column, f"fix {option('id-column')}") if column else _first(row, _IDS)
    if isinstance(value, bool | list | Mapping):
        raise UserError(
            f"{row.location}: the question id is {_kind(value)}; write text or a number, or fix {option('id-column')}"
        )
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None else str(value)


def _verdict(row: Row, columns: ResponseColumns) -> bool | None:
    """Return the stored verdict; None if there is none."""
    column = columns.correct
    value = _named(row, column, f"fix {option('correct-column')}") if column else _first(row, _VERDICTS)
    if value is None:
        return None
    if value not in (0, 1):  # True == 1
        raise UserError(
            f"{row.location}: the stored verdict is {value!r}, not true, false, 1 or 0; fix it, or set "
            f"{option('correct-column')}"
        )
    return bool(value)


def _kind(value: Any) -> str:
    return JSON_NAMES.get(type(value), type(value).__name__)


def _first(row: Row, names: Sequence[str]) -> Any:
    """Return the first non-null value in the named columns; None if there is none."""
    values = (row.cell(name) for name in names)
    return next((value for value in values if value is not None), None)


def _question(value: Any) -> str | None:
    """Return a question's text: the value itself if it is a string, or the last message of a conversation."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None
