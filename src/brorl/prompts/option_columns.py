"""Which columns of a file hold the options of multiple-choice questions, and which one names the right option.

Options are recognized by their form (`options.read_options`): one column, or columns whose names differ by a letter or
a number. The answer column is one whose values name an option in nearly all rows. An index counts from 0 if 0 occurs,
and from 1 if the number of options occurs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple, get_args

from brorl.errors import UserError
from brorl.format import short_repr
from brorl.prompts.options import Options, is_label, read_options, right_option, whole_number
from brorl.prompts.row_files import MISSING, Row
from brorl.wording import of_source

_MOSTLY = 0.9
_WRONG = re.compile(r"distractor|incorrect|wrong|false")
_CLEAR = re.compile(rf"choice|option|ending|candidate|alternative|^opts?$|^op$|{_WRONG.pattern}")
_POSSIBLE = re.compile(r"answers?$|^ans$|^sol(?:ution)?s?$")
_MEMBER = re.compile(r"(.*?)[ _.-]*\(?([A-Za-z]|[0-9]{1,2})\)?")
_ANSWERS = (
    "answer", "answerkey", "answeridx", "answerindex", "answerletter", "correctanswer", "correctoption",
    "correctchoice", "correctindex", "correct", "bestanswer", "cop", "label", "labels", "gold", "goldindex", "key",
    "target", "groundtruth", "solution", "targets",
)  # fmt: skip

Kind = Literal["label", "text", "index"]  # how an answer names an option
_Read = tuple[Options, Any]  # the options and the answer of a row


class ChoiceColumns(NamedTuple):
    """The columns of multiple-choice questions."""

    options: tuple[str, ...]  # one column, or one column per option
    answer: str  # the column that names the right option
    first: int | None  # the index of the first option; None if the answer is no index


class OptionGroup(NamedTuple):
    """Columns that have the form of options."""

    columns: tuple[str, ...]  # one column, or one column per option
    kinds: frozenset[Kind]  # the answers that they may have: a list of an unusual name can be anything
    is_clear: bool  # whether the name can mean nothing else

    @property
    def name(self) -> str:
        """The columns, for messages."""
        return self.columns[0] if len(self.columns) == 1 else f"{self.columns[0]} to {self.columns[-1]}"


def find_choices(
    path: str, rows: Sequence[Row], every: Iterable[Row], groups: Sequence[OptionGroup], answer: str | None = None,
    first: int | None = None,
) -> ChoiceColumns | None:  # fmt: skip
    """Find the answer that belongs to one of several groups of options; None if there is none.

    Args:
        path: The file, for errors.
        rows: Its first rows, at least one.
        every: All of its rows; they are read only to find out whether an index counts from 0 or 1.
        groups: The columns of options.
        answer: The column of the answer; None to find it by its name and its values.
        first: The index of the first option; None to find it.

    Raises:
        UserError: If clear options have no answer, or an index could count from 0 or 1.
    """
    for group in groups:
        for column in [answer] if answer else _answer_columns(rows[0], group):
            wrong = _WRONG.search(_plain(_stem(group.columns))) and column not in group.columns
            options = (column, *group.columns) if wrong else group.columns
            fit = _fit(path, rows, every, ChoiceColumns(options, column, first), group.kinds)
            if fit is not None:
                return fit
    clear = next((group for group in groups if group.is_clear), None)
    if clear is None:
        return None
    raise UserError(
        f"{path}: {clear.name} {'looks' if len(clear.columns) == 1 else 'look'} like the options of multiple-choice "
        f"questions, and {f'column {answer!r} does not name' if answer else 'no column names'} the right one "
        f"(columns: {', '.join(rows[0].columns)}); give {of_source('answer_column')}, with the letter, the "
        f"index or the text of an option, or {of_source('domain')}, such as math, to leave the options out"
    )


def option_groups(rows: Sequence[Row], given: Sequence[str] = ()) -> list[OptionGroup]:
    """Return the columns that have the form of options, those with a clear name first; or the `given` ones alone."""
    if given:
        return [OptionGroup(tuple(given), frozenset(get_args(Kind)), is_clear=True)]
    families = [family for family in _families(rows[0].columns) if _have_form(rows, family)]
    members = {name for family in families for name in family}
    single = [(name,) for name in _names(rows[0]) if name not in members and _have_form(rows, (name,))]
    found = [_group(rows, group) for group in [*families, *single]]
    return sorted((group for group in found if group.kinds), key=lambda group: not group.is_clear)


def _group(rows: Sequence[Row], columns: tuple[str, ...]) -> OptionGroup:
    plain, is_family = _plain(_stem(columns)), len(columns) > 1
    first = None if is_family else cells(rows[0], columns)[0]
    is_clear = bool(_CLEAR.search(plain)) or (is_family and not plain)
    kinds: tuple[Kind, ...] = ()
    if _WRONG.search(plain) and not is_family and not isinstance(first, list):
        kinds = ()  # a text cannot be joined with the right answer
    elif is_clear or (is_family and _POSSIBLE.search(plain)):
        kinds = get_args(Kind)
    elif _POSSIBLE.search(plain):  # such a list can also hold spellings of one answer
        kinds = ("label", "index")
    elif is_family or isinstance(first, Mapping):
        kinds = ("label",)
    return OptionGroup(columns, frozenset(kinds), is_clear)


def _have_form(rows: Sequence[Row], group: Sequence[str]) -> bool:
    return sum(read_options(cells(row, group)) is not None for row in rows) >= _MOSTLY * len(rows)


def cells(row: Row, columns: Sequence[str]) -> list[Any]:
    """Return the values of columns, None for those that a row does not have."""
    return [None if (value := row.cell(column)) is MISSING else value for column in columns]


def _names(row: Row) -> list[str]:
    """Return the columns, and the keys inside columns of objects."""
    inside = [f"{name}.{key}" for name, value in row.values.items() if isinstance(value, Mapping) for key in value]
    return [*row.columns, *inside]


def _families(columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the columns whose names differ by a letter from A, or by a number from 0 or 1, in order."""
    members: dict[tuple[str, bool], dict[str, str]] = {}
    for name in columns:
        stem, mark = _split(name)
        if mark:
            members.setdefault((stem.lower(), mark.isdigit()), {})[mark.lower()] = name
    orders = (list(ascii_lowercase), [str(n) for n in range(26)], [str(n) for n in range(1, 26)])
    families: list[tuple[str, ...]] = []
    for (stem, _), marks in members.items():
        starts = [order[: len(marks)] for order in orders if len(marks) >= (2 if stem else 3)]  # a, b can be anything
        families += [tuple(marks[mark] for mark in start) for start in starts if {*start} == {*marks}]
    return families


def _split(name: str) -> tuple[str, str]:
    match = _MEMBER.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def _stem(columns: Sequence[str]) -> str:
    return columns[0].rpartition(".")[2] if len(columns) == 1 else _split(columns[-1])[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _answer_columns(row: Row, group: OptionGroup) -> list[str]:
    """Return the columns with a usual name of an answer, the most specific first."""
    plain = {name: _plain(name.rpartition(".")[2]) for name in _names(row) if name not in group.columns}
    return [name for word in _ANSWERS for name in plain if plain[name] == word]


def _fit(
    path: str, rows: Sequence[Row], every: Iterable[Row], columns: ChoiceColumns, kinds: frozenset[Kind]
) -> ChoiceColumns | None:
    """Return the columns if the answers name options in nearly all rows."""
    read = list(_read(rows, columns))
    places = {first: [_place(one, first) for one in read] for first in (None, 0, 1)}

    def fits(first: int | None) -> bool:
        return len(read) - places[first].count(None) >= _MOSTLY * len(read)

    if not read:
        return None
    if columns.first is not None:
        return columns if fits(columns.first) else None
    if sum(is_label(*one) for one in read) >= _MOSTLY * len(read):
        return columns if "label" in kinds else None
    is_text = "text" in kinds and fits(None)
    bases = [base for base in (0, 1) if "index" in kinds and fits(base)]
    if is_text and all(places[None] == places[base] for base in bases):
        return columns
    base = None if is_text or not bases else _base(_read(every, columns))
    if base is not None or not bases:
        return columns._replace(first=base) if bases else None
    meant = "the text or the index of an option" if is_text else "an index from 0 or from 1"
    why = "" if is_text else ": neither 0 nor the number of options occurs"
    raise UserError(
        f"{path}: the answers in column {columns.answer!r}, such as {short_repr(read[0][1])}, can be {meant}{why}; "
        f"give {of_source('first_option')}, the index of the first option: 0 or 1"
    )


def _read(rows: Iterable[Row], columns: ChoiceColumns) -> Iterator[_Read]:
    for row in rows:
        options, (answer,) = read_options(cells(row, columns.options)), cells(row, [columns.answer])
        if options is not None and answer is not None and str(answer).strip():
            yield options, answer


def _place(read: _Read, first: int | None) -> int | None:
    with suppress(ValueError):
        return right_option(*read, first)
    return None


def _base(read: Iterable[_Read]) -> int | None:
    """Return what an index counts from: the first row decides whose answer is 0 or the number of its options."""
    for options, answer in read:
        index = whole_number(answer[0] if isinstance(answer, list) and answer else answer)
        if index is not None and index in (0, len(options.texts)):
            return 0 if index == 0 else 1
    return None
