r"""The answer that a response marks, and the marks around it: tags, a box, emphasis, a block of code, `The answer is`.

The mark is the last `<answer>...</answer>`, else the last complete `\boxed{...}`. A response whose only box is not
closed has no answer, and neither has one whose mark is denied: `not \boxed{4}`, `<answer>4</answer> is wrong`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from brorl.prompts.answer_forms import find_last_box, has_open_box
from brorl.verification.domains.denial import denial_after, denial_before
from brorl.verification.domains.later_answer import without_next_turn

OPENING, CLOSING = "<answer>", "</answer>"

_MAX_MARKS = 8  # around each other
_LABEL = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my) )?(?:(?:final|correct) )?(?:answer|result|solution|output)\s*"
    r"(?:is\b\s*:?|:|=)\s*",
    re.IGNORECASE,
)
_MAX_CORRECTION = 2_000
_CORRECTION = re.compile(
    r"(?:^|[.!?\n\u2014-])[\s*]{0,3}(?:(?:but|oh|hmm+|and|no)\b,? )?"
    r"(?:(?:wait|actually|correction|sorry|oops|on second thought)\b|no(?=[,.!;:]))|"
    r"\b(?:I was wrong|my mistake|made an? (?:mistake|error)|let me (?:re\w+|check))\b",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Za-z]\s*=\s*(?=[-+.\d/]+$)")
_FENCE = re.compile(r"(```|~~~)[ \t]*\w*\n(.*?)\n?[ \t]*\1", re.DOTALL)
_AROUND = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), (r"\text{", "}"), (r"\mathrm{", "}"), (r"\texttt{", "}"),
)  # fmt: skip


def is_taken_back(after: str) -> bool:
    """Whether the text after an answer takes it back: `Wait, that is wrong`."""
    return _CORRECTION.search(after[:_MAX_CORRECTION]) is not None


def find_answer(response: str) -> str | None:
    """Return the text that a response marks as its answer, or the whole response; None if it is denied or cut off."""
    response = without_next_turn(response)
    end = response.rfind(CLOSING)
    start = response.rfind(OPENING, 0, max(end, 0))
    box = find_last_box(response) if start < 0 else None
    if start >= 0:
        found, before, after = response[start + len(OPENING) : end], response[:start], response[end + len(CLOSING) :]
    elif box is not None:
        found, before, after = box.content, response[: box.start], response[box.end :]
    else:
        return None if has_open_box(response) else response
    return None if denial_before(before) or denial_after(after) or is_taken_back(after) else found


def writings(answer: str) -> Iterator[str]:
    """Yield an answer, and the answer without one mark after the other around it."""
    text = answer.strip()
    yield text
    for _ in range(_MAX_MARKS):
        inner = _without_mark(text)
        if inner is None:
            break
        text = inner.strip()
        yield text


def _without_mark(text: str) -> str | None:
    box = find_last_box(text) if text.endswith("}") else None
    if box is not None and box.start == 0 and box.end == len(text):
        return box.content
    fence = _FENCE.fullmatch(text)
    if fence:
        return fence[2]
    for opening, closing in _AROUND:
        inner = text[len(opening) : -len(closing)]
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and inner
            and (closing == "**" or closing not in inner.replace("\\" + closing, ""))
        ):
            return inner
    label = _LABEL.match(text) or _VARIABLE.match(text)
    if label and label.end() < len(text):
        return text[label.end() :]
    return text[:-1] if text.endswith((".", "!")) and len(text) > 1 and not text.endswith("..") else None
