r"""Finds the option named in a response to a multiple-choice question, with a strict grammar, in linear time.

The grammar never sees the correct option. It reads the last box, or else the last `the answer is`, or else a final
sentence such as `B is correct`, or else the whole response (docs/how-to/verify_science.md). A statement with words
other than a reason, such as `B or so`, does not name an option.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from brorl.prompts.answer_forms import Box, find_last_box
from brorl.prompts.science import Choices, places
from brorl.verification.domains.denial import denial_after, denial_before
from brorl.verification.domains.marked_answer import ADVERBS, LABEL, without_next_turn
from brorl.verification.domains.retraction import retraction

NO_OPTION = "not an option"
SEVERAL = "several options"

_READ = 2_000
_SHOWN = 200
_DASHES = str.maketrans(dict.fromkeys("\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "-"))
_MARKUP = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol)\b|\\[()\[\],;! ]|[{}$`*]|</?answer>"
)
_SCRIPT = re.compile(r"\s*([_^])\s*")
_QUOTES = "\"'\u201c\u201d "
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_SO = r"(?:so|thus|hence|therefore)\b,? *"
_I_THINK = r"I (?:(?:would|will|\'ll) )?(?:think|believe|conclude|say)(?: that)? "
# Starts a sentence or follows a clause: `The answer is`, `..., so the answer is`, `Since ..., the answer is`.
_MARKER = re.compile(
    rf"(?:(?:^[ \t#>*_-]*+|[.!;] +)(?:{_SO})?(?:(?:since|because|as) [^\n.;!?]{{1,200}}, )?|, *{_SO})"
    rf"(?:{_I_THINK})?(?:<answer>|[*_]*(?:(?:the|my) +)?"
    rf"(?:(?:final|correct|right|best) +)?(?:answer|choice|option)\b[*_ ]*(?:is\b|[:=]|$))[\s*_:=]*{ADVERBS}",
    re.IGNORECASE | re.MULTILINE,
)
_WHOLE = re.compile(_SO, re.IGNORECASE)
_CONCLUSION = re.compile(
    r" is (?:(?:therefore|thus|clearly|indeed) )?"
    r"(?:(?:the )?(?:only )?(?:correct|right|best|final)(?: (?:answer|option|choice))?|the (?:answer|option|choice))\b"
    r"(?=(?:[,;]? (?:because|since|as)\b[^.!?\n]*)?[.!*\s]*(?:$|[.!] ))",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=\w\w[.!]) ")
_REASON = re.compile(r",? \(?(?:because|since|as|not)\b(.*)", re.IGNORECASE)
_HEDGE = re.compile(
    r"\b(?:but|or|although|though|unless|may|might|maybe|perhaps|could|possibly|possible|probably|also|however|if|sure|"
    r"doubt|else|otherwise|wait|actually|instead|rather)\b|[?\n]",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\bwould\b.* only if\b|\bif\b.*, .*\bwould have been\b", re.IGNORECASE)  # contrary to fact
_EXPLANATION = re.compile(
    r"\n[\s#>*_]*(?:explanation|reason|reasoning|rationale|justification)\b[*_ ]*(?::|\n)", re.IGNORECASE
)
_REMARK = re.compile(r"(?<=[\w)*][.!])(?=[\s*])|(?<=[\w)*][.!]\*\*)(?=\s)|\n")
_MAX_SENTENCES = 3
_WORD = re.compile(r"[^\W\d_]{2,}")
_OTHER_LETTER = re.compile(r"\b[A-J]\b(?!['\u2019])")
_LETTER = re.compile(
    r"(?:(?:option|choice|answer|letter) )?(?:[(\[] ?([A-Z]) ?[)\]]|([A-Z])(?![A-Z0-9]))(.*)", re.IGNORECASE
)
_JOINT = re.compile(r"^(?:[\s.,;:=)\]]|-(?=\s))+")  # between a letter and the option's text: `B: 42`


class ChosenOption(NamedTuple):
    """The option that a response names."""

    option: int | None  # the option's index; None if the response names no option
    text: str | None  # the statement that was read; None if there was none
    problem: str | None  # why the statement does not name an option; None if it does


def chosen_option(response: str, choices: Choices) -> ChosenOption:
    """Find the option that a response names. The response may be any string. The correct option is not used."""
    response = without_next_turn(response)
    box = find_last_box(response)
    if box is not None:
        return _in_box(response, box, choices)
    stated = _stated(response[-_READ:], choices)
    if stated is not None:
        return stated
    statement = response.strip() if len(response) <= _READ else ""
    if _EXPLANATION.search(statement):
        statement = _without_remarks(statement, choices)
    option = _option(_WHOLE.sub("", statement, count=1), choices)
    return ChosenOption(option, None if option is None else statement, None)


def _stated(text: str, choices: Choices) -> ChosenOption | None:
    """Read the last `the answer is`, or else a final sentence such as `B is correct`; None if there is neither."""
    markers = list(_MARKER.finditer(text))
    if not markers:
        return _in_conclusion(text.strip(), choices)
    line = text.rfind("\n", 0, markers[-1].start()) + 1
    statement = _without_remarks(text[markers[-1].end() :].strip(), choices)
    several = sum(marker.start() >= line for marker in markers) > 1
    return _chosen(_with_reason(statement, choices), statement, several)


def _without_remarks(statement: str, choices: Choices) -> str:
    """Cut a statement after the sentence that names an option, unless later sentences change the option."""
    ends = [end.start() for end in _REMARK.finditer(statement)]
    for end in reversed(ends[:_MAX_SENTENCES]):
        option = _with_reason(statement[:end], choices)
        if option is not None:
            return statement[:end] if _are_remarks(statement[end:], option, choices) else statement
    return statement


def _are_remarks(rest: str, option: int, choices: Choices) -> bool:
    """Return whether the sentences after a statement leave its option unchanged."""
    if retraction("", choices.letters[option], f"\n{rest}"):
        return False
    concluded = _in_conclusion(rest.strip(), choices)
    if concluded is not None and concluded.option != option:
        return False
    if _EXPLANATION.match(rest):
        return True
    return all(_is_remark(sentence.strip(" \n*_"), option, choices) for sentence in _REMARK.split(rest))


def _is_remark(sentence: str, option: int, choices: Choices) -> bool:
    """Return whether a sentence does no more than comment on other options: `Option A is too light.`, not `C or D.`."""
    if _option(sentence, choices) not in (None, option):
        return False
    others = {choices.letters.find(letter) for letter in _OTHER_LETTER.findall(sentence)} - {-1, option}
    is_prose = len(_WORD.findall(sentence)) > 1 and sentence[:1].isupper()
    is_sure = not _HEDGE.search(sentence.replace("?", "")) or bool(_SUPPOSED.search(sentence))
    return not others or (is_prose and is_sure)


def _in_box(response: str, box: Box, choices: Choices) -> ChosenOption:
    """Read the last box, along with earlier boxes in its paragraph and the words after it."""
    before, after = response[max(box.start - _READ, 0) : box.start], response[box.end : box.end + _READ]
    option = _option(box.content, choices)
    if option is None and len(box.content) <= _READ and not _OTHER_LETTER.search(_clean(box.content)):
        stated = _stated(after, choices)
        if stated is not None and stated.option is not None:
            return stated
    denied = denial_before(before) or denial_after(after)
    beside = list(_BOX.finditer(before, before.rfind("\n\n") + 1))
    named = {option}
    for match, end in zip(beside, [*(match.start() for match in beside[1:]), len(before)], strict=False):
        other = _option(match[1], choices)
        letter = match[1] if other is None else choices.letters[other]
        if retraction("", letter, before[match.end() : end]) is None:
            named.add(other)
    later = {_with_reason(after[marker.end() :].partition("\n")[0], choices) for marker in _MARKER.finditer(after)}
    letter = box.content if option is None else choices.letters[option]
    several = len(named | later) > 1 or retraction(before, letter, after) is not None
    return _chosen(None if denied else option, box.content, several)


def _in_conclusion(text: str, choices: Choices) -> ChosenOption | None:
    """Read a final sentence such as `B is correct`; None for any other ending."""
    paragraph = text.rpartition("\n\n")[2].split("\n")
    line = paragraph[-1].strip(" *_$")
    conclusions = list(_CONCLUSION.finditer(line))
    if not conclusions:
        return None
    *sentences, last = _SENTENCE.split(line[: conclusions[-1].start()])
    option = _option(_WHOLE.sub("", last, count=1), choices)
    if option is None:
        return None
    others = {_option(other, choices) for other in [*paragraph[:-1], *sentences]} - {None, option}
    hedged = _HEDGE.search(line, conclusions[-1].end()) is not None
    return _chosen(option, last, several=len(conclusions) > 1 or hedged or bool(others))


def _with_reason(statement: str, choices: Choices) -> int | None:
    """Return the option in a statement that may end with a reason: `D, since the others are too small`, `B, not A`."""
    option = _option(statement, choices)
    match = _REASON.search(statement) if option is None else None
    if match is None or _HEDGE.search(match[1]):
        return option
    option = _option(statement[: match.start()], choices)
    return None if option is not None and option == _option(match[1].strip(" ."), choices) else option


def _chosen(option: int | None, statement: str, several: bool) -> ChosenOption:
    problem = SEVERAL if several else NO_OPTION if option is None else None
    return ChosenOption(None if problem else option, statement[:_SHOWN].strip(), problem)


def _option(statement: str, choices: Choices) -> int | None:
    """Return the index of the option that a statement names; None if the statement contains anything else."""
    if len(statement) > _READ or "\n" in statement.replace("</answer>", "").strip():
        return None
    text = LABEL.sub("", _clean(statement), count=1)
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
    """Return the index of the option with this text. Case is ignored unless several options then match."""
    matches = places(_cleaned(choices.options), _clean(text))
    return matches[0] if len(matches) == 1 else None


@lru_cache(maxsize=4096)
def _cleaned(options: tuple[str, ...]) -> list[str]:
    return [_clean(option) for option in options]


def _clean(text: str) -> str:
    """Remove markup, quotes, a final period and extra spaces."""
    text = _SCRIPT.sub(r"\1", _MARKUP.sub(" ", text).translate(_DASHES))
    return " ".join(text.split()).strip(_QUOTES).removesuffix(".").strip(_QUOTES)
