"""A guess at the meaning of a data file: how its rows are read, and the verifier.

Only the first rows are read. If there is no clear guess, a `UserError` names the columns and the setting to give.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from brorl.errors import UserError
from brorl.paths import split_revision
from brorl.prompts.boxed import last_box
from brorl.prompts.columns import USUAL_NAMES
from brorl.prompts.countdown import COUNTDOWN_DOMAIN, is_countdown_reference
from brorl.prompts.layouts.layout import DroppedRow
from brorl.prompts.layouts.table import LAYOUTS, read_layout
from brorl.prompts.option_columns import ChoiceColumns, find_choices, option_groups
from brorl.prompts.options import CHOICE_DOMAIN
from brorl.prompts.question import Question
from brorl.prompts.row_files import MISSING, Row
from brorl.prompts.rows import read_rows
from brorl.prompts.settings import FileSource
from brorl.wording import of_source

_ROWS = 200  # that the guess is made from
_MARKER = "####"  # before the answer in GSM8K's form
_MATH_DOMAIN = "math"
_MOSTLY = 0.9
_LONGEST_ANSWER = 200  # characters; longer texts are solutions, not answers
_MATH_WORDS = {"pi", "sqrt", "frac", "sin", "cos", "tan", "log", "exp", "inf", "and", "or"}
_PAIRS = (("yes", "no"), ("true", "false"))


class Guess(NamedTuple):
    """The probable meaning of a file."""

    source: FileSource  # how its rows are read
    domain: str  # domain of the questions; a layout decides it
    example: str  # an answer
    domain_reason: str  # the reason for the domain
    words: tuple[str, ...] = ()  # the answers, if all are words such as yes and no
    unused: tuple[str, ...] = ()  # columns of text that are not read


def guess_meaning(
    path: str,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    domain: str | None = None,
    options_column: Sequence[str] = (),
    first_option: int | None = None,
) -> Guess:
    """Guess the meaning of the columns of a file, a folder or a dataset; columns or the domain may be known.

    A layout is chosen if all its columns are there, and it reads the rows. For mathematics, columns that are clear by
    themselves take precedence. Columns of options make multiple-choice questions, unless another domain is known.

    Raises:
        UserError: If the file cannot be read, or there is no clear guess.
    """
    first = next(read_rows(path, None, "train", ()), None)
    if first is None:
        raise UserError(f"{path} is empty; it must contain at least one question with an answer")

    def every() -> Iterator[Row]:
        return read_rows(path, None, "train", first.columns)

    rows = list(islice(every(), _ROWS))
    given = prompt_column or answer_column or domain or options_column
    fitting = None if given else _fitting_layout(path, rows)
    if fitting and fitting.domain != _MATH_DOMAIN:
        return fitting
    try:
        if options_column or domain in (None, CHOICE_DOMAIN):
            groups = option_groups(rows, options_column)
            choices = find_choices(path, rows, every(), groups, answer_column, first_option)
            if choices is not None:
                return _choice_guess(path, rows, choices, prompt_column, domain or CHOICE_DOMAIN)
        return _guess_columns(path, rows, prompt_column, answer_column, domain)
    except UserError:
        if fitting:
            return fitting
        raise


def _source(path: str, **settings: Any) -> FileSource:
    """Return a source whose name has no colon, since the ids of its questions begin with it."""
    stem = Path(split_revision(path)[0]).stem
    return FileSource(path=path, name=stem.replace(":", "-") if ":" in stem else None, **settings)


def _fitting_layout(path: str, rows: Sequence[Row]) -> Guess | None:
    """Return the layout that reads the most rows, among equals the one with the most columns; None if there is none."""
    best: tuple[int, int] = (0, 0)
    guess: Guess | None = None
    for name, layout in LAYOUTS.items():
        found: list[Question] = []
        with suppress(UserError):  # a row of another layout
            if not {*layout.columns} <= {*rows[0].columns}:
                continue
            for row in rows:
                with suppress(DroppedRow):
                    found.append(read_layout(row, layout, seed=0))
            if found and (len(found), len(layout.columns)) > best:
                best, why = (len(found), len(layout.columns)), f"the columns are those of the layout {name}"
                guess = Guess(_source(path, layout=name), found[0].domain, found[0].reference, why)
    return guess


def _choice_guess(
    path: str, rows: Sequence[Row], choices: ChoiceColumns, prompt_column: str | None, domain: str
) -> Guess:
    taken = {*choices.options, choices.answer}
    prompt = _column(path, rows, "prompt", prompt_column, taken)
    source = _source(
        path, prompt_column=prompt, answer_column=choices.answer, options_column=choices.options,
        first_option=choices.first, domain=domain,
    )  # fmt: skip
    example = next(str(value) for row in rows if not _is_missing(value := row.cell(choices.answer)))
    return Guess(source, domain, example, "multiple choice", (), _unused(rows, {prompt, *taken}))


def _guess_columns(
    path: str, rows: Sequence[Row], prompt_column: str | None, answer_column: str | None, domain: str | None
) -> Guess:
    """Guess the columns and the domain of rows that are not in a layout and have no options."""
    prompt = _column(path, rows, "prompt", prompt_column, {answer_column} if answer_column else ())
    answer = _column(path, rows, "answer", answer_column, (prompt,))
    values = [value for row in rows if not _is_missing(value := row.cell(answer))]
    texts = [str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values]
    after = _MARKER if texts and all(_MARKER in text for text in texts) else None
    if after:
        texts = [text.rpartition(after)[2].strip() for text in texts]
    words = next((pair for pair in _PAIRS if texts and {text.lower() for text in texts} <= {*pair}), ())
    meant, reason = (domain, "as given") if domain else _domain(path, answer, texts, words)
    source = _source(path, prompt_column=prompt, answer_column=answer, answer_after=after, domain=meant)
    return Guess(source, meant, texts[0] if texts else "", reason, words, _unused(rows, {prompt, answer}))


def _unused(rows: Sequence[Row], taken: Collection[str]) -> tuple[str, ...]:
    """Return the columns of text that are not read, such as a passage that the question is about."""
    used = {name.partition(".")[0] for name in taken} | {*taken}
    return tuple(
        name
        for name in rows[0].columns
        if name not in used and all(isinstance(row.values.get(name), str | None) for row in rows)
    )


def _column(path: str, rows: Sequence[Row], what: str, given: str | None, taken: Collection[str]) -> str:
    """Return the column of the question or the answer: the given one, or the first with a usual name that fits."""
    columns = list(rows[0].columns)
    listed = ", ".join(columns) or "none"
    if given is not None:
        if {given, given.partition(".")[0]} & {*columns}:
            return given
        raise UserError(
            f"{path} has no column {given!r} (columns: {listed}); name one of them with {of_source(f'{what}_column')}"
        )
    spelled = {column.lower(): column for column in reversed(columns) if column not in taken}
    names = USUAL_NAMES[f"{what}_column"]
    for column in (spelled[name] for name in names if name in spelled):
        inside = rows[0].values.get(column)  # of a column of objects, such as reward_model.ground_truth
        keys = [f"{column}.{name}" for name in names if name in inside] if isinstance(inside, Mapping) else []
        for candidate in (column, *keys):
            values = [value for row in rows if not _is_missing(value := row.cell(candidate))]
            if values and candidate not in taken and all(_fits(value, what) for value in values):
                return candidate
    role = "the question" if what == "prompt" else "the reference answer"
    raise UserError(
        f"{path}: no column is clearly {role} (columns: {listed}); name it with {of_source(f'{what}_column')}"
    )


def _is_missing(value: Any) -> bool:
    """Whether a row has no value; the reading of the rows names such a row."""
    return value is MISSING or value is None or (isinstance(value, str) and not value.strip())


def _fits(value: Any, what: str) -> bool:
    """Whether a value can be a question (text, messages) or an answer (text, a number, true or false)."""
    if what == "prompt" and isinstance(value, list):
        return bool(value) and all(isinstance(turn, Mapping) for turn in value)
    return isinstance(value, str) or (what == "answer" and isinstance(value, int | float) and isfinite(value))


def _domain(path: str, column: str, texts: Sequence[str], words: Sequence[str]) -> tuple[str, str]:
    """Return the domain that the answers belong to, and why."""
    if not texts:
        return _MATH_DOMAIN, "there is no answer"
    if all(is_countdown_reference(text) for text in texts):
        return COUNTDOWN_DOMAIN, "the answers are puzzles such as `3 5 7 -> 22`"
    if words:
        return _MATH_DOMAIN, f"which compares {' and '.join(words)} as words, in upper or lower case"
    solutions = [text for text in texts if len(text) > _LONGEST_ANSWER]
    if solutions and all(last_box(text) is not None for text in solutions):
        raise UserError(
            f"{path}: column {column!r} contains whole solutions with the answer in \\boxed{{}}; write the answers "
            f"into another column and name it with {of_source('answer_column')}"
        )
    if sum(map(_looks_mathematical, texts)) >= _MOSTLY * len(texts):
        return _MATH_DOMAIN, "the answers look like numbers or formulas"
    strange = next(text for text in texts if not _looks_mathematical(text))
    raise UserError(
        f"{path}: the answers in column {column!r}, such as {strange[:60]!r}, do not look like numbers or formulas; "
        f"give {of_source('domain', 'math')} if they are mathematics, {of_source('domain', 'NAME')} with a verifier "
        f"that you write (docs/how-to/verifiers.md), or name another column with {of_source('answer_column')}"
    )


def _looks_mathematical(text: str) -> bool:
    """Whether an answer is a number, a formula, or the letter of a choice."""
    if len(text) > _LONGEST_ANSWER:
        return False
    if "\\" in text or re.fullmatch(r"\(?[A-J]\)?", text):
        return True
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)}
    return words <= _MATH_WORDS and any(character.isdigit() for character in text)
