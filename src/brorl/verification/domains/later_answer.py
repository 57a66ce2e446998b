r"""Reads what follows an answer: another answer, words that take it back, and the turn of somebody else.

After `\boxed{42}`, the sentence `The final answer is 43.` names another answer, and `Scratch that.` leaves none. What
comes after `User:` or `<|im_end|>` is no part of a response. The time is linear in the length of the text.
"""

from __future__ import annotations

import re

from brorl.verification.domains.denial import denial_before

_READ = 2_000
MARKER = re.compile(r"\banswer\b[*_]*\s*(?:\b(?:is|should\s+be|must\s+be)\b|[:=])[*_:=\s]*", re.IGNORECASE)
"""What an answer follows: `The answer is`, `**Answer:**`."""
_LATER = re.compile(
    rf"{MARKER.pattern}|\n####[ \t]*|"
    r"\b(?:correct|right|true|actual|final) (?:value|result|number|solution) (?:is|=)\s*|"
    r"\b(?:correction|actually|no,?\s+wait|wait)\b[\s,:*]*(?:(?:it|that)(?:\s+is|'s)\b)?\s*|"
    r"\b(?:it|this|that|answer|result|value)\s+should\s+(?:really\s+|actually\s+)?(?:be|have\s+been)\s+",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"\$\$?([^$]{1,200})\$|\\\((.{1,200}?)\\\)|"
    r"\**(-?\(?[A-J]\)?(?![\w'])|-?[\d.]*\d[\d.,/]*(?<![.,])(?:\\?%)?|-?\\frac\{[^{}]*\}\{[^{}]*\})"
)
_RETRACTION = re.compile(
    r"\b(?:on second thoughts?|i (?:hereby |now |must |have to )?(?:retract|withdraw|take (?:that|it|this) back)|"
    r"(?:scratch|strike|disregard|ignore) (?:that|this|it|my|the (?:above|previous|last|boxed))\b|no,? wait|oops|"
    r"my mistake|never ?mind|sorry|i meant|i was (?:wrong|mistaken))\b",
    re.IGNORECASE,
)
_SKELETON = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[\s${}*]"
)
_BARE = re.compile(r"^\(([A-Ja-j])\)")
# Lines with which somebody else speaks, or another task begins; and the marks of turns in templates of chats.
_ROLES = "user human system student teacher"
_TASKS = "assistant q instruction exercise question problem"


def _any_case(names: str) -> str:
    """Return a pattern of words in lower case, in upper case, or with a capital."""
    return "|".join(f"[{name[0].upper()}{name[0]}]{name[1:]}|{name.upper()}" for name in names.split())


_LINE = re.compile(
    rf"\n[ \t]*+(?:[#*\[<|]++[ \t]*+)?(?:({_any_case(_ROLES)})|(?:(?:{_any_case('new next follow-up')}) )?"
    rf"(?:{_any_case(_TASKS)})[ \t]{{0,4}}(?:#?\d{{1,3}})?)[\]>|*]{{0,4}}[ \t]{{0,4}}:|"
    rf"\n[ \t]*+#{{1,6}}[ \t]*+(?:{_any_case('question problem instruction user human')})\b"
)
_MARK = re.compile(
    r"<\|(?:im_start|im_end|endoftext|eot_id|end|user|start_header_id|begin_of_text)\|>|\[/?INST\]|"
    r"<(?:start|end)_of_turn>|</s>"
)
_OPENING = re.compile(
    r"(?:\s|<\|[a-z_]{1,20}\|>(?:(?:assistant|user|system)\b)?|\[/?INST\]|<start_of_turn>(?:model)?)*"
)


def without_next_turn(response: str) -> str:
    """Return a response up to where somebody else speaks, or where another task begins after the first answer."""
    if "<" in response or "INST]" in response:
        opening = _OPENING.match(response)
        mark = _MARK.search(response, opening.end() if opening else 0)
        response = response[: mark.start()] if mark else response
    answered: int | None = None
    for line in _LINE.finditer(response):
        answered = _first_answer(response) if answered is None else answered
        if line.start() > answered or (line[1] and response[: line.start()].strip()):
            return response[: line.start()]
    return response


def _first_answer(response: str) -> int:
    """Return where the first answer of a response begins, its length if it has none."""
    marker = MARKER.search(response)
    places = [place for place in (response.find("\\boxed"), response.find("\\fbox")) if place >= 0]
    return min([*places, marker.start() if marker else len(response)])


def later_answer(after: str, answer: str) -> str | None:
    """Return another answer that the text after an answer names, or words that take it back; None if it stays."""
    tail = after[-_READ:]
    markers = list(_LATER.finditer(tail))
    if markers and not denial_before(tail[: markers[-1].end()]):
        value = _VALUE.match(tail[markers[-1].end() :].split("\n")[0])
        text = next((group for group in value.groups() if group), "") if value else ""
        if text and not _is_same_writing(answer, text):
            return text
    found = _RETRACTION.search(after[:_READ])
    rest = _SKELETON.sub("", after[found.end() : _READ]) if found else ""
    return found[0] if found and _SKELETON.sub("", answer) not in rest else None


def _is_same_writing(answer: str, later: str) -> bool:
    """Whether two answers are written alike, or one of them is the other one with words or a name."""
    one, other = (_BARE.sub(r"\1", _SKELETON.sub("", text).rstrip(".,;:!")) for text in (answer, later))
    short, long = sorted((one, other), key=len)
    begins = long.startswith(short) and not re.match(r"[\d.,/^!]", long[len(short) :])
    return one == other or begins or long.endswith(f"={short}")
