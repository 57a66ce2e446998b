"""The references of science: the options of a multiple-choice question, or a measured answer with its tolerance.

`Choices.permuted` orders the options of a row by a seed: the index of the right option in the data says nothing, and
each row has its own order. The tolerance of a measured answer is required. An answer without one needs no such
reference: its text alone is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase

from brorl.prompts.json_text import check_object
from brorl.prompts.question import uniform_hash

# `all of the above` makes sense only at the end, and `both A and B` only in the order of the data.
_LAST = re.compile(r"(?:all|none|both|neither|any|some)\b.*\b(?:above|these|the others|of them)\W*", re.IGNORECASE)
_LETTERS = re.compile(r"\b\(?[A-Z]\)?(?:,? (?:and|or|nor|but not) |, )\(?[A-Z]\)?(?![A-Za-z])")


@dataclass(frozen=True)
class Choices:
    """The options of a question.

    Args:
        options: 2 to 26 different texts, in the order of their letters.
        right: Place of the right option, from 0.

    Raises:
        ValueError: If the number of options or the place is out of its range, or options are empty or equal.
    """

    options: tuple[str, ...]
    right: int

    def __post_init__(self) -> None:
        if not 2 <= len(self.options) <= len(ascii_uppercase):
            raise ValueError(f"has {len(self.options)} options; 2 to {len(ascii_uppercase)} have letters")
        if not all(option.strip() for option in self.options):
            raise ValueError("has an empty option")
        if len({" ".join(option.split()) for option in self.options}) < len(self.options):
            raise ValueError("has two equal options")
        if not 0 <= self.right < len(self.options):
            raise ValueError(f"has the right option {self.right + 1} of {len(self.options)}")

    @classmethod
    def permuted(cls, options: Sequence[str], right: int, question: str, seed: int) -> Choices:
        """Order the options of a row, of which `right` is right, by a hash of the question, the option and a seed.

        Options such as `all of the above` come last. Options that name letters keep all options in place.
        """
        cls(tuple(options), right)
        order = list(range(len(options)))
        if not any(_LETTERS.search(option) for option in options):
            order.sort(key=lambda at: uniform_hash(f"choices {seed}: {question}\n{options[at]}"))
            order.sort(key=lambda at: _LAST.fullmatch(options[at].strip()) is not None)
        return cls(tuple(options[at] for at in order), order.index(right))

    @property
    def letters(self) -> str:
        """The letters of the options."""
        return ascii_uppercase[: len(self.options)]

    @property
    def letter(self) -> str:
        """The letter of the right option."""
        return self.letters[self.right]

    def to_text(self) -> str:
        """Return JSON text: `{"options": ["He", "Ne"], "answer": "B"}`."""
        return json.dumps({"options": list(self.options), "answer": self.letter}, ensure_ascii=False)

    def under(self, question: str) -> str:
        """Return the question with a line per option: `A. He`."""
        lines = [f"{letter}. {option.strip()}" for letter, option in zip(self.letters, self.options, strict=True)]
        return "\n".join([question.strip(), "", *lines])


_FORM = '{"value": "9.81 m/s^2", "tolerance": 0.05} (0.05 accepts 5% above and below the value), or the value alone'


@dataclass(frozen=True)
class MeasuredAnswer:
    """A measured answer.

    Args:
        value: The answer as LaTeX or plain text, such as `9.81 m/s^2`.
        tolerance: Relative error that is accepted, 0 to 0.5; 0 for none beyond rounding.

    Raises:
        ValueError: If the value is empty or the tolerance is out of its range.
    """

    value: str
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.value.strip():
            raise ValueError("has an empty value")
        if not 0 <= self.tolerance <= 0.5:
            raise ValueError(
                f"has the tolerance {self.tolerance}, which is not between 0 and 0.5; it is relative: 0.05 accepts 5% "
                "above and below the value"
            )

    def to_text(self) -> str:
        """Return JSON text: `{"value": "9.81 m/s^2", "tolerance": 0.05}`."""
        return json.dumps({"value": self.value, "tolerance": self.tolerance}, ensure_ascii=False)


@lru_cache(maxsize=4096)
def read_science_reference(text: str) -> Choices | MeasuredAnswer:
    """Return what a reference stands for; text that is not a JSON object is an answer without a tolerance.

    Raises:
        ValueError: If a JSON object is neither `Choices` nor `MeasuredAnswer`, a field is unusable, or it is empty.
    """
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return MeasuredAnswer(text)
    if "value" in data:
        measured = check_object(data, _FORM, {"value": str, "tolerance": float}, {})
        return MeasuredAnswer(measured["value"], float(measured["tolerance"]))
    form = f'{{"options": ["He", "Ne"], "answer": "B"}} or {_FORM}'
    data = check_object(data, form, {"options": list, "answer": str}, {})
    options, answer = data["options"], data["answer"]
    if not all(isinstance(option, str) for option in options):
        raise ValueError(f"has options that are not text; expected {form}")
    letters = ascii_uppercase[: len(options)]
    if len(answer) != 1 or answer not in letters:
        raise ValueError(f"has the answer {answer[:40]!r}, which is not the letter of an option ({letters})")
    return Choices(tuple(options), letters.index(answer))
