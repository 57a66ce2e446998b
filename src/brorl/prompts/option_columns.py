"""Finds the columns with answer options, and the column that names the right option."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple

from brorl.errors import UserError, source_setting
from brorl.format import short_repr
from brorl.prompts.options import Options, is_label, read_options, right_option, whole_number
from brorl.prompts.row import Row

_MOSTLY = 0.9  # at least this fraction of the rows must fit
_NUMBERED = re.compile(r"(.*?)[ _.-]*\(?([A-Za-z]|[0-9]{1,2})\)?")  # `option_a`, `choice 1`, `(B)`
_ORDERS = (tuple(ascii_lowercase), tuple(map(str, range(26))), tuple(map(str, range(1, 26))))

# Column names are reduced to their letters: `rightanswer` stands for `Right answer`.
_WRONG = re.compile(r"distractor|incorrect|wrong|false")  # only wrong options
_CLEAR = re.compile(rf"choice|option|ending|candidate|alternative|^opts?$|^op$|{_WRONG.pattern}")
_POSSIBLE = re.compile(r"answers?$|^ans$|^sol(?:ution)?s?$")  # may also contain spellings of one answer
_RIGHT = (
    "answer", "answerkey", "answeridx", "answerindex", "answerletter", "correctanswer", "correctoption",
    "correctchoice", "correctindex", "correct", "bestanswer", "cop", "label", "labels", "gold", "goldindex", "key",
    "target", "groundtruth", "solution", "targets",
)  # fmt: skip
"""Names of columns that identify the right option, the most specific first."""

Kind = Literal["label", "text", "index"]  # how an answer names an option
_EVERY_KIND: frozenset[Kind] = frozenset(("label", "text", "index"))


class OptionGroup(NamedTuple):
    """Columns that look like options."""

    columns: tuple[str, ...]  # one column, or one column per option
    kinds: frozenset[Kind]  # the ways in which an answer may name an option
    is_clear: bool  # whether the names can only mean options

    @property
    def name(self) -> str:
        """The columns as text, for messages."""
        return self.columns[0] if len(self.columns) == 1 else f"{self.columns[0]} to {self.columns[-1]}"


def option_groups(rows: Sequence[Row], given: Sequence[str] = ()) -> list[OptionGroup]:
    """Return groups of columns that look like options, those with clear names first; only `given` columns, if any."""
    if given:
        return [OptionGroup(tuple(given), _EVERY_KIND, is_clear=True)]

    def are_options(columns: Sequence[str]) -> bool:
        return sum(_options(row, columns) is not None for row in rows) >= _MOSTLY * len(rows)

    families = list(filter(are_options, _families(rows[0].columns)))
    members = {column for family in families for column in family}
    single = [(name,) for name in _names(rows[0]) if name not in members and are_options((name,))]
    groups = [_group(rows[0], columns) for columns in (*families, *single)]
    return sorted((group for group in groups if group.kinds), key=lambda group: not group.is_clear)


def find_choice(
    path: str,
    rows: Sequence[Row],
    every: Iterable[Row],
    groups: Sequence[OptionGroup],
    answer: str | None,
    first: int | None,
) -> dict[str, Any] | None:
    """Find a group of options, and the column whose answers name one of the options.

    Args:
        path: The file, for messages.
        rows: The file's first rows.
        every: All rows; more are read only if the first rows do not show whether indices start at 0 or 1.
        groups: Columns that look like options.
        answer: The answer column; None tries common names.
        first: The data's index of the first option, 0 or 1; None if unknown.

    Returns:
        The settings `answer_column`, `options_column` and `first_option`; None if the questions have no options.

    Raises:
        UserError: If answers are ambiguous, or if columns are clearly options but no answers name them.
    """
    for group in groups:
        for column in [answer] if answer else _answer_columns(rows[0], group):
            # a list of wrong options does not contain the right one
            is_apart = _WRONG.search(_letters(group.columns)) and column not in group.columns
            columns = (column, *group.columns) if is_apart else group.columns
            pairs = list(_pairs(rows, columns, column))
            readings = _readings(pairs, group.kinds, first)
            if len(readings) > 1:
                base = None if None in readings else _first_index(_pairs(every, columns, column))
                if base is None:
                    raise _two_readings(path, column, pairs[0][1], None in readings)
                readings = [base]
            if readings:
                return {"answer_column": column, "options_column": columns, "first_option": readings[0]}
    if clear := next((group for group in groups if group.is_clear), None):
        raise UserError(
            f"{path}: {clear.name} {'looks' if len(clear.columns) == 1 else 'look'} like the options of "
            f"multiple-choice questions, and {f'column {answer!r} does not name' if answer else 'no column names'} the "
            f"right one (columns: {', '.join(rows[0].columns)}); give {source_setting('answer_column')}, with an "
            f"option's letter, index or text, or {source_setting('domain')}, such as math, to ignore the options"
        )
    return None


def _group(row: Row, columns: tuple[str, ...]) -> OptionGroup:
    """Return a group, classified by the names of its columns."""
    letters = _letters(columns)
    is_family = len(columns) > 1
    is_clear = bool(_CLEAR.search(letters)) or (is_family and not letters)
    kinds: frozenset[Kind] = frozenset()
    if _WRONG.search(letters) and not is_family and not isinstance(row.cell(columns[0]), list):
        pass  # wrong options in a single string cannot be combined with the right option
    elif is_clear or (is_family and _POSSIBLE.search(letters)):
        kinds = _EVERY_KIND
    elif _POSSIBLE.search(letters):
        kinds = frozenset(("label", "index"))
    elif is_family or isinstance(row.cell(columns[0]), Mapping):
        kinds = frozenset(("label",))
    return OptionGroup(columns, kinds, is_clear)


def _answer_columns(row: Row, group: OptionGroup) -> list[str]:
    """Return the columns with a common name for the right answer, the most specific name first."""
    columns = [(name, _letters((name,))) for name in _names(row) if name not in group.columns]
    return [name for usual in _RIGHT for name, letters in columns if letters == usual]


def _names(row: Row) -> list[str]:
    """Return the column names, and the keys inside object columns as `column.key`."""
    inside = [f"{name}.{key}" for name, value in row.values.items() if isinstance(value, Mapping) for key in value]
    return [*row.columns, *inside]


def _families(columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of columns numbered from A, 0 or 1: `option_a`, `option_b`, ... or `choice1`, `choice2`, ..."""
    numbered: dict[tuple[str, bool], dict[str, str]] = {}
    for name in columns:
        if match := _NUMBERED.fullmatch(name):
            numbered.setdefault((match[1].lower(), match[2].isdigit()), {})[match[2].lower()] = name
    families: list[tuple[str, ...]] = []
    for (stem, _), names in numbered.items():
        if len(names) < (2 if stem else 3):  # two columns named just a and b could be anything
            continue
        orders = [order[: len(names)] for order in _ORDERS]
        families += [tuple(names[mark] for mark in order) for order in orders if {*order} == {*names}]
    return families


def _letters(columns: Sequence[str]) -> str:
    """Return the letters of the columns' shared name: `option` for `option_a` and `option_b`."""
    name = columns[-1] if len(columns) > 1 else columns[0].rpartition(".")[2]
    match = _NUMBERED.fullmatch(name) if len(columns) > 1 else None
    return re.sub(r"[^a-z]", "", (match[1] if match else name).lower())


def _options(row: Row, columns: Sequence[str]) -> Options | None:
    return read_options([row.cell(column) for column in columns])


def _pairs(rows: Iterable[Row], columns: Sequence[str], answer_column: str) -> Iterator[tuple[Options, Any]]:
    """Yield the options and the answer of each row that has both."""
    for row in rows:
        options = _options(row, columns)
        answer = row.cell(answer_column)
        if options is not None and answer is not None and str(answer).strip():
            yield options, answer


def _readings(pairs: Sequence[tuple[Options, Any]], kinds: frozenset[Kind], first: int | None) -> list[int | None]:
    """Return each plausible reading of the answers as the index of the first option; None means labels or option text.

    In a plausible reading, nearly all answers name an option. Of readings that name the same options, one is returned.
    """
    if not pairs:
        return []
    tried: list[int | None] = [*([None] if "text" in kinds else []), *([0, 1] if "index" in kinds else [])]
    if first is not None:
        tried = [first]
    elif sum(is_label(*pair) for pair in pairs) >= _MOSTLY * len(pairs):
        return [None] if "label" in kinds else []
    named: dict[tuple[int | None, ...], int | None] = {}
    for base in tried:
        places = tuple(_place(options, answer, base) for options, answer in pairs)
        if len(pairs) - places.count(None) >= _MOSTLY * len(pairs):
            named.setdefault(places, base)
    return [*named.values()]


def _place(options: Options, answer: Any, first: int | None) -> int | None:
    """Return the index of the option that an answer names, or None."""
    with suppress(ValueError):
        return right_option(options, answer, first)
    return None


def _first_index(pairs: Iterable[tuple[Options, Any]]) -> int | None:
    """Return the index of the first option: 0 if an answer is 0, 1 if one is the number of options, None if neither."""
    for options, answer in pairs:
        index = whole_number(answer[0] if isinstance(answer, list) and answer else answer)
        if index in (0, len(options.texts)):
            return min(index, 1)
    return None


def _two_readings(path: str, column: str, example: Any, is_text: bool) -> UserError:
    meant, why = "an index from 0 or from 1", ": neither 0 nor the number of options occurs"
    if is_text:
        meant, why = "the text or the index of an option", ""
    return UserError(
        f"{path}: the answers in column {column!r}, such as {short_repr(example)}, could be {meant}{why}; give "
        f"{source_setting('first_option')}, the index of the first option: 0 or 1"
    )
