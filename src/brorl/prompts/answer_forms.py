r"""Finds the answer form that a question asks for, and the last `\boxed{...}` in a string, in linear time.

A form counts only if the question asks for it; a heading `#### Task` or a mention of answers does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_MOSTLY = 0.9  # at least this fraction of the questions must ask for a form


class AnswerForm(NamedTuple):
    r"""An answer form: `\boxed{7}` has `\boxed{` before the answer and `}` after it."""

    name: str  # for messages
    before: str
    after: str

    def write(self, answer: str) -> str:
        """Return an answer in this form."""
        return f"{self.before}{answer}{self.after}"


ALONE = AnswerForm("alone", "", "")
"""The answer and nothing else."""
_WORD = r"\b(?:answers?|results?|solutions?|responses?|number|letter|option|choice|value|output)\b"
_REPLY = r"(?:reply|answer|respond|return|output|give|write|print|provide|state|produce|say|send)"
_NOTHING_ELSE = r"(?:only|just|solely|exclusively|nothing (?:else|but|more)|no other (?:text|words?))"
_ANSWER = r"(?:number|integer|answer|result|value|letter|word|name|option|choice|expression|formula|token|line|phrase)"
_FORMS = (
    (AnswerForm("in \\boxed{}", "\\boxed{", "}"), re.compile(r"\\(?:boxed|fbox)\b")),
    (AnswerForm("in <answer> tags", "<answer>", "</answer>"), re.compile(r"</?answer>", re.IGNORECASE)),
    (
        AnswerForm("after ####", "#### ", ""),
        re.compile(
            rf"(?im)(?:{_WORD}[^\n]{{0,200}}[^\n#]#{{4}}(?!#)|[^\n#]#{{4}}(?!#)[^\n]{{0,200}}{_WORD}"
            r"|^#{4} *(?:[<\[{$(]|your\b|final answer\b|answer\b))"
        ),
    ),
    (
        AnswerForm("after Answer:", "Answer: ", ""),
        re.compile(
            r"(?im)[\"'`\u201c*](?:the )?(?:final )?answer(?: is)?[:=]"
            r"|\b(?:form|format|line|with|as|by)\b[^\n]{0,80}\banswer: *[$<\[{(]"
            r"|^\W*(?:final )?(?:answer|A):\W*\Z"
        ),
    ),
    (
        ALONE,
        re.compile(
            rf"(?i)\b{_REPLY}\b[^.\n!?]{{0,60}}\b{_NOTHING_ELSE}\b(?! in (?!the\b|an?\b))"  # not a language
            rf"|\b{_NOTHING_ELSE}\s+{_REPLY}\b"
            rf"|\b{_REPLY}\b[^.\n!?]{{0,30}}\b(?:a |one )?(?:single|one) {_ANSWER}\b"
            rf"|\b(?:only|just) (?:the|an?|one|your)\b[\w -]{{0,30}}\b{_ANSWER}s?\b[.!]?\s*\Z"
            r"|\b(?:no|without)(?: any| further| your)? (?:explanations?|reasoning|working|commentary)\b"
            r"|\b(?:do not|don't|never) (?:explain|show your|reason|add (?:any|other)|include (?:any|other))\b"
            # the same words in other languages, near a word for an answer
            r"|(?:antwort|gib|r[eé]pon|rispond|respond|ответ|отвеч)\w*[^.\n!?]{0,60}"
            r"\b(?:nur|ausschließlich|sol[oa]|solamente|únicamente|seulement|uniquement|soltanto|apenas|somente|только)\b"
            r"|只(?:需|要)?(?:回答|输出|写|给出)|(?:回答|输出|答え|答)[^。\n]{0,20}(?:即可|のみ|だけ)"
        ),
    ),
)


def answer_forms(text: str) -> list[AnswerForm]:
    """Return the answer forms that a question asks for, in a fixed order; most questions ask for none."""
    forms = [form for form, pattern in _FORMS if pattern.search(text)]
    # ALONE together with a named form means only the answer, in that form
    return [form for form in forms if form.before or len(forms) == 1]


def asked_form(texts: Sequence[str]) -> AnswerForm | None:
    """Return the form that nearly all questions ask for, or None."""
    counts = Counter(form for text in texts for form in answer_forms(text)[:1])
    asked = sum(counts.values()) >= _MOSTLY * len(texts)
    return counts.most_common(1)[0][0] if counts and asked else None


_OPEN = re.compile(r"\\(?:boxed|fbox)\s*\{")
# any other escaped character is skipped
_BRACE = re.compile(rf"{_OPEN.pattern}|\\(?!\\(?:boxed|fbox)).|[{{}}]", re.DOTALL)


class Box(NamedTuple):
    """A box in a string."""

    start: int  # index of the backslash
    end: int  # index after the closing brace
    content: str  # text between the braces


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    box = find_last_box(text)
    return box.content if box else None


def find_last_box(text: str) -> Box | None:
    r"""Return the last complete `\boxed{...}` or `\fbox{...}` that is not nested in another, or None."""
    last: tuple[int, int, int] | None = None
    first = _OPEN.search(text)
    boxes: list[tuple[int, int] | None] = []  # stack of open braces: (start, end) of `\boxed{`, None for a plain `{`
    for match in _BRACE.finditer(text, first.start() if first else len(text)):
        if match[0].endswith("{") and match[0] != "\\{":
            boxes.append(match.span() if len(match[0]) > 1 else None)
        elif match[0] == "}" and boxes and (box := boxes.pop()):
            last = (*box, match.end())  # a box that closes later contains or follows the earlier ones
    return last and Box(last[0], last[2], text[last[1] : last[2] - 1])


_TWO_WORDS = re.compile(r"[^\W\d_]{2}\W+[^\W\d_]{2}")


def surrounds_answer(text: str) -> bool:
    """Return whether a string contains an answer rather than being one.

    Such a string has words before a box, begins with a thought, or is a list of strings.
    """
    box = _OPEN.search(text)
    is_solution = box is not None and _TWO_WORDS.search(text, 0, box.start()) is not None
    return is_solution or text.lstrip().startswith(("<think", '["', "['"))


def has_open_box(text: str) -> bool:
    r"""Return whether a string contains `\boxed{` or `\fbox{`. If no box is complete, the string is truncated."""
    return _OPEN.search(text) is not None
