"""Reads a source's questions from the rows of files or of a dataset; a repeated question is kept once.

A bad row is an error that names the file, line, column and fix. With a layout, bad rows are dropped and counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from brorl.errors import UserError, source_setting
from brorl.format import counted, listed, short_repr
from brorl.prompts.columns import read_columns, read_key
from brorl.prompts.decimal_commas import column_reading, comma_line
from brorl.prompts.public_data import find_layout, read_layout
from brorl.prompts.question import ENVIRONMENT_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN, Question
from brorl.prompts.row import DroppedRow, Row
from brorl.prompts.row_readers import is_local, read_rows
from brorl.prompts.settings import FileSource
from brorl.prompts.source_questions import SourceQuestions, reasons

CONTRADICTION = "the same question with different answers"
_MAX_BAD = 1_000  # stop reading after this many bad rows
_SHOWN, _NAMED = 10, 5  # problems to list in a message, and rows to list per problem
_BadRow = tuple[str, str]  # location and problem


def read_source(source: FileSource, seed: int = 0) -> SourceQuestions:
    """Read a source's distinct questions, in the order of its files (by name) and rows.

    A question repeated with the same answer is kept once. With a layout, a question repeated with a different answer is
    dropped along with all its rows. Ids are `name:number`, `name:file:number` if there are several files, or `name:id`
    with an id column. A column setting `reward_model.ground_truth` means the key `ground_truth` inside the column
    `reward_model`, unless a column has that full name.
    """
    layout = find_layout(source.layout)
    questions: list[Question] = []
    dropped = Counter[str]()
    bad: list[_BadRow] = []
    num_rows = 0
    limit = None if source.limit is None else min(source.limit, sys.maxsize)
    rows = read_rows(source.path, source.subset, source.split, _wanted(source), with_bad=True)
    for row in islice(rows, limit):
        num_rows += 1
        try:
            questions.append(_question(row, source, seed))
        except DroppedRow as reason:
            dropped[str(reason)] += 1
        except UserError as problem:
            bad.append((row.location, str(problem)))
            if len(bad) == _MAX_BAD:
                break
    if not num_rows:
        raise UserError(f"{source.path} is empty; {source_setting('path')} must contain at least one row")
    same: dict[str, list[Question]] = {}  # the rows of each question
    for question in questions:
        same.setdefault(question.id if layout and layout.is_whole else question.key, []).append(question)
    contradicted = [key for key, (first, *repeats) in same.items() if not all(_agree(first, r) for r in repeats)]
    bad += _repeated_ids(questions, source)
    if layout is None:
        bad += [line for key in contradicted for line in _contradictions(*same[key])]
    if bad:
        raise UserError(_problems(bad, source.path, num_rows))
    if num_contradicted := sum(len(same.pop(key)) for key in contradicted):
        dropped[CONTRADICTION] = num_contradicted
    kept = [first for first, *_ in same.values()]
    if layout and not kept:
        raise UserError(
            f"the layout {layout.name} dropped all {dropped.total():,} rows of {source.path} ({reasons(dropped)}); "
            f"choose a different {source_setting('layout')}, split or file"
        )
    repeated = num_rows - dropped.total() - len(kept)
    return SourceQuestions(source, kept, num_rows=num_rows, num_repeated=repeated, dropped=dict(dropped))


def _question(row: Row, source: FileSource, seed: int) -> Question:
    if row.problem:
        raise UserError(row.problem)
    try:
        key = read_key(row, source)
        layout = find_layout(source.layout)
        question = read_layout(row, layout, seed) if layout else read_columns(row, source, seed)
    except ValueError as problem:
        colon = "" if str(problem).startswith("has ") else ":"
        raise UserError(f"{row.location}{colon} {problem}") from None
    return replace(question, id=f"{source.label}:{key}", source=source.label, location=row.location)


def _agree(first: Question, second: Question) -> bool:
    """Return whether two rows with the same question have the same answer."""
    return (first.reference, first.domain) == (second.reference, second.domain)


def _contradictions(first: Question, *repeats: Question) -> Iterator[_BadRow]:
    """Yield the rows that repeat the first row's question with a different answer or domain."""
    for question in repeats:
        if _agree(first, question):
            continue
        what, there, here = "answer", first.reference, question.reference
        if there == here:
            what, there, here = "domain", first.domain, question.domain
        yield (
            question.location,
            f"{question.location} has the question of {first.location} with a different {what} ({short_repr(there)} "
            f"there, {short_repr(here)} here); the same response would be both right and wrong: correct one row or "
            "delete both",
        )


def _repeated_ids(questions: Sequence[Question], source: FileSource) -> list[_BadRow]:
    """Return the rows that repeat the id of an earlier row."""
    first: dict[str, Question] = {}
    return [
        (
            question.location,
            f"{question.location} has the same {source.id_column} {question.id.partition(':')[2]!r} as "
            f"{earlier.location}; ids must be distinct: fix them, or remove {source_setting('id_column')}",
        )
        for question in questions
        if (earlier := first.setdefault(question.id, question)) is not question
    ]


def _problems(bad: Sequence[_BadRow], path: str, num_rows: int) -> str:
    """Return a single message about all unusable rows, grouped by problem.

    A problem shared by all `num_rows` rows comes from the settings, so the message names only the first row.
    """
    rows_of: dict[str, list[str]] = {}  # problem -> rows
    for location, problem in bad:
        row = location.removeprefix(path).strip()
        rows_of.setdefault(problem.removeprefix(location).lstrip(": "), []).append(row)
    if len(bad) == 1 or (len(rows_of) == 1 and len(bad) == num_rows):
        return bad[0][1]
    lines = [f"{'at least ' if len(bad) >= _MAX_BAD else ''}{len(bad):,} rows of {path} cannot be used:"]
    for problem, rows in list(rows_of.items())[:_SHOWN]:
        more = [f"{len(rows) - _NAMED:,} more"] if len(rows) > _NAMED else []
        colon = "" if problem.startswith(("has ", "is ")) and len(rows) == 1 else ":"
        lines.append(f"  {listed([*rows[:_NAMED], *more])}{colon} {problem}")
    if rest := sum(len(rows) for rows in list(rows_of.values())[_SHOWN:]):
        lines.append(f"  and {counted(rest, 'other row')}")
    return "\n".join(lines)


def read_commas(source: SourceQuestions, domains: Collection[str]) -> SourceQuestions:
    """Rewrite answers with unambiguous commas. All answers together decide how to read the commas.

    Only mathematics and science in `domains` are affected: `32,5` among `32,7` and `1,25` is 32.5, and `2,5` is 2.5.
    """
    meant = {MATH_DOMAIN, SCIENCE_DOMAIN}.intersection(domains)

    def is_meant(question: Question) -> bool:
        is_json = question.domain == SCIENCE_DOMAIN and question.reference.lstrip().startswith("{")
        return question.domain in meant and not is_json

    commas = column_reading([question.reference for question in source.train if is_meant(question)])
    if commas is None:
        return source
    questions = [
        replace(question, reference=commas.write(question.reference))
        if is_meant(question) and "," in question.reference
        else question
        for question in source.train
    ]
    return replace(source, train=questions, commas=comma_line(commas))


def check_first_row(source: FileSource) -> None:
    """Check the layout and the first row of local files, to catch a wrong path, column or layout early."""
    find_layout(source.layout)
    if is_local(source.path):
        for row in islice(read_rows(source.path, source.subset, source.split, _wanted(source)), 1):
            with suppress(DroppedRow):
                _question(row, source, seed=0)


def _wanted(source: FileSource) -> set[str] | None:
    """Return the columns to read, or None for all. Reading a key inside a column, `column.key`, also needs `column`."""
    if source.domain == ENVIRONMENT_DOMAIN or (source.domain_column and not source.layout):
        return None  # an environment needs whole rows, and a domain column may name that domain
    columns: tuple[str | None, ...]
    columns = (
        source.prompt_column, source.context_column, source.answer_column, source.domain_column, *source.options_column
    )  # fmt: skip
    if layout := find_layout(source.layout):
        columns = (*layout.columns, *layout.optional)
    used = [*columns, source.id_column]
    return {name for column in used if column for name in (column, column.partition(".")[0])}
