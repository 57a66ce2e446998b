"""Guesses what a data file means: its columns of questions, answers and options, or its layout, and the verifier.

If nothing is clear, a `UserError` names the columns and the setting to give.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal, NamedTuple, get_args

from brorl.errors import UserError, of_source
from brorl.format import short_repr
from brorl.prompts.answer_forms import last_box, surrounds_answer
from brorl.prompts.countdown import is_countdown_reference
from brorl.prompts.file_questions import USUAL_NAMES, conversation, without_answer
from brorl.prompts.prompt import COUNTDOWN_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN, DroppedRow, Question
from brorl.prompts.public_data import LAYOUTS, read_layout
from brorl.prompts.rows import Row, is_missing, read_rows
from brorl.prompts.science import Options, is_label, read_options, right_option, whole_number
from brorl.prompts.settings import FileSource
from brorl.storage import split_revision

_ROWS = 200  # the guess reads this many rows
_MARKER = "####"  # stands before the answer in GSM8K's form
_MOSTLY = 0.9
_LONGEST_ANSWER = 200  # a text with more characters is a solution, not an answer
_MOST_WORDS = 6  # a text with more words has many forms
_MATH_WORDS = {"pi", "sqrt", "frac", "sin", "cos", "tan", "log", "exp", "inf", "and", "or"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}([/.-])\d{1,2}\1(?:19|20)\d\d")
_PAIRS = (("yes", "no"), ("true", "false"))
_WRONG = re.compile(r"distractor|incorrect|wrong|false")
_CLEAR = re.compile(rf"choice|option|ending|candidate|alternative|^opts?$|^op$|{_WRONG.pattern}")
_POSSIBLE = re.compile(r"answers?$|^ans$|^sol(?:ution)?s?$")
_MEMBER = re.compile(r"(.*?)[ _.-]*\(?([A-Za-z]|[0-9]{1,2})\)?")
_ANSWERS = (
    "answer", "answerkey", "answeridx", "answerindex", "answerletter", "correctanswer", "correctoption",
    "correctchoice", "correctindex", "correct", "bestanswer", "cop", "label", "labels", "gold", "goldindex", "key",
    "target", "groundtruth", "solution", "targets",
)  # fmt: skip
_CONTEXTS = (
    "context", "passage", "article", "paragraph", "story", "document", "premise", "body", "background", "scenario",
    "situation", "narrative", "dialogue", "excerpt", "table",
)  # fmt: skip
# Columns with these in their names tell the answer, how it was found, or where the row is from.
_NOT_ASKED = re.compile(
    r"sol|ration|expl|reason|cot|proof|messag|conversation|respon|completion|answer|generat|th(?:ought|ink)|test|hint|"
    r"step|decompos|meta|info|source|url|equation|program|code_|prompt|^exp$|^id$|_id$|wrong|distract"
)
_CLASSES = ("label", "labels", "class", "category")  # such a column of a few whole numbers has numbers of classes
_MOST_CLASSES, _ROWS_PER_CLASS = 10, 4

Kind = Literal["label", "text", "index"]  # how an answer names an option


class OptionGroup(NamedTuple):
    """Columns that have the form of options."""

    columns: tuple[str, ...]  # one column, or one column per option
    kinds: frozenset[Kind]  # an answer may name an option in these ways; a list with an unusual name can be anything
    is_clear: bool  # whether the name can only mean options

    @property
    def name(self) -> str:
        """The columns as text for messages."""
        return self.columns[0] if len(self.columns) == 1 else f"{self.columns[0]} to {self.columns[-1]}"


def find_choices(
    path: str, rows: Sequence[Row], every: Iterable[Row], groups: Sequence[OptionGroup], answer: str | None,
    first: int | None, domain: str,
) -> FileSource | None:  # fmt: skip
    """Find the answer column for one of the groups of options: the given column, or one whose name and values fit.

    `rows` are the first rows. Rows of `every` are read until one shows whether an index counts from 0 or from 1.
    """
    for group in groups:
        words = {name: _word((name,)) for name in _names(rows[0]) if name not in group.columns}
        usual = [name for word in _ANSWERS for name in words if words[name] == word]  # the most specific first
        for column in [answer] if answer else usual:
            are_wrong = _WRONG.search(_word(group.columns)) and column not in group.columns
            options = (column, *group.columns) if are_wrong else group.columns
            source = _source(path, answer_column=column, options_column=options, first_option=first, domain=domain)
            if (fitting := _fitting_source(path, rows, every, source, group.kinds)) is not None:
                return fitting
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
    """Return groups of columns that look like options, clear names first; only the `given` group if there is one."""
    if given:
        return [OptionGroup(tuple(given), frozenset(get_args(Kind)), is_clear=True)]

    def have_form(group: Sequence[str]) -> bool:
        return sum(read_options([*map(row.cell, group)]) is not None for row in rows) >= _MOSTLY * len(rows)

    families = list(filter(have_form, _families(rows[0].columns)))
    members = {name for family in families for name in family}
    single = [(name,) for name in _names(rows[0]) if name not in members and have_form((name,))]
    found = [_option_group(rows[0], columns) for columns in (*families, *single)]
    return sorted((group for group in found if group.kinds), key=lambda group: not group.is_clear)


def _option_group(row: Row, columns: tuple[str, ...]) -> OptionGroup:
    """Return a group with what the names of its columns can mean."""
    word, is_family, first = _word(columns), len(columns) > 1, row.cell(columns[0])
    is_clear = bool(_CLEAR.search(word)) or (is_family and not word)
    kinds: tuple[Kind, ...] = ()
    if _WRONG.search(word) and not is_family and not isinstance(first, list):
        kinds = ()  # wrong options in one text cannot be joined with the right one
    elif is_clear or (is_family and _POSSIBLE.search(word)):
        kinds = get_args(Kind)
    elif _POSSIBLE.search(word):  # such a list can also hold spellings of one answer
        kinds = ("label", "index")
    elif is_family or isinstance(first, Mapping):
        kinds = ("label",)
    return OptionGroup(columns, frozenset(kinds), is_clear)


def _names(row: Row) -> list[str]:
    """Return the names of columns and, as `column.key`, of keys inside columns of objects."""
    inside = [f"{name}.{key}" for name, value in row.values.items() if isinstance(value, Mapping) for key in value]
    return [*row.columns, *inside]


def _families(columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of columns numbered from A, 0 or 1: `option_a`, `option_b`, ... or `choice1`, `choice2`, ..."""
    members: dict[tuple[str, bool], dict[str, str]] = {}
    for name in columns:
        if match := _MEMBER.fullmatch(name):
            members.setdefault((match[1].lower(), match[2].isdigit()), {})[match[2].lower()] = name
    orders = (list(ascii_lowercase), [str(n) for n in range(26)], [str(n) for n in range(1, 26)])
    families: list[tuple[str, ...]] = []
    for (stem, _), marks in members.items():
        starts = [
            order[: len(marks)] for order in orders if len(marks) >= (2 if stem else 3)
        ]  # two columns named only a and b can be anything
        families += [tuple(marks[mark] for mark in start) for start in starts if {*start} == {*marks}]
    return families


def _word(columns: Sequence[str]) -> str:
    """Return the letters that say what columns hold: `option` of `option_a` and `option_b`, `rightanswer` of one."""
    match = _MEMBER.fullmatch(columns[-1]) if len(columns) > 1 else None
    name = match[1] if match else columns[-1] if len(columns) > 1 else columns[0].rpartition(".")[2]
    return re.sub(r"[^a-z]", "", name.lower())


def _fitting_source(
    path: str, rows: Sequence[Row], every: Iterable[Row], source: FileSource, kinds: frozenset[Kind]
) -> FileSource | None:
    """Return the source if its answers name options in nearly all rows; an index also needs its first option."""
    pairs = list(_options_and_answers(rows, source))
    places = {first: [_place(*pair, first) for pair in pairs] for first in (None, 0, 1)}
    fits = {first: len(pairs) - found.count(None) >= _MOSTLY * len(pairs) for first, found in places.items()}
    if not pairs:
        return None
    if source.first_option is not None:
        return source if fits[source.first_option] else None
    if sum(is_label(*pair) for pair in pairs) >= _MOSTLY * len(pairs):
        return source if "label" in kinds else None
    is_text = "text" in kinds and fits[None]
    bases = [base for base in (0, 1) if "index" in kinds and fits[base]]
    if is_text and all(places[None] == places[base] for base in bases):
        return source
    if not bases:
        return None
    if not is_text:  # the first row whose answer is 0 or the number of its options decides
        for options, answer in _options_and_answers(every, source):
            index = whole_number(answer[0] if isinstance(answer, list) and answer else answer)
            if index in (0, len(options.texts)):
                return source.model_copy(update={"first_option": min(index, 1)})
    meant = "the text or the index of an option" if is_text else "an index from 0 or from 1"
    why = "" if is_text else ": neither 0 nor the number of options occurs"
    raise UserError(
        f"{path}: the answers in column {source.answer_column!r}, such as {short_repr(pairs[0][1])}, can be {meant}"
        f"{why}; give {of_source('first_option')}, the index of the first option: 0 or 1"
    )


def _options_and_answers(rows: Iterable[Row], source: FileSource) -> Iterator[tuple[Options, Any]]:
    """Yield the options and the answer of the rows that have both."""
    for row in rows:
        options, answer = read_options([*map(row.cell, source.options_column)]), row.cell(source.answer_column)
        if options is not None and answer is not None and str(answer).strip():
            yield options, answer


def _place(options: Options, answer: Any, first: int | None) -> int | None:
    """Return the index of the option that an answer names; None if it names none."""
    with suppress(ValueError):
        return right_option(options, answer, first)
    return None


class Guess(NamedTuple):
    """The probable meaning of a file."""

    source: FileSource  # settings to read the rows with
    domain: str  # decided by the layout, if there is one
    example: str  # the first answer
    domain_reason: str
    words: tuple[str, ...] = ()  # the distinct answers, if all are words such as yes and no
    unused: tuple[str, ...] = ()  # columns of text that are not read
    long_unused: tuple[str, ...] = ()  # columns that are not read, and have more text than the question


def guess_meaning(
    path: str,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    domain: str | None = None,
    options_column: Sequence[str] = (),
    first_option: int | None = None,
) -> Guess:
    """Guess what the columns of a file, a folder or a dataset mean; given columns or a given domain are kept.

    A layout is chosen if all its columns exist and it can read the rows. For mathematics, columns with clear names
    take precedence over a layout. Columns of options make multiple-choice questions, unless another domain is given.
    """
    start = list(islice(read_rows(path, None, "train", (), with_bad=True), _ROWS))
    first = next((row for row in start if not row.problem), None)
    if first is None:
        problem = start[0].problem if start else None
        raise UserError(problem or f"{path} is empty; it must contain at least one question with an answer")
    columns = first.columns

    def every() -> Iterator[Row]:
        rows = read_rows(path, None, "train", columns, with_bad=True)
        return (row for row in rows if not row.problem)  # reading all questions names the others

    rows = list(islice(every(), _ROWS))
    given = prompt_column or answer_column or domain or options_column
    fitting = None if given else _fitting_layout(path, rows)
    if fitting and fitting.domain != MATH_DOMAIN:
        return fitting
    try:
        if options_column or domain in (None, SCIENCE_DOMAIN):
            groups = option_groups(rows, options_column)
            known = domain or SCIENCE_DOMAIN
            source = find_choices(path, rows, every(), groups, answer_column, first_option, known)
            if source is not None:
                used = {*source.options_column, source.answer_column}
                prompt = _column(path, rows, "prompt", prompt_column, used)
                example = next(str(value) for row in rows if not is_missing(value := row.cell(source.answer_column)))
                found = source.model_copy(update={"prompt_column": prompt})
                return _with_context(Guess(found, source.domain, example, "multiple choice"), rows)
        return _with_context(_guess_columns(path, rows, prompt_column, answer_column, domain), rows)
    except UserError:
        if fitting:
            return fitting
        raise


def _source(path: str, **settings: Any) -> FileSource:
    """Return a source whose name has no colon, since ids of questions begin with `name:`."""
    stem = Path(split_revision(path)[0]).stem
    return FileSource(path=path, name=stem.replace(":", "-") if ":" in stem else None, **settings)


def _fitting_layout(path: str, rows: Sequence[Row]) -> Guess | None:
    """Return the layout that reads the most rows; ties go to the layout with the most columns. None if none fits."""
    best: tuple[int, int] = (0, 0)
    guess: Guess | None = None
    for name, layout in LAYOUTS.items():
        found: list[Question] = []
        with suppress(UserError):  # raised by a row of another layout
            if not layout.columns or not {*layout.columns} <= {*rows[0].columns}:
                continue
            for row in rows:
                with suppress(DroppedRow):
                    found.append(read_layout(row, layout, seed=0))
            strange = sum(not _looks_mathematical(question.reference) for question in found)
            if found and found[0].domain == MATH_DOMAIN and strange > (1 - _MOSTLY) * len(found):
                continue
            if found and (len(found), len(layout.columns)) > best:
                best, why = (len(found), len(layout.columns)), f"the columns are those of the layout {name}"
                guess = Guess(_source(path, layout=name), found[0].domain, found[0].reference, why)
    return guess


def _guess_columns(
    path: str, rows: Sequence[Row], prompt_column: str | None, answer_column: str | None, domain: str | None
) -> Guess:
    """Guess the columns and the domain of rows that are not in a layout and have no options."""
    prompt = _column(path, rows, "prompt", prompt_column, {answer_column} if answer_column else ())
    is_answered = all(_own_answer(row.cell(prompt)) is not None for row in rows)
    answer = prompt  # where the messages end with the answer
    if answer_column != prompt:
        try:
            answer = _column(path, rows, "answer", answer_column, (prompt,))
        except UserError:
            if answer_column or not is_answered:
                raise
    cells = [row.cell(answer) for row in rows]
    values = [own if (own := _own_answer(cell)) is not None else _value(cell) for cell in cells if not is_missing(cell)]
    texts = [str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values]
    after = _MARKER if texts and all(_MARKER in text for text in texts) else None
    if after:
        texts = [text.rpartition(after)[2].strip() for text in texts]
    words = next((pair for pair in _PAIRS if texts and {text.lower() for text in texts} <= {*pair}), ())
    if not domain:
        _reject_classes(path, answer, values)
    has_aliases = any(isinstance(cell, Mapping) and "aliases" in cell for cell in cells)
    named = f"{answer}.value" if has_aliases else answer
    meant, reason = (domain, "as given") if domain else _domain(path, named, texts, words)
    answer = answer if meant == SCIENCE_DOMAIN else named  # only the verifier of science reads aliases
    source = _source(path, prompt_column=prompt, answer_column=answer, answer_after=after, domain=meant)
    return Guess(source, meant, texts[0] if texts else "", reason, words)


def _own_answer(cell: Any) -> Any:
    """Return the answer with which messages end; None for other values."""
    messages = conversation(cell)
    return without_answer(messages)[1] if messages else None


def _value(cell: Any) -> Any:
    """Return the answer in a cell that also has its aliases."""
    return cell["value"] if isinstance(cell, Mapping) and "value" in cell else cell


def _with_context(guess: Guess, rows: Sequence[Row]) -> Guess:
    """Add the column of a text that the question is about, and the columns of text that are not read.

    An instruction has its text in the column `input`.
    """
    source = guess.source
    taken = {source.prompt_column, source.answer_column, *source.options_column}
    used = {name.partition(".")[0] for name in taken} | taken
    unused = [
        name
        for name in rows[0].columns
        if name not in used and all(isinstance(row.values.get(name), str | None) for row in rows)
    ]
    names = (*_CONTEXTS, *(["input"] if source.prompt_column.lower() == "instruction" else []))
    found = [column for name in names for column in unused if column.lower() == name]
    context = next((name for name in found if not all(is_missing(row.values.get(name)) for row in rows)), None)
    source = source.model_copy(update={"context_column": context})
    asked = _num_characters(rows, source.prompt_column)
    long = [
        name
        for name in rows[0].columns
        if name not in used | {context} and not _NOT_ASKED.search(name.lower()) and _num_characters(rows, name) > asked
    ]
    others = tuple(name for name in unused if name not in (context, *long))
    return guess._replace(source=source, unused=others, long_unused=tuple(long))


def _num_characters(rows: Sequence[Row], column: str) -> int:
    """Count the characters of a column; those of a list or an object too."""
    return sum(len(str(value)) for row in rows if not is_missing(value := row.cell(column)))


def _reject_classes(path: str, column: str, values: Sequence[Any]) -> None:
    """Reject answers that are numbers of classes: nobody can know what they stand for."""
    numbers = [number for value in values if (number := whole_number(value)) is not None and number <= _MOST_CLASSES]
    is_class = column.rpartition(".")[2].lower() in _CLASSES and len(numbers) == len(values)
    if is_class and len(set(numbers)) <= len(values) // _ROWS_PER_CLASS:
        listed = ", ".join(map(str, sorted(set(numbers))))
        raise UserError(
            f"{path}: column {column!r} contains only {listed}, which look like numbers of classes; write the names of "
            f"the classes into a column and name it with {of_source('answer_column')}, and let the question list them; "
            f"or give {of_source('domain', 'math')} if these numbers are the answers"
        )


def _column(path: str, rows: Sequence[Row], what: str, given: str | None, taken: Collection[str]) -> str:
    """Return the column of `what`, question or answer: the given column, or the first usual name that fits."""
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
        inside = rows[0].values.get(column)  # an object has keys: reward_model.ground_truth
        names_inside = (*names, "value") if what == "answer" else names
        keys = [f"{column}.{name}" for name in names_inside if name in inside] if isinstance(inside, Mapping) else []
        has_aliases = what == "answer" and isinstance(inside, Mapping) and {"value", "aliases"} <= {*inside}
        if has_aliases and column not in taken:
            return column
        for candidate in (column, *keys):
            values = [value for row in rows if not is_missing(value := row.cell(candidate))]
            if values and candidate not in taken and all(_can_be(value, what) for value in values):
                return candidate
    role = "the question" if what == "prompt" else "the reference answer"
    raise UserError(
        f"{path}: no column is clearly {role} (columns: {listed}); name it with {of_source(f'{what}_column')}"
    )


def _can_be(value: Any, what: str) -> bool:
    """Whether a value can be a question (text, messages) or an answer (text, a number, true or false)."""
    if isinstance(value, list):
        is_one = bool(value) and all(isinstance(turn, Mapping) for turn in value)
        return is_one if what == "prompt" else is_one and _own_answer(value) is not None
    return isinstance(value, str) or (what == "answer" and isinstance(value, int | float) and isfinite(value))


def _domain(path: str, column: str, texts: Sequence[str], words: Sequence[str]) -> tuple[str, str]:
    """Return the domain of the answers, and the reason for it."""
    if not texts:
        return MATH_DOMAIN, "there is no answer"
    if all(is_countdown_reference(text) for text in texts):
        return COUNTDOWN_DOMAIN, "the answers are puzzles such as `3 5 7 -> 22`"
    if words:
        return MATH_DOMAIN, f"which compares {' and '.join(words)} as words, in upper or lower case"
    solutions = [text for text in texts if len(text) > _LONGEST_ANSWER or surrounds_answer(text)]
    if solutions and all(last_box(text) is not None for text in solutions):
        raise UserError(
            f"{path}: column {column!r} contains whole solutions with the answer in \\boxed{{}}; write the answers "
            f"into another column and name it with {of_source('answer_column')}"
        )
    if sum(map(_looks_mathematical, texts)) >= _MOSTLY * len(texts):
        return MATH_DOMAIN, "the answers look like numbers or formulas"
    strange = next(text for text in texts if not _looks_mathematical(text))
    are_short = sum(map(_is_short, texts)) >= _MOSTLY * len(texts)
    science = f"{of_source('domain', SCIENCE_DOMAIN)} to compare short texts, " if are_short else ""
    raise UserError(
        f"{path}: the answers in column {column!r}, such as {strange[:60]!r}, do not look like numbers or formulas; "
        f"give {of_source('domain', 'math')} if they are mathematics, {science}{of_source('domain', 'NAME')} with a "
        f"verifier that you write (docs/how-to/verifiers.md), or name another column with {of_source('answer_column')}"
    )


def _is_short(text: str) -> bool:
    """Whether an answer is one that a response can give word for word."""
    return len(text.split()) <= _MOST_WORDS and len(text) <= _LONGEST_ANSWER and not _DATE.fullmatch(text)


def _looks_mathematical(text: str) -> bool:
    """Whether an answer is a number, a formula, or the letter of a choice; a date would be a difference."""
    if len(text) > _LONGEST_ANSWER or surrounds_answer(text) or _DATE.fullmatch(text):
        return False
    if "\\" in text or re.fullmatch(r"\(?[A-J]\)?", text):
        return True
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)}
    return words <= _MATH_WORDS and any(character.isdigit() for character in text)
