"""The user's questions: files and datasets to `Question`s.

A row that is not a question with an answer is an error of one line with the file, the line, the column and the fix; no
row is skipped or guessed. A layout drops rows that cannot be verified, and they are counted.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from math import isfinite
from typing import Any

from brorl.errors import UserError
from brorl.format import short_repr
from brorl.prompts.layouts.layout import DroppedRow
from brorl.prompts.layouts.table import all_dropped, find_layout, layouts_of, read_fields
from brorl.prompts.options import choice_fields, read_options
from brorl.prompts.question import Message, Question
from brorl.prompts.row_files import JSON_NAMES, MISSING, Row
from brorl.prompts.rows import is_local, read_rows
from brorl.prompts.settings import FileSource

# Names of these columns in other datasets, the most specific first.
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
_JSON_DOMAINS = ("code", "gym", "ifeval", "science")  # their references can be JSON text
CONTRADICTION = "the same question with different answers"


@dataclass(frozen=True)
class SourceReading:
    """The questions of a source, and the number of its other rows."""

    questions: Sequence[Question]  # distinct questions, in the order of the rows
    num_rows: int  # rows read
    num_repeated: int = 0  # rows that repeat a question with the same answer
    # rows that the layout dropped, by reason; none without a layout
    dropped: Mapping[str, int] = field(default_factory=dict)


def read_source(source: FileSource, seed: int = 0) -> SourceReading:
    """Read a source's distinct questions, in the order of its files (by name) and rows.

    A question that repeats with the same answer is kept once. With a layout, all rows of a question that repeats with
    another answer are dropped. Ids are `name:number`, `name:file:number` if there are several files, or `name:id` with
    an id column. The column `reward_model.ground_truth` is the key `ground_truth` of the column `reward_model`, unless
    there is a column of the whole name.

    Raises:
        UserError: If nothing can be read, a row is not a question with an answer or not of the layout, ids repeat, a
            question repeats with another answer without a layout, or the layout drops every row.
    """
    layout = find_layout(source.layout) if source.layout else None
    first: dict[bytes, Question] = {}  # by the digest of a question
    rows, dropped = Counter[bytes](), Counter[str]()
    contradicted: set[bytes] = set()
    location_of_id: dict[str, str] = {}
    number = 0
    maximum = None if source.limit is None else min(source.limit, sys.maxsize)
    for row in islice(read_rows(source.path, source.subset, source.split, _wanted(source)), maximum):
        number += 1
        try:
            question = _question(row, source, seed)
        except DroppedRow as reason:
            dropped[str(reason)] += 1
            continue
        if source.id_column and location_of_id.setdefault(question.id, row.location) is not row.location:
            raise UserError(
                f"{row.location} has the {source.id_column} {question.id.partition(':')[2]!r} of "
                f"{location_of_id[question.id]} again; ids must be distinct: fix them, or remove "
                "data.sources[].id_column to number the rows"
            )
        digest = blake2b(question.key.encode(), digest_size=16).digest()
        rows[digest] += 1
        earlier = first.setdefault(digest, question)
        if (earlier.reference, earlier.domain) != (question.reference, question.domain):
            if not layout:
                raise UserError(_contradiction(earlier, question))
            contradicted.add(digest)
    if not number:
        raise UserError(f"{source.path} is empty; data.sources[].path must contain at least one row")
    if contradicted:
        dropped[CONTRADICTION] = sum(rows[digest] for digest in contradicted)
    kept = [question for digest, question in first.items() if digest not in contradicted]
    if layout and not kept:
        raise all_dropped(source.path, layout, dropped)
    return SourceReading(kept, number, number - dropped.total() - len(kept), dict(dropped))


def check_first_row(source: FileSource) -> None:
    """Check the first row of files on this machine, which finds a wrong path, column or layout.

    Raises:
        UserError: If there are no such files, or the row is not a question with an answer or not of the layout.
    """
    if is_local(source.path):
        for row in islice(read_rows(source.path, source.subset, source.split, _wanted(source)), 1):
            with suppress(DroppedRow):
                _question(row, source, seed=0)


def _wanted(source: FileSource) -> set[str]:
    """Return the columns that are used, and those whose keys are."""
    columns: tuple[str | None, ...]
    columns = (source.prompt_column, source.answer_column, source.domain_column, *source.options_column)
    if source.layout:
        layout = find_layout(source.layout)
        columns = (*layout.columns, *layout.optional)
    used = [*columns, source.id_column]
    return {name for column in used if column for name in (column, column.partition(".")[0])}


def _contradiction(first: Question, question: Question) -> str:
    what = "answer" if question.reference != first.reference else "domain"
    one, other = (first.reference, question.reference) if what == "answer" else (first.domain, question.domain)
    return (
        f"{question.location} has the question of {first.location} with another {what} ({short_repr(one)} there, "
        f"{short_repr(other)} here); the same response would be right and wrong: correct one of them or delete both"
    )


def _question(row: Row, source: FileSource, seed: int) -> Question:
    key = row.key
    if source.id_column:
        value = _cell(row, source.id_column, "id_column", source)
        key = _text(value, row.location, source.id_column, "an id is a string or a number")
    if source.layout:
        fields = read_fields(row, find_layout(source.layout), seed)
        return Question(f"{source.label}:{key}", *fields, source.label, location=row.location)
    prompt = _cell(row, source.prompt_column, "prompt_column", source)
    text, messages = "", tuple[Message, ...]()
    if isinstance(prompt, list):
        messages = _messages(prompt, row.location, source.prompt_column)
        if len(messages) == 1:  # the same question as its plain text
            text, messages = messages[0].content, ()
    else:
        text = _text(prompt, row.location, source.prompt_column, "a prompt is a string or a list of messages")
    if source.options_column:
        asked = messages[-1].content if messages else text
        asked, reference = _choices(row, asked, source, seed)
        text, messages = (text, (*messages[:-1], Message("user", asked))) if messages else (asked, messages)
    else:
        reference = _reference(row, source)
    domain = source.domain
    if source.domain_column:
        value = _cell(row, source.domain_column, "domain_column", source)
        domain = _text(value, row.location, source.domain_column, "a domain is the name of a verifier")
    return Question(f"{source.label}:{key}", text, reference, domain, source.label, messages, row.location)


def _reference(row: Row, source: FileSource) -> str:
    answer = _cell(row, source.answer_column, "answer_column", source)
    if isinstance(answer, bool):
        answer = str(answer).lower()
    reference = _text(answer, row.location, source.answer_column, _answer_advice(answer, row, source))
    return reference if source.answer_after is None else _after(reference, row.location, source)


def _choices(row: Row, question: str, source: FileSource, seed: int) -> tuple[str, str]:
    """Return a question with its options, and the reference that names the right one."""
    cells = [_cell(row, name, "options_column", source) for name in source.options_column]
    answer, options = _cell(row, source.answer_column, "answer_column", source), read_options(cells)
    names = f"{source.options_column[0]}{'' if len(cells) == 1 else f' to {source.options_column[-1]}'}"
    if options is None:
        raise UserError(
            f"{row.location}: {names} is {short_repr(cells[0] if len(cells) == 1 else cells)}, and not 2 to 26 "
            "options; fix or delete the row, or set data.sources[].options_column to a column with a list of texts"
        )
    if answer is None or not str(answer).strip():
        kind = "null" if answer is None else "empty"
        raise UserError(f"{row.location}: {source.answer_column} is {kind}; fill it in or delete the row")
    try:
        fields = choice_fields(question, options, answer, source.first_option, seed)
    except ValueError as error:
        raise UserError(f"{row.location}: {source.answer_column} {error}; fix or delete the row") from None
    except DroppedRow as reason:
        raise UserError(f"{row.location} has {reason} (in {names}); fix or delete the row") from None
    return fields.text, fields.reference


def _cell(row: Row, column: str, setting: str, source: FileSource) -> Any:
    """Return the value of a column; a row without it is an error that names the setting."""
    value = row.cell(column)
    if value is not MISSING:
        return value
    taken = {source.prompt_column, source.answer_column, source.id_column, source.domain_column}
    meant = _nearest(column, [name for name in row.columns if name not in taken], setting)
    advice = f"set data.sources[].{setting}: {meant}" if meant else f"set data.sources[].{setting} to one of them"
    if known := layouts_of(source.path):
        advice = f"set data.sources[].layout: {' or '.join(known)}, which reads this dataset"
    raise UserError(f"{row.location} has no column {column!r} (columns: {', '.join(row.columns) or 'none'}); {advice}")


def _nearest(column: str, columns: list[str], setting: str) -> str | None:
    """Return the column that was probably meant: equal but for case, of a usual name, or of similar spelling."""
    lower = {name.lower(): name for name in reversed(columns)}
    for name in (column.lower(), *USUAL_NAMES.get(setting, ())):
        if name in lower:
            return lower[name]
    alike = difflib.get_close_matches(column.lower(), lower, n=1)
    return lower[alike[0]] if alike else None


def _text(value: Any, location: str, column: str, advice: str) -> str:
    """Return text or a number as text; anything else is an error."""
    if value is None:
        raise UserError(f"{location}: {column} is null; fill it in or delete the row")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        kind = JSON_NAMES[type(value)] if type(value) in (dict, list) else f"of type {type(value).__name__}"
        raise UserError(f"{location}: {column} is {short_repr(value)}, {kind}; {advice}")
    if isinstance(value, float) and not isfinite(value):
        raise UserError(f"{location}: {column} is {value}, not a finite number; fill it in or delete the row")
    text = str(value)
    if not text.strip():
        raise UserError(f"{location}: {column} is empty; fill it in or delete the row")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: {column} has an unpaired surrogate (\\u{ord(text[error.start]):04x}); write both surrogates"
        ) from error
    return text


def _answer_advice(answer: Any, row: Row, source: FileSource) -> str:
    domain = row.cell(source.domain_column) if source.domain_column else source.domain
    if isinstance(answer, Mapping | list) and domain in _JSON_DOMAINS:
        start = f'{{\\"{next(iter(answer))}\\": ...}}' if isinstance(answer, Mapping) and answer else "[...]"
        return (
            f"the domain {domain} needs JSON text, not the value itself: write json.dumps of it, as in "
            f'"{source.answer_column}": "{start}"'
        )
    if isinstance(answer, Mapping) and answer:
        inside = f"{source.answer_column}.{next(iter(answer))}"
        return f"name the key that contains the answer, as in data.sources[].answer_column: {inside}"
    return "an answer is one text or number: write the one answer, or JSON text if your verifier reads a structure"


def _after(answer: str, location: str, source: FileSource) -> str:
    _, marker, reference = answer.rpartition(source.answer_after or "")
    column = source.answer_column
    if not marker:
        raise UserError(
            f"{location}: {column} has no {source.answer_after!r} ({short_repr(answer)}); fix the row, or remove "
            "data.sources[].answer_after to take the whole column"
        )
    if not reference.strip():
        raise UserError(f"{location}: {column} has nothing after the last {source.answer_after!r}; fix the row")
    return reference.strip()


def _messages(values: list[Any], location: str, column: str) -> tuple[Message, ...]:
    """Check a list of messages; a chat template would silently drop unknown keys."""
    form, form_keys = '[{"role": "user", "content": "..."}]', ("role", "content")
    messages: list[Message] = []
    for number, value in enumerate(values, 1):
        where = f"{location}: message {number} of {column}"
        if not isinstance(value, Mapping) or not {"role", "content"} <= set(value):
            raise UserError(f"{where} is {short_repr(value)}; a list of messages looks like {form}")
        extra = sorted(key for key in value if key not in form_keys and value[key] is not None)
        if extra:
            raise UserError(f"{where} has the key {extra[0]!r}; keep only role and content")
        if not isinstance(value["role"], str) or not isinstance(value["content"], str):
            raise UserError(f"{where} is {short_repr(value)}; its role and its content must be strings")
        role, content = (_text(value[key], location, f"{key} of message {number} of {column}", "") for key in form_keys)
        messages.append(Message(role, content))
    if not messages:
        raise UserError(f"{location}: {column} is an empty list; fill it in or delete the row")
    if messages[-1].role != "user":
        raise UserError(
            f"{location}: the last message of {column} has the role {messages[-1].role!r}; end with the user's "
            "message, for the model to answer"
        )
    return tuple(messages)
