"""Guesses how to read a data file: its layout, or its columns and the verifier for its answers.

If the guess is unclear, a `UserError` lists the columns and names the setting to add.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from brorl.errors import UserError, source_setting
from brorl.prompts.answer_rules import find_domain, looks_mathematical
from brorl.prompts.columns import USUAL_NAMES, conversation, without_answer
from brorl.prompts.option_columns import find_choice, option_groups
from brorl.prompts.options import whole_number
from brorl.prompts.public_data import LAYOUTS, Layout, read_layout
from brorl.prompts.question import MATH_DOMAIN, SCIENCE_DOMAIN, Question
from brorl.prompts.row import DroppedRow, Row, is_missing
from brorl.prompts.row_readers import read_rows
from brorl.prompts.settings import FileSource
from brorl.storage import split_revision

_ROWS = 200  # number of rows that the guess reads
_MARKER = "####"  # precedes the answer in GSM8K's format
_MOSTLY = 0.9
_MAX_CLASSES, _ROWS_PER_CLASS = 10, 4
_CONTEXTS = (
    "context", "passage", "article", "paragraph", "story", "document", "premise", "body", "background", "scenario",
    "situation", "narrative", "dialogue", "excerpt", "table",
)  # fmt: skip
"""Common names of columns with text that the question is about."""
_INSTRUCTION, _INSTRUCTION_CONTEXT = "instruction", "input"
"""If the question is in the column `instruction`, its context is in the column `input`."""
_CLASSES = ("label", "labels", "class", "category")
"""Names of columns that may contain class indices."""
_NOT_ASKED = re.compile(
    r"sol|ration|expl|reason|cot|proof|messag|conversation|respon|completion|answer|generat|th(?:ought|ink)|test|hint|"
    r"step|decompos|meta|info|source|url|equation|program|code_|prompt|^exp$|^id$|_id$|wrong|distract"
)
"""Matches names of columns with the answer, its derivation, or the row's origin."""


class Guess(NamedTuple):
    """The likely meaning of a file."""

    source: FileSource  # settings for reading the rows
    domain: str  # set by the layout, if there is one
    example: str  # the first answer
    domain_reason: str
    words: tuple[str, ...] = ()  # the distinct answers, if all are words such as yes and no
    unused: tuple[str, ...] = ()  # text columns that are not read
    long_unused: tuple[str, ...] = ()  # columns that are not read and have more text than the question


def guess_meaning(
    path: str,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    domain: str | None = None,
    options_column: Sequence[str] = (),
    first_option: int | None = None,
) -> Guess:
    """Guess what the columns of a file, a folder or a dataset mean. Any given columns and domain are kept.

    A layout is chosen if all its columns exist and it can read the rows. For mathematics, columns with clear names take
    precedence over a layout. Option columns mean multiple-choice questions, unless the given domain is not science.
    """
    rows = _first_rows(path)
    is_given = prompt_column or answer_column or domain or options_column
    by_layout = None if is_given else _guess_layout(path, rows)
    if by_layout and by_layout.domain != MATH_DOMAIN:
        return by_layout
    try:
        guess = None
        if options_column or domain in (None, SCIENCE_DOMAIN):
            guess = _guess_choice(path, rows, prompt_column, answer_column, domain, options_column, first_option)
        return _with_context(guess or _guess_columns(path, rows, prompt_column, answer_column, domain), rows)
    except UserError:
        if by_layout:
            return by_layout
        raise


def _first_rows(path: str) -> list[Row]:
    """Return the first readable rows. Unreadable rows are reported when all questions are read."""
    start = list(islice(read_rows(path, None, "train", None, with_bad=True), _ROWS))
    if not start:
        raise UserError(f"{path} is empty; it must contain at least one question with an answer")
    rows = [row for row in start if not row.problem]
    if not rows:
        raise UserError(str(start[0].problem))
    return rows


def _good_rows(path: str) -> Iterator[Row]:
    return (row for row in read_rows(path, None, "train", None, with_bad=True) if not row.problem)


def _present(rows: Sequence[Row], column: str) -> list[Any]:
    """Return a column's values that are not missing."""
    return [value for row in rows if not is_missing(value := row.cell(column))]


def _source(path: str, **settings: Any) -> FileSource:
    """Return a source, with colons removed from its name because question ids begin with `name:`."""
    stem = Path(split_revision(path)[0]).stem
    return FileSource(path=path, name=stem.replace(":", "-") if ":" in stem else None, **settings)


def _guess_layout(path: str, rows: Sequence[Row]) -> Guess | None:
    """Return the layout that reads the most rows, breaking ties by the most columns; None if none fits."""
    named = [layout for layout in LAYOUTS.values() if layout.columns and {*layout.columns} <= {*rows[0].columns}]
    fitting = [(layout, questions) for layout in named if (questions := _read_by(layout, rows))]
    if not fitting:
        return None
    layout, (first, *_) = max(fitting, key=lambda pair: (len(pair[1]), len(pair[0].columns)))
    why = f"the columns match the layout {layout.name}"
    return Guess(_source(path, layout=layout.name), first.domain, first.reference, why)


def _read_by(layout: Layout, rows: Sequence[Row]) -> list[Question]:
    """Return the questions that a layout reads from the rows; empty if the layout does not fit."""
    questions: list[Question] = []
    for row in rows:
        try:
            questions.append(read_layout(row, layout, seed=0))
        except DroppedRow:
            continue
        except UserError:  # the row belongs to a different layout
            return []
    strange = sum(not looks_mathematical(question.reference) for question in questions)
    is_math = bool(questions) and questions[0].domain == MATH_DOMAIN
    return [] if is_math and strange > (1 - _MOSTLY) * len(questions) else questions


def _guess_choice(
    path: str,
    rows: Sequence[Row],
    prompt_column: str | None,
    answer_column: str | None,
    domain: str | None,
    options_column: Sequence[str],
    first_option: int | None,
) -> Guess | None:
    """Guess the columns of multiple-choice questions; None if the rows have no options."""
    groups = option_groups(rows, options_column)
    choice = find_choice(path, rows, _good_rows(path), groups, answer_column, first_option)
    if choice is None:
        return None
    taken = {*choice["options_column"], choice["answer_column"]}
    prompt = _column(path, rows, "prompt_column", prompt_column, taken)
    source = _source(path, **choice, prompt_column=prompt, domain=domain or SCIENCE_DOMAIN)
    return Guess(source, source.domain, str(_present(rows, source.answer_column)[0]), "multiple choice")


def _guess_columns(
    path: str, rows: Sequence[Row], prompt_column: str | None, answer_column: str | None, domain: str | None
) -> Guess:
    """Guess the columns and the domain of rows without a layout and without options."""
    prompt = _column(path, rows, "prompt_column", prompt_column, {answer_column} if answer_column else ())
    answer = prompt  # if the messages end with the answer
    if answer_column != prompt:
        try:
            answer = _column(path, rows, "answer_column", answer_column, (prompt,))
        except UserError:
            if answer_column or not all(_own_answer(row.cell(prompt)) is not None for row in rows):
                raise
    cells = _present(rows, answer)
    values = [_answer_in(cell) for cell in cells]
    if not domain:
        _reject_classes(path, answer, values)
    texts = [str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values]
    after = _MARKER if texts and all(_MARKER in text for text in texts) else None
    if after:
        texts = [text.rpartition(after)[2].strip() for text in texts]
    has_aliases = any(isinstance(cell, Mapping) and "aliases" in cell for cell in cells)
    named = f"{answer}.value" if has_aliases else answer
    meant, reason, words = find_domain(path, named, texts, domain)
    source = _source(
        path,
        prompt_column=prompt,
        answer_column=answer if meant == SCIENCE_DOMAIN else named,  # only the science verifier reads aliases
        answer_after=after,
        domain=meant,
    )
    return Guess(source, meant, texts[0] if texts else "", reason, words)


def _column(path: str, rows: Sequence[Row], setting: str, stated: str | None, taken: Collection[str]) -> str:
    """Return the column for a setting: the one given, or the first with a common name and suitable values."""
    columns = ", ".join(rows[0].columns) or "none"
    if stated is not None:
        if {stated, stated.partition(".")[0]} & {*rows[0].columns}:
            return stated
        raise UserError(
            f"{path} has no column {stated!r} (columns: {columns}); name one of them with {source_setting(setting)}"
        )
    for candidate in _candidates(rows[0], setting):
        values = _present(rows, candidate)
        if candidate not in taken and values and all(map(_CAN_BE[setting], values)):
            return candidate
    raise UserError(
        f"{path}: no column is clearly {_NOUNS[setting]} (columns: {columns}); name it with {source_setting(setting)}"
    )


def _candidates(row: Row, setting: str) -> Iterator[str]:
    """Yield columns with a common name, each followed by its keys with a common name: `reward_model.ground_truth`."""
    names = USUAL_NAMES[setting]
    spelled = {column.lower(): column for column in reversed(row.columns)}
    for column in (spelled[name] for name in names if name in spelled):
        yield column
        inside = row.values.get(column)
        if isinstance(inside, Mapping):
            yield from (f"{column}.{name}" for name in (*names, "value") if name in inside)


def _can_be_question(value: Any) -> bool:
    return isinstance(value, str) or _are_turns(value)


def _can_be_answer(value: Any) -> bool:
    if isinstance(value, Mapping):
        return {"value", "aliases"} <= {*value}
    if isinstance(value, int | float):
        return isfinite(value)
    return isinstance(value, str) or (_are_turns(value) and _own_answer(value) is not None)


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


_CAN_BE = {"prompt_column": _can_be_question, "answer_column": _can_be_answer}
_NOUNS = {"prompt_column": "the question", "answer_column": "the reference answer"}


def _own_answer(cell: Any) -> Any:
    """Return the answer that ends a conversation; None for other values."""
    messages = conversation(cell)
    return without_answer(messages)[1] if messages else None


def _answer_in(cell: Any) -> Any:
    """Return the answer in a cell, which may also hold aliases, or a conversation that ends with the answer."""
    if isinstance(cell, Mapping) and "value" in cell:
        return cell["value"]
    own = _own_answer(cell)
    return cell if own is None else own


def _reject_classes(path: str, column: str, values: Sequence[Any]) -> None:
    """Reject answers that are class indices, since their meaning is unknown."""
    indices = [index for value in values if (index := whole_number(value)) is not None and index <= _MAX_CLASSES]
    is_class = column.rpartition(".")[2].lower() in _CLASSES and len(indices) == len(values)
    if is_class and len(set(indices)) <= len(values) // _ROWS_PER_CLASS:
        listed = ", ".join(map(str, sorted(set(indices))))
        raise UserError(
            f"{path}: column {column!r} contains only {listed}, which look like class indices; write the class names "
            f"to a column, name it with {source_setting('answer_column')}, and list them in the question; "
            f"or give {source_setting('domain', 'math')} if these numbers are the answers"
        )


def _with_context(guess: Guess, rows: Sequence[Row]) -> Guess:
    """Add the context column and the unused columns to a guess."""
    source = guess.source
    taken = {source.prompt_column, source.answer_column, *source.options_column}
    taken |= {name.partition(".")[0] for name in taken}
    free = [name for name in rows[0].columns if name not in taken]
    texts = [name for name in free if all(isinstance(row.values.get(name), str | None) for row in rows)]
    context = _context_column(rows, source.prompt_column, texts)
    question_length = _num_characters(rows, source.prompt_column)
    askable = [name for name in free if name != context and not _NOT_ASKED.search(name.lower())]
    long = tuple(name for name in askable if _num_characters(rows, name) > question_length)
    return guess._replace(
        source=source.model_copy(update={"context_column": context}),
        unused=tuple(name for name in texts if name not in (context, *long)),
        long_unused=long,
    )


def _context_column(rows: Sequence[Row], prompt_column: str, texts: Sequence[str]) -> str | None:
    """Return the text column whose name marks it as the question's context, or None."""
    names = (*_CONTEXTS, _INSTRUCTION_CONTEXT) if prompt_column.lower() == _INSTRUCTION else _CONTEXTS
    columns = [column for name in names for column in texts if column.lower() == name]
    return next((column for column in columns if _present(rows, column)), None)


def _num_characters(rows: Sequence[Row], column: str) -> int:
    """Count the characters in a column, including lists and objects."""
    return sum(len(str(value)) for value in _present(rows, column))
