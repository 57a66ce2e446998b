"""References for science questions: a measured answer with a tolerance, or options.

Options are permuted, so the right option's position reveals nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import ascii_uppercase
from typing import Any

from brorl.prompts.json_text import FORBID_UNKNOWN_KEYS, read_json
from brorl.seeds import uniform_hash

# `all of the above` makes sense only at the end, and `both A and B` only in the original order.
_LAST = re.compile(r"(?:all|none|both|neither|any|some)\b.*\b(?:above|these|the others|of them)\W*", re.IGNORECASE)
_LETTERS = re.compile(r"\b\(?[A-Z]\)?(?:,? (?:and|or|nor|but not) |, )\(?[A-Z]\)?(?![A-Za-z])")


@dataclass(frozen=True)
class Choices:
    """A question's options."""

    options: tuple[str, ...]  # 2 to 26 distinct strings; their letters are A, B, C, ... in this order
    right: int  # index of the right option

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
        """Order a row's options by a hash of the question, the option and the seed.

        Options such as `all of the above` come last. If an option names letters (`both A and B`), the order is kept.
        """
        cls(tuple(options), right)
        order = list(range(len(options)))
        if not any(_LETTERS.search(option) for option in options):
            order.sort(key=lambda at: uniform_hash(f"choices {seed}: {question}\n{options[at]}"))
            order.sort(key=lambda at: _LAST.fullmatch(options[at].strip()) is not None)
        return cls(tuple(options[at] for at in order), order.index(right))

    @property
    def letters(self) -> str:
        """The options' letters."""
        return ascii_uppercase[: len(self.options)]

    @property
    def letter(self) -> str:
        """The right option's letter."""
        return self.letters[self.right]

    def to_text(self) -> str:
        """Return JSON text: `{"options": ["He", "Ne"], "answer": "B"}`."""
        return json.dumps({"options": list(self.options), "answer": self.letter}, ensure_ascii=False)

    def under(self, question: str) -> str:
        """Return the question followed by one line per option: `A. He`."""
        lines = [f"{letter}. {option.strip()}" for letter, option in zip(self.letters, self.options, strict=True)]
        return "\n".join([question.strip(), "", *lines])


_FORM = '{"value": "9.81 m/s^2", "tolerance": 0.05} (0.05 accepts 5% above and below the value), or the value alone'


@dataclass(frozen=True)
class MeasuredAnswer:
    """A measured answer."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    value: str  # LaTeX or plain text, such as `9.81 m/s^2`
    tolerance: float = 0.0  # accepted relative error, 0 to 0.5; at 0, only rounding is accepted
    aliases: list[str] = field(default_factory=list)  # other correct answers, such as `New York City`

    def __post_init__(self) -> None:
        if not self.value.strip():
            raise ValueError("has an empty value")
        if not 0 <= self.tolerance <= 0.5:
            raise ValueError(
                f"has the tolerance {self.tolerance}, which is not between 0 and 0.5; it is relative: 0.05 accepts 5% "
                "above and below the value"
            )

    def to_text(self) -> str:
        """Return JSON text: `{"value": "9.81 m/s^2", "tolerance": 0.05}`, with `aliases` if there are any."""
        aliases = {"aliases": self.aliases} if self.aliases else {}
        return json.dumps({"value": self.value, "tolerance": self.tolerance, **aliases}, ensure_ascii=False)

    @classmethod
    def of_aliases(cls, value: str, aliases: Any) -> MeasuredAnswer:
        """Return an answer whose aliases are the strings in a list. Other values are ignored."""
        texts = aliases if isinstance(aliases, list) else []
        distinct = dict.fromkeys(text.strip() for text in texts if isinstance(text, str))
        return cls(value, aliases=[text for text in distinct if text and text != value.strip()])


@dataclass(frozen=True)
class _StoredChoices:
    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    options: list[str]
    answer: str


@lru_cache(maxsize=4096)
def read_science_reference(text: str) -> Choices | MeasuredAnswer:
    """Parse a reference. Text that is not a JSON object is an answer without a tolerance."""
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return MeasuredAnswer(text)
    if "value" in data:
        measured: MeasuredAnswer = read_json(MeasuredAnswer, text, _FORM)
        return measured
    form = f'{{"options": ["He", "Ne"], "answer": "B"}} or {_FORM}'
    stored: _StoredChoices = read_json(_StoredChoices, text, form)
    options = stored.options
    answer = stored.answer
    letters = ascii_uppercase[: len(options)]
    if len(answer) != 1 or answer not in letters:
        raise ValueError(f"has the answer {answer[:40]!r}, which is not the letter of an option ({letters})")
    return Choices(tuple(options), letters.index(answer))


def places(names: Sequence[str], wanted: str) -> list[int]:
    """Return the indices of the names equal to `wanted`. If there are none, ignore case."""
    plain = " ".join(wanted.split())
    plain_names = [" ".join(name.split()) for name in names]
    equal = [i for i, name in enumerate(plain_names) if name == plain]
    return equal or [i for i, name in enumerate(plain_names) if name.casefold() == plain.casefold()]
