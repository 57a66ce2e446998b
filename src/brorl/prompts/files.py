"""The user's questions: files and datasets to `Question`s, each distinct one once.

A row that is not a question with an answer is an error of one line with the file, the line, the column and the fix; no
row is skipped or guessed. A layout drops rows that cannot be verified, and they are counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice

from brorl.errors import UserError
from brorl.format import short_repr
from brorl.prompts.columns import read_columns, read_key
from brorl.prompts.layouts.layout import DroppedRow
from brorl.prompts.layouts.table import all_dropped, find_layout, read_layout
from brorl.prompts.question import Question
from brorl.prompts.row_files import Row
from brorl.prompts.rows import is_local, read_rows
from brorl.prompts.settings import FileSource
from brorl.wording import of_source

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
                f"{of_source('id_column')} to number the rows"
            )
        digest = blake2b(question.key.encode(), digest_size=16).digest()
        rows[digest] += 1
        earlier = first.setdefault(digest, question)
        if (earlier.reference, earlier.domain) != (question.reference, question.domain):
            if not layout:
                raise UserError(_contradiction(earlier, question))
            contradicted.add(digest)
    if not number:
        raise UserError(f"{source.path} is empty; {of_source('path')} must contain at least one row")
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
    try:
        key = read_key(row, source)
        layout = find_layout(source.layout) if source.layout else None
        question = read_layout(row, layout, seed) if layout else read_columns(row, source, seed)
    except ValueError as problem:
        colon = "" if str(problem).startswith("has ") else ":"
        raise UserError(f"{row.location}{colon} {problem}") from None
    return named(question, source.label, key, row.location)


def named(question: Question, source: str, key: str, location: str) -> Question:
    """Return a question with its place: the source, its key in there, and the file with the row."""
    return replace(question, id=f"{source}:{key}", source=source, location=location)
