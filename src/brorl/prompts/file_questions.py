"""Turns the rows of files and datasets into `Question`s; a repeated question is kept once.

A bad row is an error: one line with the file, the line, the column and the fix. A layout drops and counts bad rows.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from math import isfinite
from typing import Any

from brorl.errors import UserError, of_source
from brorl.format import counted, listed, short_repr
from brorl.prompts.asked import Asked, DroppedRow
from brorl.prompts.column_names import USUAL_NAMES
from brorl.prompts.decimal_commas import column_reading
from brorl.prompts.json_text import JSON_NAMES
from brorl.prompts.public_data import find_layout, layouts_of, read_layout
from brorl.prompts.question import (
    CODE_DOMAIN,
    ENVIRONMENT_DOMAIN,
    GYM_DOMAIN,
    INSTRUCTIONS_DOMAIN,
    MATH_DOMAIN,
    SCIENCE_DOMAIN,
    Message,
    Question,
)
from brorl.prompts.row import Row, cell_of, decoded, is_missing
from brorl.prompts.row_readers import is_local, read_rows
from brorl.prompts.science import MeasuredAnswer, choice_question, read_options, right_option
from brorl.prompts.settings import FileSource
from brorl.prompts.source_questions import SourceQuestions, reasons

_JSON_DOMAINS = (CODE_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN, SCIENCE_DOMAIN)  # their references can be JSON text
_FORM = '[{"role": "user", "content": "..."}]'


def read_columns(row: Row, source: FileSource, seed: int) -> Asked:
    """Return what a row asks; the seed permutes its options.

    The reference of an environment is the whole row as JSON. A row without a question or an answer raises a
    `ValueError` with the problem and the fix.
    """
    prompt, earlier = _cell(row, source, "prompt_column"), tuple[Message, ...]()
    if (messages := conversation(prompt)) is not None or isinstance(prompt, list):
        messages = prompt if messages is None else messages
        asked, _ = without_answer(messages)
        *turns, last = _messages(asked or messages, source.prompt_column)
        earlier, text = tuple(turns), last.content
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
        return Asked("", reference, domain, (*earlier, Message("user", text)))
    return Asked(text, reference, domain)


def conversation(value: Any) -> list[Any] | None:
    """Return the messages in a value, a list or its JSON text; None for any other value."""
    found = decoded(value)
    is_one = isinstance(found, list) and bool(found)
    return found if is_one and all(isinstance(x, Mapping) and {"role", "content"} <= {*x} for x in found) else None


def without_answer(messages: list[Any]) -> tuple[list[Any], Any]:
    """Split messages into those up to the last one that is not the assistant's, and the answer that follows, or None.

    A data set of demonstrations has the answer in the conversation, and the model must not read it.
    """
    *asked, last = messages or [None]
    is_answer = isinstance(last, Mapping) and last.get("role") == "assistant"
    return (asked, last.get("content")) if is_answer else (messages, None)


def _context(row: Row, source: FileSource) -> list[str]:
    """Return the texts before the question; a row may have none."""
    column = source.context_column
    value = None if column is None else _cell(row, source, "context_column")
    texts = [text for text in (value if isinstance(value, list) else [value]) if not is_missing(text)]
    return [_text(text, str(column), "a context is a text or a list of texts") for text in texts]


def _reference(row: Row, source: FileSource) -> str:
    answer, column, marker = _cell(row, source, "answer_column"), source.answer_column, source.answer_after
    answer = str(answer).lower() if isinstance(answer, bool) else answer
    if messages := conversation(answer):
        _, answer = without_answer(messages)
        if answer is None:
            raise ValueError(f"{column} does not end with a message of the assistant, which would be the answer")
    if source.domain == SCIENCE_DOMAIN and isinstance(answer, Mapping) and {"value", "aliases"} <= {*answer}:
        return MeasuredAnswer.of_aliases(_text(answer["value"], f"{column}.value", ""), answer["aliases"]).to_text()
    text = _text(answer, column, _answer_advice(answer, row, source))
    if marker is None:
        return text
    if marker not in text:
        raise ValueError(
            f"{column} has no {marker!r} ({short_repr(text)}); fix the row, or remove "
            f"{of_source('answer_after')} to take the whole column"
        )
    reference = text.rpartition(marker)[2].strip()
    if not reference:
        raise ValueError(f"{column} has nothing after the last {marker!r}; fix the row")
    return reference


def _choices(row: Row, question: str, source: FileSource, seed: int) -> tuple[str, str]:
    """Return a question with its options below it, and the reference that names the right option."""
    cells = [_cell(row, source, "options_column", name) for name in source.options_column]
    answer, options = _cell(row, source, "answer_column"), read_options(cells)
    names = f"{source.options_column[0]}{'' if len(cells) == 1 else f' to {source.options_column[-1]}'}"
    if options is None:
        raise ValueError(
            f"{names} is {short_repr(cells[0] if len(cells) == 1 else cells)}, and not 2 to 26 options; fix or delete "
            f"the row, or set {of_source('options_column')} to a column with a list of texts"
        )
    if answer is None or not str(answer).strip():
        _text(answer, source.answer_column, "")
    try:
        right = right_option(options, answer, source.first_option)
    except ValueError as error:
        raise ValueError(f"{source.answer_column} {error}; fix or delete the row") from None
    try:
        found = choice_question(question, options.texts, right, seed)
    except DroppedRow as reason:
        raise ValueError(f"has {reason} (in {names}); fix or delete the row") from None
    return found.text, found.reference


def _cell(row: Row, source: FileSource, setting: str, column: str | None = None) -> Any:
    """Return a row's value in the column that a setting names; if it is missing, the error suggests a similar one."""
    column = column or str(getattr(source, setting))
    with suppress(KeyError):
        return cell_of(row.values, column)
    taken = {source.prompt_column, source.answer_column, source.id_column, source.domain_column}
    lower = {name.lower(): name for name in reversed(row.columns) if name not in taken}
    # the same name in another case, a usual name, or a name of similar spelling
    names = (column.lower(), *USUAL_NAMES.get(setting, ()), *difflib.get_close_matches(column.lower(), lower, n=1))
    meant = next((lower[name] for name in names if name in lower), None)
    advice = of_source(setting, meant) if meant else f"{of_source(setting)} to one of them"
    if known := layouts_of(source.path):
        advice = f"{of_source('layout', ' or '.join(known))}, which reads this dataset"
    raise ValueError(f"has no column {column!r} (columns: {', '.join(row.columns) or 'none'}); set {advice}")


def _text(value: Any, column: str, advice: str) -> str:
    """Return text or a number as text."""
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
            f"the domain {domain} needs JSON text, not the value itself: write json.dumps of it, as in "
            f'"{source.answer_column}": "{start}"'
        )
    if first is not None:
        inside = f"{source.answer_column}.{first}"
        return f"name the key that contains the answer, as in {of_source('answer_column', inside)}"
    return "an answer is one text or number: write the one answer, or JSON text if your verifier reads a structure"


def _messages(values: list[Any], column: str) -> tuple[Message, ...]:
    """Check and return messages. Unknown keys are an error, since a chat template would silently drop them."""
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


CONTRADICTION = "the same question with different answers"


def read_source(source: FileSource, seed: int = 0) -> SourceQuestions:
    """Read a source's distinct questions, in the order of its files (by name) and rows.

    A question that repeats with the same answer is kept once. With a layout, a question that repeats with another
    answer is dropped with all its rows. Ids are `name:number`, `name:file:number` if there are several files, or
    `name:id` with an id column. The column `reward_model.ground_truth` means the key `ground_truth` inside the column
    `reward_model`, unless a column has the whole name.
    """
    layout = find_layout(source.layout)
    first: dict[bytes, Question] = {}  # digest of a question -> its first occurrence
    rows, dropped = Counter[bytes](), Counter[str]()
    contradicted: set[bytes] = set()
    location_of_id: dict[str, str] = {}
    bad: list[tuple[Row, str]] = []  # rows that cannot be used, and why
    number = 0
    maximum = None if source.limit is None else min(source.limit, sys.maxsize)
    every = read_rows(source.path, source.subset, source.split, _wanted(source), with_bad=True)
    for row in islice(every, maximum):
        number += 1
        try:
            question = _question(row, source, seed)
            if source.id_column and location_of_id.setdefault(question.id, row.location) is not row.location:
                raise UserError(
                    f"{row.location} has the {source.id_column} {question.id.partition(':')[2]!r} of "
                    f"{location_of_id[question.id]} again; ids must be distinct: fix them, or remove "
                    f"{of_source('id_column')} to number the rows"
                )
            identity = question.id if layout and layout.is_whole else question.key
            digest = blake2b(identity.encode(), digest_size=16).digest()
            rows[digest] += 1
            earlier = first.setdefault(digest, question)
            if (earlier.reference, earlier.domain) != (question.reference, question.domain):
                if not layout:
                    raise UserError(_contradiction(earlier, question))
                contradicted.add(digest)
        except DroppedRow as reason:
            dropped[str(reason)] += 1
        except UserError as problem:
            bad.append((row, str(problem)))
            if len(bad) == _MOST_BAD:
                break
    if bad:
        raise UserError(_problems(bad, source.path, number))
    if not number:
        raise UserError(f"{source.path} is empty; {of_source('path')} must contain at least one row")
    if contradicted:
        dropped[CONTRADICTION] = sum(rows[digest] for digest in contradicted)
    kept = [question for digest, question in first.items() if digest not in contradicted]
    if layout and not kept:
        raise UserError(
            f"the layout {layout.name} dropped all {dropped.total():,} rows of {source.path} ({reasons(dropped)}); "
            f"choose another {of_source('layout')}, split or file"
        )
    repeated = number - dropped.total() - len(kept)
    return SourceQuestions(source, kept, num_rows=number, num_repeated=repeated, dropped=dict(dropped))


_MOST_BAD = 1_000  # stop reading after this many bad rows
_SHOWN, _NAMED = 10, 5  # problems in a message, and rows that have the same one


def _problems(bad: Sequence[tuple[Row, str]], path: str, number: int) -> str:
    """Return one message on all rows that cannot be used; rows with the same problem stand together.

    A problem that each of the `number` rows has is the settings', and is told of the first row.
    """
    rows_of: dict[str, list[Row]] = {}
    for row, problem in bad:
        rows_of.setdefault(problem.removeprefix(row.location).lstrip(": "), []).append(row)
    if len(bad) == 1 or (len(rows_of) == 1 and len(bad) == number):
        return bad[0][1]
    lines = [f"{'at least ' if len(bad) == _MOST_BAD else ''}{len(bad):,} rows of {path} cannot be used:"]
    for problem, rows in list(rows_of.items())[:_SHOWN]:
        names = [row.location.removeprefix(path).strip() for row in rows[:_NAMED]]
        more = [f"{len(rows) - _NAMED:,} more"] if len(rows) > _NAMED else []
        colon = "" if problem.startswith(("has ", "is ")) and len(rows) == 1 else ":"
        lines.append(f"  {listed([*names, *more])}{colon} {problem}")
    rest = sum(len(rows) for rows in list(rows_of.values())[_SHOWN:])
    return "\n".join([*lines, *([f"  and {counted(rest, 'other row')}"] if rest else [])])


def read_commas(found: SourceQuestions, domains: Collection[str]) -> SourceQuestions:
    """Write the answers of some domains so that their commas have one reading, that of all answers together.

    Domains of mathematics and science are meant: `32,5` among `32,7` and `1,25` is 32.5, and `2,5` among them 2.5.
    """
    meant = {MATH_DOMAIN, SCIENCE_DOMAIN}.intersection(domains)

    def is_meant(question: Question) -> bool:
        is_json = question.domain == SCIENCE_DOMAIN and question.reference.lstrip().startswith("{")
        return question.domain in meant and not is_json

    commas = column_reading([question.reference for question in found.train if is_meant(question)])
    if commas is None:
        return found
    questions = [
        replace(one, reference=commas.write(one.reference)) if is_meant(one) and "," in one.reference else one
        for one in found.train
    ]
    return replace(found, train=questions, commas=commas)


def check_first_row(source: FileSource) -> None:
    """Check the layout, and the first row of local files: this finds a wrong path, column or layout early."""
    find_layout(source.layout)
    if is_local(source.path):
        for row in islice(read_rows(source.path, source.subset, source.split, _wanted(source)), 1):
            with suppress(DroppedRow):
                _question(row, source, seed=0)


def _wanted(source: FileSource) -> set[str] | None:
    """Return the columns to read, None for all; for a key inside a column, `column.key`, also `column`."""
    if source.domain == ENVIRONMENT_DOMAIN or (source.domain_column and not source.layout):
        return None  # the rows of an environment, or of several domains, which can be one of them
    columns: tuple[str | None, ...]
    columns = (
        source.prompt_column, source.context_column, source.answer_column, source.domain_column, *source.options_column
    )  # fmt: skip
    if layout := find_layout(source.layout):
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
    if row.problem:
        raise UserError(row.problem)
    try:
        column, key = source.id_column, row.key
        if column:
            key = _text(_cell(row, source, "id_column"), column, "an id is a string or a number")
        layout = find_layout(source.layout)
        asked = read_layout(row, layout, seed) if layout else read_columns(row, source, seed)
    except ValueError as problem:
        colon = "" if str(problem).startswith("has ") else ":"
        raise UserError(f"{row.location}{colon} {problem}") from None
    name, label = f"{source.label}:{key}", source.label
    return Question(name, asked.text, asked.reference, asked.domain, label, asked.messages, row.location)
