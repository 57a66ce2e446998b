r"""Reads one statement of a response to a multiple-choice question.

In: a statement, such as the content of a box or the text after `answer is`, and the options. Out: the place of the
option that it names, or why there is none.

A statement is an option and a rest. The option is a letter, the text of an option, or both (`B`, `neon`, `B. neon`,
`B (neon)`, `B = neon`, `neon (B)`). A letter decides over other words after it, except for the text of another option:
such a statement is contradictory. Other options in the rest (`A or B`) are a hedge, and no option counts. A reason (`B
because A is wrong`), a sentence that other options are wrong (`B. A and C are wrong`), and the words `A` and `I` in a
sentence (`B, I think`) are no hedge. A statement that rejects its option (`B is wrong`) names none.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from brorl.prompts.choices import Choices

NO_OPTION = "not an option"
SEVERAL = "several options"
CONTRADICTION = "letter and text of different options"

_DASHES = str.maketrans(dict.fromkeys("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "-"))
_STATEMENT = 2_000
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol)\b|\\[()\[\],;! ]|[{}$`*]|</?answer>"
)
_QUOTES = "\"'\u201c\u201d "
_QUOTED_LETTER = re.compile(r"[\"'\u201c\u201d]([A-Za-z])[\"'\u201c\u201d]")
_NOUN = r"(?:(?:option|choice|answer|letter)\s+)?"
# A letter that is set off: `(B)`, `B)`, `B.`, `B:`, or `B` alone. A lower-case one must be set off.
_SET_OFF = re.compile(rf"{_NOUN}(?:[(\[]\s*([a-z])\s*[)\]]|([a-z])\s*(?:[).:!\]]+|$))[).:!\]]*\s*", re.IGNORECASE)
# A bare capital: before a list of letters, a remark, a reason or a confirmation.
_BARE = re.compile(
    rf"(?i:{_NOUN})([A-Z])(?=\s*[-,;/&+(\[]|"
    r"\s+(?:because|since|as|for|due|which|and|or|nor|to|rather|instead|not|is (?:the )?(?:correct|right|best))\b)"
)
_LETTER_TEXT = re.compile(rf"(?i:{_NOUN})([A-Z])(?:\s*=\s*|\s+)")  # only with the text of an option
_TEXT_LETTER = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]]\W*$")  # `neon (B)`
_JOINT = re.compile(r"^(?:[\s,;:=]|-(?=\s))+")  # between a letter and the text of an option
_LETTER = re.compile(
    r"(?<![A-Za-z0-9'\u2019])(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])(?![A-Za-z0-9'\u2019])|([a-z])(?=\s*[).:\]])|"
    r"(?:or|and|nor|[/&,])\s*([a-z])\s*$)"
)
_SENTENCE_END = re.compile(r"(?<=[.;!?])\s+")
_CONNECTIVE = re.compile(r"\W*(?:or|and|nor|maybe|perhaps|possibly|also|too)\b|\s*[,/&+;]", re.IGNORECASE)
# A sentence that rejects options, unless it also supports one.
_REJECTS = re.compile(
    r"\b(?:wrong|incorrect|false|neither|rul(?:es?|ed|ing) out|eliminat\w+|exclud\w+|unlike|"
    r"not (?:the )?(?:correct|right|best|true|valid))\b",
    re.IGNORECASE,
)
_SUPPORTS = re.compile(
    r"(?<!not )(?<!not the )\b(?:correct|right|true|valid|best|fine|possible|plausible|maybe|perhaps|possibly|might|"
    r"could|may)\b|\bnot (?:wrong|incorrect|false)\b",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"\W*\b(?:is|are|was|seems|looks)\s+(?:(?:clearly|obviously|definitely|also|therefore|an?|the)\s+)*"
    r"(?:wrong|incorrect|false|not?)\b|\W*(?:or|and|but|maybe|perhaps)\s+(?:not|none|neither|all|any|another)\b|\s*[-:.]?\s*(?:(?:wrong|incorrect|false)\b(?!\s+(?:answer|option|choice))|no\W*$)",
    re.IGNORECASE,
)
# From here on a statement has its reason, which may name other options.
_REASON = re.compile(
    r"\b(?:because|since|due|which|where|whereas|while|unlike|instead|rather|than|not|though|although|for|eliminating|"
    r"excluding|ruling out|but (?:many|some|most|students|people|a common)|"
    r"(?<!well )as(?!\s+(?:well|is|are|also)\b))\b",
    re.IGNORECASE,
)
# In a reason, what precedes another option that is no less possible: `though it may be C`.
_ALSO = re.compile(r"\b(?:may|might|could)(?:\s+(?:also|well|equally))*\s+be\b(.{0,60})", re.IGNORECASE)
_AND = re.compile(r"\b(?:and|or|nor|both|either|option|choice)\b", re.IGNORECASE)
# The words `A` and `I`, and a letter of which something is said: `C is wrong`.
_ARTICLE = re.compile(
    r"\s+(?!(?:and|or|nor|to|as|but|also|too|maybe|possibly|perhaps|probably|either|if|though|then|"
    r"is|are|was|would|could|might|can|may)\b)[a-z]{2,}"
)
_PRONOUN = re.compile(
    r"\s+(?:am|think|believe|guess|suppose|assume|conclude|choose|chose|pick|would|will|feel|expect|say|find|have)\b"
)
_SUBJECT = re.compile(
    r"\s+(?:is|was|would|does|has|had|can|cannot|could|gives?|fails?|contradicts?|refers?|describes?)\b"
    r"(?!\s+(?:be\s+)?(?:an?|the|also|too|possible|correct|right|plausible|valid|true|fine|equally|likely|another)\b)"
)


class Chosen(NamedTuple):
    """The option that a response names.

    Attributes:
        place: Place of the option, None if there is none.
        text: The statement that was read, None if there was none.
        problem: Why there is no option; None if there is one, or no statement.
    """

    place: int | None
    text: str | None
    problem: str | None


NOTHING = Chosen(None, None, None)


class _Head(NamedTuple):
    """The option at the start of a statement.

    Attributes:
        letter: The letter in upper case; it may be no option's.
        rest: The text after the letter.
    """

    letter: str
    rest: str


def named(statement: str, choices: Choices) -> Chosen:
    """Return the option that a statement names; `NOTHING` if it names none.

    Args:
        statement: Any text; 2,000 characters are read.
        choices: The options; the right one is not read.
    """
    text = clean(statement[:_STATEMENT])
    place = _place_of_text(text, choices)
    if place is not None and (len(text) > 1 or not text.isalpha()):
        return Chosen(place, text, None)
    head = _head(text, choices)
    if head is None:
        return _text_before_letter(text, choices)
    if head.letter not in choices.letters:
        return Chosen(None, text, NO_OPTION)
    place = choices.letters.index(head.letter)
    meant = _place_of_rest(head.rest, choices)
    if meant is not None and meant != place:
        is_letter = head.rest.strip(" .").upper() in choices.letters
        return Chosen(None, text, SEVERAL if is_letter else CONTRADICTION)
    if meant is None and is_rejected(_without_own_text(head.rest, place, choices)):
        return NOTHING
    hedged = meant is None and names_another(head.rest, place, choices)
    return Chosen(None, text, SEVERAL) if hedged else Chosen(place, text, None)


def is_rejected(after: str) -> bool:
    """Whether the text after an option starts with words that reject it: `is wrong`, `: incorrect`."""
    return _REJECTED.match(after) is not None


def is_only_options(statement: str, choices: Choices) -> bool:
    """Whether a statement is an option, or several letters, and nothing else."""
    text = clean(statement[:_STATEMENT])
    if _place_of_text(text, choices) is not None:
        return True
    head = _head(text, choices)
    if head is None:
        return _text_before_letter(text, choices) is not NOTHING
    return _place_of_rest(head.rest, choices) is not None or not re.search(r"[A-Za-z]{2}", _AND.sub("", head.rest))


def names_another(
    text: str, place: int, choices: Choices, joints: tuple[str, ...] = ("or ", "and ", ", ", "; ", "/")
) -> bool:
    """Whether the text around an option names another option that it does not reject, by its letter or its text.

    Args:
        text: The text around the option, cleaned.
        place: The place of the option.
        choices: All options.
        joints: What precedes the text of another option.
    """
    text = _without_rejections(_without_own_text(text, place, choices))
    head, *reason = _REASON.split(text, maxsplit=1)
    for part in reason:
        head += "".join(f", {part[max(at.start() - 2, 0) : at.start()]}, {at[1]}" for at in _ALSO.finditer(part))
    for found in _LETTER.finditer(head):
        letter = next(group for group in found.groups() if group).upper()
        word = {"A": _ARTICLE, "I": _PRONOUN}.get(found[2] or "")
        is_word = _SUBJECT.match(head, found.end()) or (word and word.match(head, found.end()))
        if letter in choices.letters and letter != choices.letters[place] and not is_word:
            return True
    head = head.casefold()
    options = [option.casefold() for option in _cleaned(choices.options)]
    others = [(choices.letters[at].casefold(), option) for at, option in enumerate(options) if at != place]
    return any(
        any(f"{letter}{mark} {option}" in head for mark in ".):")
        or any(_has_word(head, f"{joint}{option}") for joint in joints)
        for letter, option in others
    )


def _head(text: str, choices: Choices) -> _Head | None:
    """Return the letter at the start of a statement; a capital before a plain word counts with an option's text."""
    match = _SET_OFF.match(text) or _BARE.match(text)
    if match is None:
        match = _LETTER_TEXT.match(text)
        if match is None or _place_of_text(_unwrapped(text[match.end() :]), choices) is None:
            return None
    return _Head(next(group for group in match.groups() if group).upper(), text[match.end() :])


def _text_before_letter(text: str, choices: Choices) -> Chosen:
    """Return the option of `neon (B)`."""
    match = _TEXT_LETTER.search(text)
    place = _place_of_text(text[: match.start()], choices) if match else None
    if match is None or place is None:
        return NOTHING
    agrees = match[1].upper() == choices.letters[place]
    return Chosen(place, text, None) if agrees else Chosen(None, text, CONTRADICTION)


def _without_own_text(rest: str, place: int, choices: Choices) -> str:
    """Remove the text of the option whose letter precedes it."""
    option = _cleaned(choices.options)[place].casefold()
    for form in _without_joint(rest):
        if form.casefold().startswith(option) and not form[len(option) : len(option) + 1].isalnum():
            return form[len(option) :]
    return rest


def _without_rejections(text: str) -> str:
    """Remove the sentences that reject options; one that continues a list (`or C, A is wrong`) stays."""
    sentences = _SENTENCE_END.split(text)
    return " ".join(
        one for one in sentences if _CONNECTIVE.match(one) or not _REJECTS.search(one) or _SUPPORTS.search(one)
    )


def _place_of_rest(rest: str, choices: Choices) -> int | None:
    """Return the place of the option whose text follows a letter; its minus sign is not a dash."""
    places = (_place_of_text(_unwrapped(form), choices) for form in _without_joint(rest))
    return next((place for place in places if place is not None), None)


def _without_joint(rest: str) -> tuple[str, str]:
    """Return the text after a letter as it is, and without the mark that joins it; `-1` keeps its minus sign."""
    return rest.strip(), _JOINT.sub("", rest, count=1)


def _has_word(text: str, part: str) -> bool:
    """Whether a part is in a text, at its first place between characters that are not of a word."""
    start, end = text.find(part), text.find(part) + len(part)
    return start >= 0 and not text[end : end + 1].isalnum() and not text[max(start - 1, 0) : start].isalnum()


def _unwrapped(text: str) -> str:
    """Return the content of brackets around a text."""
    text = text.strip(" .")
    return text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text


def _place_of_text(text: str, choices: Choices) -> int | None:
    """Return the place of the option with a text, without regard to case if only one option has it."""
    cleaned, text = _cleaned(choices.options), clean(text)
    for wanted, given in ((cleaned, text), ([option.casefold() for option in cleaned], text.casefold())):
        if wanted.count(given) == 1:
            return wanted.index(given)
    return None


@lru_cache(maxsize=4096)
def _cleaned(options: tuple[str, ...]) -> list[str]:
    return [clean(option) for option in options]


def clean(text: str) -> str:
    """Remove markup, quotes and a full stop around a text, and surplus space."""
    text = _QUOTED_LETTER.sub(r"\1", _WRAPPER.sub(" ", text).translate(_DASHES))
    return " ".join(text.split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES)
