r"""Finds the option that a response to a multiple-choice question names, by a strict grammar.

The right option is not read. The first of these that exists decides, and nothing else is read:

1. the last complete `\boxed{...}`; boxes of one paragraph must name the same option, and no word may deny it;
2. the last `the answer is ...`, `Answer: ...` or `<answer>...`, with nothing after its statement;
3. the whole response.

A statement is a letter (`B`, `(b)`, `Option B.`), the text of an option, or a letter and the text of its option
(`B. neon`, `B (neon)`, `B = neon`). Any other word in it, such as `B or C` or `B, I think`, makes it no option. Rule 2
reads only the last 2,000 characters. The time is linear in the response's length.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from brorl.prompts.boxed import find_last_box
from brorl.prompts.science import Choices
from brorl.verification.domains.denial import denial_after, denial_before

NO_OPTION = "not an option"
SEVERAL = "several options"

_READ = 2_000
_SHOWN = 200
_DASHES = str.maketrans(dict.fromkeys("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "-"))
_MARKUP = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol)\b|\\[()\[\],;! ]|[{}$`*]|</?answer>"
)
_QUOTES = "\"'\u201c\u201d "
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_SO = r"(?:so|thus|hence|therefore)\b,? *"
# At the start of a sentence, or after a comma with `so`.
_MARKER = re.compile(
    rf"(?:^[ \t#>*_-]*(?:{_SO})?|[.!;] +(?:{_SO})?|, *{_SO})(?:<answer>|[*_]*(?:(?:the|my) +)?"
    r"(?:(?:final|correct|right|best) +)?(?:answer|choice|option)\b[*_ ]*(?:is\b|[:=]|$))[\s*_:=]*",
    re.IGNORECASE | re.MULTILINE,
)
_WHOLE = re.compile(_SO, re.IGNORECASE)
_LETTER = re.compile(
    r"(?:(?:option|choice|answer|letter) )?(?:[(\[] ?([A-Z]) ?[)\]]|([A-Z])(?![A-Z0-9]))(.*)", re.IGNORECASE
)
_JOINT = re.compile(r"^(?:[\s.,;:=)\]]|-(?=\s))+")  # between a letter and the text of its option


class ChosenOption(NamedTuple):
    """The option that a response names."""

    option: int | None  # index of the option, None if there is none
    text: str | None  # the statement that was read, None if there was none
    problem: str | None  # why the statement names no option; None if it names one, or there was none


def choose(response: str, choices: Choices) -> ChosenOption:
    """Find the option that a response names.

    Args:
        response: Any string.
        choices: The options; the right one is not read.
    """
    box = find_last_box(response)
    if box is not None:
        denied = denial_before(response[: box.start]) or denial_after(response[box.end :])
        start = max(response.rfind("\n\n", 0, box.start), box.start - _READ, 0)
        option = _option(box.content, choices)
        beside = response[start : min(box.end, box.start + _READ)]
        named = {option, *(_option(match[1], choices) for match in _BOX.finditer(beside))}
        return _chosen(None if denied else option, box.content, several=len(named) > 1)
    tail = response[-_READ:]
    markers = list(_MARKER.finditer(tail))
    if markers:
        line = tail.rfind("\n", 0, markers[-1].start()) + 1
        statement = tail[markers[-1].end() :].strip()
        several = sum(marker.start() >= line for marker in markers) > 1
        return _chosen(_option(statement, choices), statement, several)
    option = _option(_WHOLE.sub("", response.strip(), count=1), choices) if len(response) <= _READ else None
    return ChosenOption(option, None if option is None else response.strip(), None)


def _chosen(option: int | None, statement: str, several: bool) -> ChosenOption:
    problem = SEVERAL if several else NO_OPTION if option is None else None
    return ChosenOption(None if problem else option, statement[:_SHOWN].strip(), problem)


def _option(statement: str, choices: Choices) -> int | None:
    """Return the index of the option that a statement names; None if it names none, or has anything else."""
    if len(statement) > _READ or "\n" in statement.replace("</answer>", "").strip():
        return None
    text = _clean(statement)
    option = _option_of_text(text, choices)
    if option is not None and (len(text) > 1 or not text.isalpha()):
        return option
    match = _LETTER.fullmatch(text)
    option = choices.letters.find((match[1] or match[2]).upper()) if match else -1
    if match is None or option < 0:
        return None
    joined = _JOINT.sub("", match[3])
    bare = joined[1:-1] if joined[:1] + joined[-1:] in ("()", "[]") else joined
    meant = {_option_of_text(form, choices) for form in (match[3], joined, bare)} - {None}
    return option if meant == {option} or (not meant and not joined.strip("!")) else None


def _option_of_text(text: str, choices: Choices) -> int | None:
    """Return the index of the option with a text, without regard to case if only one option has it."""
    cleaned, text = _cleaned(choices.options), _clean(text)
    for wanted, given in ((cleaned, text), ([option.casefold() for option in cleaned], text.casefold())):
        if wanted.count(given) == 1:
            return wanted.index(given)
    return None


@lru_cache(maxsize=4096)
def _cleaned(options: tuple[str, ...]) -> list[str]:
    return [_clean(option) for option in options]


def _clean(text: str) -> str:
    """Remove markup, quotes and a period around a text, and surplus space."""
    text = _MARKUP.sub(" ", text).translate(_DASHES)
    return " ".join(text.split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES)
