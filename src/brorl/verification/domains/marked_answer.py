r"""Finds the answer that a response marks with tags or a box, and removes the marks around an answer.

    `So it is \boxed{4}.`  ->  `4`        `It is not \boxed{4}.`, `<answer>4</answer> is wrong`  ->  None

The mark is the last `<answer>...</answer>`, or else the last complete `\boxed{...}`. A response has no answer if its
only box is not closed, or if the text around the mark denies the answer or takes it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from brorl.prompts.answer_forms import find_last_box, has_open_box
from brorl.verification.domains.denial import denial_after, denial_before
from brorl.verification.domains.retraction import retraction

OPENING, CLOSING = "<answer>", "</answer>"
ADVERBS = (
    r"(?:(?:clearly|definitely|certainly|obviously|evidently|indeed|therefore|thus|hence|then|consequently|simply|just|"
    r"exactly|precisely|in fact|of course)\b[,:*\s]*)*"
)
MARKER = re.compile(rf"\banswer\b[*_]*\s*(?:\b(?:is|should\s+be|must\s+be)\b|[:=])[*_:=,\s]*{ADVERBS}", re.IGNORECASE)
"""The words before an answer: `The answer is`, `**Answer:**`, `the answer is therefore`."""
LABEL = re.compile(
    r"\A(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my),? )?(?:(?:final|correct|right|best) )?"
    r"(?:answer|ans|result|solution|output|option|choice)\b\s*(?:is\b\s*:?|:|=)\s*",
    re.IGNORECASE,
)
"""The same words at the start of an answer: `So the final answer is`, `Result:`."""

_OPENING_OF_TURN = re.compile(  # <|im_start|>assistant
    r"(?: \s | <\|[a-z_]{1,20}\|>(?:(?:assistant|user|system)\b)? | \[/?INST\] | <start_of_turn>(?:model)? )*",
    re.VERBOSE,
)
_MARK_OF_TURN = re.compile(  # <|im_end|>
    r"""<\|(?:im_start|im_end|endoftext|eot_id|end|user|start_header_id|begin_of_text)\|>
      | \[/?INST\] | <(?:start|end)_of_turn> | </s>""",
    re.VERBOSE,
)
_NEXT_TURN = re.compile(
    r"""\n[ \t]*+ (?:
        (?:[#*\[<|]++[ \t]*+)?
        (?: (?P<speaker>user|human|system|student|teacher)             # User:
          | (?:(?:new|next|follow-up)\ )?                             # Next question:
            (?:assistant|q|instruction|exercise|question|problem)[ \t]{0,4}(?:\#?\d{1,3})?   # **Problem 2:**
        ) [\]>|*]{0,4}[ \t]{0,4}:
      | \#{1,6}[ \t]*+(?:question|problem|instruction|user|human)\b   # ### Problem 2
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_VARIABLE = re.compile(r"[A-Za-z]\s*=\s*(?=[-+.\d/]+$)")  # x = 4
_FENCE = re.compile(r"(```|~~~)[ \t]*\w*\n(.*?)\n?[ \t]*\1", re.DOTALL)  # a block of code
_MAX_MARKS = 8  # nested marks: `**$4$**` has 2
_AROUND = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), (r"\text{", "}"), (r"\mathrm{", "}"), (r"\texttt{", "}"),
)  # fmt: skip


def find_answer(response: str) -> str | None:
    """Return the marked answer; the whole response if nothing is marked; None if the mark is denied or not closed."""
    response = without_next_turn(response)
    marked = _last_mark(response)
    if marked is None:
        return None if has_open_box(response) else response
    before, answer, after = marked
    is_denied = denial_before(before) or denial_after(after) or retraction(before, answer, after)
    return None if is_denied else answer


def _last_mark(response: str) -> tuple[str, str, str] | None:
    """Return the text before, inside and after the last mark."""
    end = response.rfind(CLOSING)
    start = response.rfind(OPENING, 0, max(end, 0))
    if start >= 0:
        return response[:start], response[start + len(OPENING) : end], response[end + len(CLOSING) :]
    box = find_last_box(response)
    return (response[: box.start], box.content, response[box.end :]) if box else None


def without_next_turn(response: str) -> str:
    """Truncate a response where a different speaker takes over, or where a new task begins after the first answer."""
    if "<" in response or "INST]" in response:
        opening = _OPENING_OF_TURN.match(response)
        mark = _MARK_OF_TURN.search(response, opening.end() if opening else 0)
        response = response[: mark.start()] if mark else response
    answered: int | None = None
    for turn in _NEXT_TURN.finditer(response):
        answered = _first_answer(response) if answered is None else answered
        if turn.start() > answered or (turn["speaker"] and response[: turn.start()].strip()):
            return response[: turn.start()]
    return response


def _first_answer(response: str) -> int:
    """Return where a response's first answer begins; the response's length if it has none."""
    marker = MARKER.search(response)
    places = [place for place in (response.find("\\boxed"), response.find("\\fbox")) if place >= 0]
    return min([*places, marker.start() if marker else len(response)])


def writings(answer: str) -> Iterator[str]:
    """Yield an answer, then the answer with its marks removed one by one: `**$4$**`, `$4$`, `4`."""
    text = answer.strip()
    yield text
    for _ in range(_MAX_MARKS):
        inner = _without_mark(text)
        if inner is None:
            break
        text = inner.strip()
        yield text


def _without_mark(text: str) -> str | None:
    """Remove the outermost mark; None if the string has no marks."""
    box = find_last_box(text) if text.endswith("}") else None
    if box is not None and box.start == 0 and box.end == len(text):
        return box.content
    if fence := _FENCE.fullmatch(text):
        return fence[2]
    for opening, closing in _AROUND:
        inner = text[len(opening) : -len(closing)]
        is_around = bool(inner) and text.startswith(opening) and text.endswith(closing)
        if is_around and (closing == "**" or closing not in inner.replace("\\" + closing, "")):
            return inner
    label = LABEL.match(text) or _VARIABLE.match(text)
    if label and label.end() < len(text):
        return text[label.end() :]
    return text[:-1] if text.endswith((".", "!")) and len(text) > 1 and not text.endswith("..") else None
