"""A row's options, in any form that datasets use, and the option that the row's answer names.

An ambiguous answer is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

from brorl.format import short_repr
from brorl.prompts.question import SCIENCE_DOMAIN, Question
from brorl.prompts.row import DroppedRow, decoded, is_missing, row_question
from brorl.prompts.science import Choices, places

_TEXTS = ("text", "value", "content", "option", "choices")
_LABELS = ("label", "key", "id", "letter")
_AROUND = "()[].:' \t\n"


class Options(NamedTuple):
    """The options of one row."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]  # labels that an answer may use: those in the data, or letters


def read_options(values: Sequence[Any]) -> Options | None:
    """Return the options in one column, or in one column per option; None if there are none.

    Two columns may also contain one option and a list of the others. With several columns, strings are always options.
    Trailing empty values are dropped. If all options begin with letters, those become labels: `(A) He` is `He` with the
    label A.
    """
    first, *more = values
    if len(more) == 1 and isinstance(more[0], list):
        values = [first, *more[0]]
    pairs = _pairs(values if more else decoded(first))
    while pairs and is_missing(pairs[-1][1]):
        pairs.pop()
    are_texts = all(isinstance(text, str | int | float) and not isinstance(text, bool) for _, text in pairs)
    if not are_texts or not 2 <= len(pairs) <= len(ascii_uppercase):
        return None
    texts = tuple(str(text) for _, text in pairs)
    labels = tuple(str(label).strip() for label, _ in pairs if label is not None)
    lettered = [
        re.match(rf"\s*(?:\({letter}\)|{letter}[).:])\s*(?=\S)", text)
        for letter, text in zip(ascii_uppercase, texts, strict=False)
    ]
    if all(lettered):
        texts = tuple(text[match.end() :] for text, match in zip(texts, lettered, strict=True) if match)
    return Options(texts, labels if len(set(labels)) == len(texts) else tuple(ascii_uppercase[: len(texts)]))


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return (label, text) of each option, in any form. The label is None if the data has no labels."""
    if isinstance(value, Mapping):
        texts = next((value[name] for name in _TEXTS if isinstance(value.get(name), list)), None)
        labels = next((value[name] for name in _LABELS if isinstance(value.get(name), list)), None)
        if texts is not None:
            matched = labels is not None and len(labels) == len(texts)
            return list(zip(labels if matched and labels else [None] * len(texts), texts, strict=True))
        return [] if any(isinstance(text, list | Mapping) for text in value.values()) else list(value.items())
    if not isinstance(value, list | tuple):
        return []
    if all(isinstance(option, Mapping) for option in value):
        return [(_first_value(option, _LABELS), _first_value(option, _TEXTS)) for option in value]
    return [(None, text) for text in value]


def _first_value(option: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((option[name] for name in names if name in option), None)


def right_option(options: Options, answer: Any, first: int | None) -> int:
    """Return the right option's index, counted from 0; raise a `ValueError` unless the answer names exactly one option.

    `first` is the data's index of the first option, 0 or 1; None if answers are not indices.
    """
    value = _answer(options, answer)
    num_options = len(options.texts)
    if isinstance(value, list):
        if value.count(1) != 1:
            raise ValueError(f"marks {value.count(1)} options as right; a question needs one")
        return value.index(1)
    if first is not None:
        index = whole_number(value)
        if index is None or not 0 <= index - first < num_options:
            raise ValueError(f"is {short_repr(value)}, which is not an index from {first} into {num_options} options")
        return index - first
    named = {*_labeled(options, value), *places(options.texts, str(value))}
    if len(named) != 1:
        several = "could mean two of" if named else "is neither the label nor the text of one of"
        advice = "" if whole_number(value) is None else "; set first_option to 0 or 1 if it is an index"
        raise ValueError(f"is {short_repr(value)}, which {several} the {num_options} options{advice}")
    return named.pop()


def is_label(options: Options, answer: Any) -> bool:
    """Return whether an answer is an option label. A list that marks options with 0 and 1 counts as a label."""
    value = _answer(options, answer)
    return isinstance(value, list) or len(_labeled(options, value)) == 1


def _answer(options: Options, answer: Any) -> Any:
    """Unpack an answer stored in a list: [x] becomes x, but [0, 1, 0], with a mark per option, stays a list."""
    value = answer if isinstance(answer, str) and places(options.texts, answer) else decoded(answer)
    if not isinstance(value, list):
        return answer
    if len(value) == len(options.texts) and all(mark in (0, 1) for mark in value):
        return value
    return value[0] if len(value) == 1 else str(answer)


def _labeled(options: Options, answer: Any) -> list[int]:
    return places([label.strip(_AROUND) for label in options.labels], str(answer).strip(_AROUND))


def whole_number(value: Any) -> int | None:
    """Return an integer of at most three digits from a number or a string; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = re.fullmatch(r"\s*([0-9]{1,3})(?:\.0)?\s*", str(value))
    return int(match[1]) if match else None


def choice_question(question: str, texts: Sequence[str], right: int, seed: int) -> Question:
    """Return a question followed by its options, with the `Choices` as its reference.

    The question and the seed determine the order of the options. A question that already shows the options with their
    letters is not changed.
    """
    try:
        if shown := shows_options(question, texts):
            choices = Choices(tuple(texts), right)
        else:
            choices = Choices.permuted(texts, right, question, seed)
    except ValueError as error:
        raise DroppedRow(str(error).removeprefix("has ")) from None
    if not question.strip():
        raise DroppedRow("no question")
    return row_question(question if shown else choices.under(question), choices.to_text(), SCIENCE_DOMAIN)


def shows_options(text: str, options: Sequence[str]) -> bool:
    """Return whether a string contains every option after its letter, such as `B. neon` or `(B) neon`."""
    spelled = " ".join(text.split())
    return all(
        re.search(rf"(?<![A-Za-z]){letter}\W{{1,4}}{re.escape(' '.join(option.split()))}", spelled)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    )
