"""Reads a question from the columns that the source's settings name; public datasets have layouts instead.

A row without a question or an answer is an error that names the column and the fix.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from math import isfinite
from typing import Any

from brorl.errors import source_setting
from brorl.format import short_repr
from brorl.prompts.json_text import JSON_NAMES
from brorl.prompts.options import choice_question, read_options, right_option
from brorl.prompts.public_data import layouts_of
from brorl.prompts.question import (
    CODE_DOMAIN,
    ENVIRONMENT_DOMAIN,
    GYM_DOMAIN,
    INSTRUCTIONS_DOMAIN,
    SCIENCE_DOMAIN,
    Message,
    Question,
)
from brorl.prompts.row import DroppedRow, Row, cell_of, decoded, is_missing, row_question
from brorl.prompts.science import MeasuredAnswer
from brorl.prompts.settings import FileSource

# Column setting -> common names in other datasets, the most specific first.
USUAL_NAMES = {
    "prompt_column": (
        "prompt", "question", "question_stem", "stem", "problem", "instruction", "query", "goal", "ctx", "sentence",
        "messages", "input", "inputs", "text",
    ),
    "answer_column": (
        "answer", "solution", "ground_truth", "final_answer", "expected_answer", "target", "label", "reference",
        "reward_model", "output", "response",
    ),
}  # fmt: skip
_JSON_DOMAINS = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN, SCIENCE_DOMAIN)  # their references can be JSON text
_FORM = '[{"role": "user", "content": "..."}]'


def read_columns(row: Row, source: FileSource, seed: int) -> Question:
    """Return a row's question. The seed determines the order of its options.

    For an environment, the reference is the whole row as JSON. A row without a question or an answer raises a
    `ValueError` with the problem and the fix.
    """
    prompt = _cell(row, source, "prompt_column")
    earlier: tuple[Message, ...] = ()
    if (messages := conversation(prompt)) is not None or isinstance(prompt, list):
        messages = prompt if messages is None else messages
        asked, _ = without_answer(messages)
        *turns, last = _messages(asked or messages, source.prompt_column)
        earlier = tuple(turns)
        text = last.content
    else:
        text = _text(prompt, source.prompt_column, "a prompt is a string or a list of messages")
    text = "\n\n".join([*_context(row, source), text])
    domain = row.cell(source.domain_column) if source.domain_column else source.domain
    if domain == ENVIRONMENT_DOMAIN:
        reference = _text(json.dumps({**row.values}, ensure_ascii=False, sort_keys=True, default=str), "the row", "")
    elif source.options_column:
        text, reference = _choices(row, text, source, seed)
    else:
        reference = _reference(row, source)
    if source.domain_column:
        domain = _text(_cell(row, source, "domain_column"), source.domain_column, "a domain is the name of a verifier")
    if earlier:
        return row_question("", reference, domain, (*earlier, Message("user", text)))
    return row_question(text, reference, domain)


def read_key(row: Row, source: FileSource) -> str:
    """Return the part of a question's id after the source's name: the row's id column, or else the row number."""
    column = source.id_column
    return _text(_cell(row, source, "id_column"), column, "an id is a string or a number") if column else row.key


def conversation(value: Any) -> list[Any] | None:
    """Return the messages in a list or in a JSON list; None for any other value."""
    messages = decoded(value)
    if not isinstance(messages, list) or not messages:
        return None
    return messages if all(isinstance(x, Mapping) and {"role", "content"} <= {*x} for x in messages) else None


def without_answer(messages: list[Any]) -> tuple[list[Any], Any]:
    """Split off the answer, a final assistant message. Return the other messages and the answer (None if missing).

    Demonstration datasets include the answer in the conversation, but the model must not read it.
    """
    *asked, last = messages or [None]
    is_answer = isinstance(last, Mapping) and last.get("role") == "assistant"
    return (asked, last.get("content")) if is_answer else (messages, None)


def _context(row: Row, source: FileSource) -> list[str]:
    """Return the strings to show before the question. A row may have none."""
    column = source.context_column
    value = None if column is None else _cell(row, source, "context_column")
    texts = [text for text in (value if isinstance(value, list) else [value]) if not is_missing(text)]
    return [_text(text, str(column), "a context is a text or a list of texts") for text in texts]


def _reference(row: Row, source: FileSource) -> str:
    answer = _cell(row, source, "answer_column")
    column = source.answer_column
    marker = source.answer_after
    answer = str(answer).lower() if isinstance(answer, bool) else answer
    if messages := conversation(answer):
        _, answer = without_answer(messages)
        if answer is None:
            raise ValueError(f"{column} does not end with an assistant message, which would be the answer")
    if source.domain == SCIENCE_DOMAIN and isinstance(answer, Mapping) and {"value", "aliases"} <= {*answer}:
        return MeasuredAnswer.of_aliases(_text(answer["value"], f"{column}.value", ""), answer["aliases"]).to_text()
    text = _text(answer, column, _answer_advice(answer, row, source))
    if marker is None:
        return text
    if marker not in text:
        raise ValueError(
            f"{column} has no {marker!r} ({short_repr(text)}); fix the row, or remove "
            f"{source_setting('answer_after')} to use the whole column"
        )
    reference = text.rpartition(marker)[2].strip()
    if not reference:
        raise ValueError(f"{column} has nothing after the last {marker!r}; fix the row")
    return reference


def _choices(row: Row, question: str, source: FileSource, seed: int) -> tuple[str, str]:
    """Return the question followed by its options, and a reference that names the right option."""
    cells = [_cell(row, source, "options_column", name) for name in source.options_column]
    answer = _cell(row, source, "answer_column")
    options = read_options(cells)
    names = f"{source.options_column[0]}{'' if len(cells) == 1 else f' to {source.options_column[-1]}'}"
    if options is None:
        raise ValueError(
            f"{names} is {short_repr(cells[0] if len(cells) == 1 else cells)}, not 2 to 26 options; fix or delete "
            f"the row, or set {source_setting('options_column')} to a column with a list of texts"
        )
    if answer is None or not str(answer).strip():
        _text(answer, source.answer_column, "")
    try:
        right = right_option(options, answer, source.first_option)
    except ValueError as error:
        raise ValueError(f"{source.answer_column} {error}; fix or delete the row") from None
    try:
        asked = choice_question(question, options.texts, right, seed)
    except DroppedRow as reason:
        raise ValueError(f"has {reason} (in {names}); fix or delete the row") from None
    return asked.text, asked.reference


def _cell(row: Row, source: FileSource, setting: str, column: str | None = None) -> Any:
    """Return a row's value in the column that a setting names. If the column is missing, the error suggests another."""
    column = column or str(getattr(source, setting))
    with suppress(KeyError):
        return cell_of(row.values, column)
    taken = {source.prompt_column, source.answer_column, source.id_column, source.domain_column}
    lower = {name.lower(): name for name in reversed(row.columns) if name not in taken}
    # the same name in a different case, a common name, or a similar spelling
    names = (column.lower(), *USUAL_NAMES.get(setting, ()), *difflib.get_close_matches(column.lower(), lower, n=1))
    meant = next((lower[name] for name in names if name in lower), None)
    advice = source_setting(setting, meant) if meant else f"{source_setting(setting)} to one of them"
    if known := layouts_of(source.path):
        advice = f"{source_setting('layout', ' or '.join(known))}, which reads this dataset"
    raise ValueError(f"has no column {column!r} (columns: {', '.join(row.columns) or 'none'}); set {advice}")


def _text(value: Any, column: str, advice: str) -> str:
    """Return a string, or a number as a string. Reject any other value."""
    rest = "fill it in or delete the row"
    if value is None:
        raise ValueError(f"{column} is null; {rest}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        kind = JSON_NAMES[type(value)] if type(value) in (dict, list) else f"of type {type(value).__name__}"
        raise ValueError(f"{column} is {short_repr(value)}, {kind}; {advice}")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{column} is {value}, not a finite number; {rest}")
    text = str(value)
    if not text.strip():
        raise ValueError(f"{column} is empty; {rest}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{column} has an unpaired surrogate (\\u{ord(text[error.start]):04x}); write both surrogates"
        ) from error
    return text


def _answer_advice(answer: Any, row: Row, source: FileSource) -> str:
    domain = row.cell(source.domain_column) if source.domain_column else source.domain
    first = next(iter(answer), None) if isinstance(answer, Mapping) else None
    first = "value" if isinstance(answer, Mapping) and "value" in answer else first
    if isinstance(answer, Mapping | list) and domain in _JSON_DOMAINS:
        start = "[...]" if first is None else f'{{\\"{first}\\": ...}}'
        return (
            f"the domain {domain} needs JSON text, not the value itself: write its json.dumps, as in "
            f'"{source.answer_column}": "{start}"'
        )
    if first is not None:
        inside = f"{source.answer_column}.{first}"
        return f"name the key that contains the answer, as in {source_setting('answer_column', inside)}"
    return "an answer is a single text or number: write one answer, or JSON text if your verifier reads a structure"


def _messages(values: list[Any], column: str) -> tuple[Message, ...]:
    """Check and return messages. Unknown keys are an error, since chat templates silently drop them."""
    for number, value in enumerate(values, 1):
        where = f"message {number} of {column}"
        if not isinstance(value, Mapping) or not {"role", "content"} <= set(value):
            raise ValueError(f"{where} is {short_repr(value)}; a list of messages looks like {_FORM}")
        extra = sorted(key for key in value if key not in ("role", "content") and value[key] is not None)
        if extra:
            raise ValueError(f"{where} has the key {extra[0]!r}; keep only role and content")
        if not isinstance(value["role"], str) or not isinstance(value["content"], str):
            raise ValueError(f"{where} is {short_repr(value)}; its role and its content must be strings")
        for key in ("role", "content"):
            _text(value[key], f"{key} of {where}", "")
    if not values:
        raise ValueError(f"{column} is an empty list; fill it in or delete the row")
    if values[-1]["role"] != "user":
        raise ValueError(
            f"the last message of {column} has the role {values[-1]['role']!r}; end with the user's message, for the "
            "model to answer"
        )
    return tuple(Message(value["role"], value["content"]) for value in values)
