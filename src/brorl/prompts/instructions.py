"""The reference for an instruction-following question: the instructions that a response must follow.

These are the 25 kinds of IFEval (arXiv 2311.07911), with its ids and argument names, including `section_spliter`. The
original replaces a missing or unusable argument with a random one; here that is an error. There are three extensions
for other datasets: a relation may also be `at most`, `exactly` or `around`, `number_paragraphs` may have a `divider`,
and `constrained_response` may have `options`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Literal, get_args

from brorl.format import short_repr
from brorl.prompts.json_text import FORBID_UNKNOWN_KEYS, read_json

Relation = Literal["less than", "at least", "at most", "exactly", "around"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
LANGUAGES = (
    "af", "ar", "bg", "bn", "ca", "cs", "cy", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "gu", "he", "hi",
    "hr", "hu", "id", "it", "ja", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "ne", "nl", "no", "pa", "pl", "pt", "ro",
    "ru", "sk", "sl", "so", "sq", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "zh-cn", "zh-tw",
)  # fmt: skip
"""ISO 639-1 codes of the languages that langdetect detects."""

Value = str | int | tuple[str, ...]
_FORM = '{"instructions": [{"kind": "length_constraints:number_words", "num_words": 9, "relation": "at least"}]}'
_MAX_COUNT = 1_000_000


def _count(value: Any, least: int = 0) -> int:
    # Tables with missing values store integers as floats.
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value != int(value):
        raise ValueError(f"must be a whole number, got {short_repr(value)}")
    if not least <= value <= _MAX_COUNT:
        raise ValueError(f"must be between {least} and {_MAX_COUNT}, got {short_repr(value)}")
    return int(value)


def _text(value: Any, must_be: str = "a string", form: str = r"(?s).+") -> str:
    if not isinstance(value, str) or not re.fullmatch(form, value.strip()):
        raise ValueError(f"must be {must_be}, got {short_repr(value)}")
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of strings, got {short_repr(value)}")
    return tuple(map(_text, value))


def _letter(value: Any) -> str:
    if len(_text(value).lower()) != 1:
        raise ValueError(f"must be one character, got {short_repr(value)}")
    return _text(value)


def _one_of(allowed: Sequence[str], value: Any) -> str:
    if value not in allowed:
        raise ValueError(f"must be one of {', '.join(allowed)}, got {short_repr(value)}")
    return str(value)


_word = partial(_text, must_be="one word without punctuation", form=r"[^\s.,?!'\"]+")
_relation, _language = partial(_one_of, RELATIONS), partial(_one_of, LANGUAGES)

# argument -> (function that returns a valid value or raises a ValueError; description of accepted values)
_ARGUMENTS: Mapping[str, tuple[Callable[[Any], Value], str]] = {
    name: (check, admits)
    for names, check, admits in (
        ("frequency let_frequency num_sentences num_words num_placeholders num_bullets num_highlights num_sections "
         "capital_frequency", _count, "a whole number"),
        ("num_paragraphs nth_paragraph", partial(_count, least=1), "a whole number from 1"),
        ("keyword divider postscript_marker section_spliter prompt_to_repeat end_phrase", _text, "text"),
        ("keywords forbidden_words options", _texts, "a list of texts"),
        ("first_word", _word, "one word"),
        ("letter", _letter, "one character"),
        ("relation let_relation capital_relation", _relation, f"one of {', '.join(RELATIONS)}"),
        ("language", _language, "a code such as en"),
    )
    for name in names.split()
}  # fmt: skip
OPTIONAL = frozenset(("divider", "options"))
"""Arguments that may be missing."""
KINDS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(arguments.split())
    for kind, arguments in {
        "keywords:existence": "keywords",
        "keywords:frequency": "keyword frequency relation",
        "keywords:forbidden_words": "forbidden_words",
        "keywords:letter_frequency": "letter let_frequency let_relation",
        "language:response_language": "language",
        "length_constraints:number_sentences": "num_sentences relation",
        "length_constraints:number_paragraphs": "num_paragraphs divider",
        "length_constraints:number_words": "num_words relation",
        "length_constraints:nth_paragraph_first_word": "num_paragraphs nth_paragraph first_word",
        "detectable_content:number_placeholders": "num_placeholders",
        "detectable_content:postscript": "postscript_marker",
        "detectable_format:number_bullet_lists": "num_bullets",
        "detectable_format:constrained_response": "options",
        "detectable_format:number_highlighted_sections": "num_highlights",
        "detectable_format:multiple_sections": "section_spliter num_sections",
        "detectable_format:json_format": "",
        "detectable_format:title": "",
        "combination:two_responses": "",
        "combination:repeat_prompt": "prompt_to_repeat",
        "startend:end_checker": "end_phrase",
        "startend:quotation": "",
        "change_case:capital_word_frequency": "capital_frequency capital_relation",
        "change_case:english_capital": "",
        "change_case:english_lowercase": "",
        "punctuation:no_comma": "",
    }.items()
}
"""The kinds of instructions with their arguments."""


def _signature(kind: str) -> str:
    """Describe a kind's arguments and the values that each accepts, for messages."""
    admitted = [f"{_ARGUMENTS[name][1]}{', optional' if name in OPTIONAL else ''}" for name in KINDS[kind]]
    return ", ".join(f"{name} ({admits})" for name, admits in zip(KINDS[kind], admitted, strict=True)) or "none"


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    kind: str  # one of `KINDS`
    arguments: Mapping[str, Any]  # name -> value; None counts as missing

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = difflib.get_close_matches(self.kind.lower(), KINDS, 1)
            advice = f"did you mean {near[0]}?" if near else f"the kinds are {', '.join(KINDS)}"
            raise ValueError(f"has an unknown instruction {short_repr(self.kind)}; {advice}")
        names = KINDS[self.kind]
        arguments = {name: value for name, value in self.arguments.items() if value is not None}
        missing = next((name for name in names if name not in arguments and name not in OPTIONAL), None)
        if missing:
            raise ValueError(f"has no {missing} for {self.kind} (its arguments: {_signature(self.kind)})")
        unknown = next((name for name in arguments if name not in names), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, names, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            allowed = f"its arguments: {_signature(self.kind)}"
            raise ValueError(f"has the unknown argument {short_repr(unknown)} for {self.kind} ({allowed}){meant}")
        checked: dict[str, Value] = {}
        for name in names:
            if name in arguments:
                try:
                    checked[name] = _ARGUMENTS[name][0](arguments[name])
                except ValueError as error:
                    raise ValueError(f"has an unusable argument of {self.kind}: {name} {error}") from error
        object.__setattr__(self, "arguments", checked)
        if "less than" in checked.values() and 0 in checked.values():
            raise ValueError(f"has less than 0 for {self.kind}, which no response can satisfy")
        nth, total = (self.arguments.get(name, 0) for name in ("nth_paragraph", "num_paragraphs"))
        if nth > total:
            raise ValueError(
                f"has nth_paragraph {nth} above num_paragraphs {total} for {self.kind}, which no response can satisfy"
            )


@dataclass(frozen=True)
class _Stored:
    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    instructions: list[dict[str, Any]]
    loose: bool | None = None


@dataclass(frozen=True)
class Instructions:
    """The instructions of one question."""

    instructions: tuple[Instruction, ...]  # at least one; a correct response follows all of them
    # Whether a response may follow an instruction only once its first line, last line or asterisks are removed.
    loose: bool = False

    def __post_init__(self) -> None:
        if not self.instructions:
            raise ValueError("has no instructions")

    @classmethod
    def from_lists(cls, kinds: Sequence[str], arguments: Sequence[Any], loose: bool = False) -> Instructions:
        """Build instructions from two lists of equal length, as most datasets store them; None means no arguments."""
        if len(kinds) != len(arguments):
            raise ValueError(f"has {len(kinds)} instructions with {len(arguments)} lists of arguments")
        wrong = next((item for item in arguments if not isinstance(item, Mapping | None)), None)
        if wrong is not None:
            raise ValueError(f"has arguments that are not a mapping: {short_repr(wrong)}")
        return cls(tuple(Instruction(kind, item or {}) for kind, item in zip(kinds, arguments, strict=True)), loose)

    @classmethod
    def from_text(cls, text: str) -> Instructions:
        """Parse the JSON text from `to_text`."""
        data: _Stored = read_json(_Stored, text, _FORM)
        made = []
        for item in data.instructions:
            if not isinstance(item.get("kind"), str):
                raise ValueError(f"has an instruction without a kind: {short_repr(item)}; expected {_FORM}")
            made.append(Instruction(item["kind"], {name: value for name, value in item.items() if name != "kind"}))
        return cls(tuple(made), bool(data.loose))

    def to_text(self) -> str:
        """Return JSON text: `{"instructions": [{"kind": "punctuation:no_comma"}], "loose": false}`."""
        listed = [{"kind": instruction.kind, **instruction.arguments} for instruction in self.instructions]
        return json.dumps({"instructions": listed, "loose": self.loose}, ensure_ascii=False)
