"""A guess at the meaning of a data file: the columns of question and answer, and the verifier; or a layout.

Only the first rows are read. If there is no clear guess, a `UserError` names the columns and the option to set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

from brorl.errors import UserError
from brorl.prompts.boxed import last_box
from brorl.prompts.countdown import COUNTDOWN_DOMAIN, is_countdown_reference
from brorl.prompts.files import USUAL_NAMES
from brorl.prompts.layouts.layout import DroppedRow
from brorl.prompts.layouts.table import LAYOUTS, read_fields
from brorl.prompts.row_files import MISSING, Row
from brorl.prompts.rows import read_rows

_ROWS = 200  # that the guess is made from
_MARKER = "####"  # before the answer in GSM8K's form
_MATH_DOMAIN = "math"
_MOSTLY = 0.9
_LONGEST_ANSWER = 200  # characters; longer texts are solutions, not answers
_MATH_WORDS = {"pi", "sqrt", "frac", "sin", "cos", "tan", "log", "exp", "inf", "and", "or"}


class Guess(NamedTuple):
    """The probable meaning of a file."""

    # layout of a public dataset, which decides the columns and the domain; None for the columns below
    layout: str | None
    prompt_column: str  # column of the question; empty with a layout, as the answer's
    answer_column: str  # column of the answer; with a dot, a key inside a column
    answer_after: str | None  # text before the answer, at its last occurrence; None if the answer is the whole column
    domain: str  # domain of the questions
    example: str  # an answer
    domain_reason: str  # the reason for the domain


def guess_meaning(
    path: str, prompt_column: str | None = None, answer_column: str | None = None, domain: str | None = None
) -> Guess:
    """Guess the meaning of the columns of a file, a folder or a dataset; columns or the domain may be known.

    A layout is chosen if all its columns are there, and it reads the rows. For mathematics, columns that are clear by
    themselves take precedence.

    Raises:
        UserError: If the file cannot be read, or there is no clear guess.
    """
    first = next(read_rows(path, None, "train", ()), None)
    if first is None:
        raise UserError(f"{path} is empty; it must contain at least one question with an answer")
    rows = list(islice(read_rows(path, None, "train", first.columns), _ROWS))
    columns = list(first.columns)
    given = prompt_column or answer_column or domain
    fitting = None if given else _fitting_layout(columns, rows)
    if fitting and fitting.domain != _MATH_DOMAIN:
        return fitting
    try:
        return _guess_columns(path, columns, rows, prompt_column, answer_column, domain)
    except UserError:
        if fitting:
            return fitting
        raise


def _fitting_layout(columns: Sequence[str], rows: Sequence[Row]) -> Guess | None:
    """Return the layout that reads the most rows, among equals the one with the most columns; None if there is none."""
    fitting: list[tuple[int, int, Guess]] = []
    for name, layout in LAYOUTS.items():
        if not set(layout.columns) <= set(columns):
            continue
        fields = []
        try:
            for row in rows:
                with suppress(DroppedRow):
                    fields.append(read_fields(row, layout, seed=0))
        except UserError:  # a row of another layout
            continue
        if fields:
            why = f"the columns are those of the layout {name}"
            guess = Guess(name, "", "", None, fields[0].domain, fields[0].reference, why)
            fitting.append((len(fields), len(layout.columns), guess))
    return max(fitting, key=lambda entry: entry[:2])[2] if fitting else None


def _guess_columns(
    path: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    prompt_column: str | None,
    answer_column: str | None,
    domain: str | None,
) -> Guess:
    """Guess the columns and the domain of rows that are not in a layout."""
    prompt = _column(path, columns, rows, "prompt", prompt_column, taken=answer_column)
    answer = _column(path, columns, rows, "answer", answer_column, taken=prompt)
    values = [row.cell(answer) for row in rows]
    texts = ["" if value is MISSING else str(value).strip() for value in values]
    after = _MARKER if all(_MARKER in text for text in texts) else None
    if after:
        texts = [text.rpartition(after)[2].strip() for text in texts]
    meant, reason = (domain, "as given") if domain else _domain(path, answer, texts)
    return Guess(None, prompt, answer, after, meant, texts[0], reason)


def _column(
    path: str, columns: Sequence[str], rows: Sequence[Row], what: str, given: str | None, taken: str | None
) -> str:
    """Return the column of the question or the answer: the given one, or the first with a usual name that fits."""
    listed = ", ".join(columns) or "none"
    if given is not None:
        if given in columns or given.partition(".")[0] in columns:
            return given
        raise UserError(f"{path} has no column {given!r} (columns: {listed}); give --{what}-column one of them")
    spelled = {column.lower(): column for column in reversed(columns) if column != taken}
    names = USUAL_NAMES[f"{what}_column"]
    for name in names:
        if name not in spelled:
            continue
        column = spelled[name]
        inside = _keys(rows, column, names) if what == "answer" else []
        for candidate in (column, *inside):
            if all(_fits(row.cell(candidate), what) for row in rows):
                return candidate
    role = "the question" if what == "prompt" else "the reference answer"
    raise UserError(f"{path}: no column is clearly {role} (columns: {listed}); give --{what}-column NAME")


def _keys(rows: Sequence[Row], column: str, names: Sequence[str]) -> list[str]:
    """Return the keys with a usual name inside a column of objects, such as reward_model.ground_truth."""
    value = rows[0].values.get(column)
    return [f"{column}.{name}" for name in names if name in value] if isinstance(value, Mapping) else []


def _fits(value: Any, what: str) -> bool:
    """Whether a value can be a question (text, messages) or an answer (text, a number)."""
    if isinstance(value, str):
        return bool(value.strip())
    if what == "prompt":
        return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _domain(path: str, column: str, texts: Sequence[str]) -> tuple[str, str]:
    """Return the domain that the answers belong to, and why."""
    if all(is_countdown_reference(text) for text in texts):
        return COUNTDOWN_DOMAIN, "the answers are puzzles such as `3 5 7 -> 22`"
    solutions = [text for text in texts if len(text) > _LONGEST_ANSWER]
    if solutions and all(last_box(text) is not None for text in solutions):
        raise UserError(
            f"{path}: column {column!r} contains whole solutions with the answer in \\boxed{{}}; write the answers "
            "into another column and give --answer-column NAME"
        )
    if sum(map(_looks_mathematical, texts)) >= _MOSTLY * len(texts):
        return _MATH_DOMAIN, "the answers look like numbers or formulas"
    strange = next(text for text in texts if not _looks_mathematical(text))
    raise UserError(
        f"{path}: the answers in column {column!r}, such as {strange[:60]!r}, do not look like numbers or formulas; "
        "give --domain NAME and write a verifier for it (docs/how-to/verifiers.md), --domain math if math-verify can "
        "read them, or another --answer-column"
    )


def _looks_mathematical(text: str) -> bool:
    """Whether an answer is a number, a formula, or the letter of a choice."""
    if len(text) > _LONGEST_ANSWER:
        return False
    if "\\" in text or re.fullmatch(r"\(?[A-J]\)?", text):
        return True
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)}
    return words <= _MATH_WORDS and any(character.isdigit() for character in text)
