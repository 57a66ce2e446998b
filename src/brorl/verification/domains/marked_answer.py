r"""Finds the answer that a response marks with tags or a box, and words around an answer that deny or replace it.

    `So it is \boxed{4}.`  ->  `4`        `It is not \boxed{4}.`, `<answer>4</answer> is wrong`  ->  None

The mark is the last `<answer>...</answer>`, else the last complete `\boxed{...}`. A response has no answer if its only
box is not closed, or if its mark is denied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from brorl.prompts.answer_forms import find_last_box, has_open_box
from brorl.verification.domains.retraction import retraction

_READ_BESIDE = 200
_LONGEST_RELATION = 12
_WORDS = 16
_MARKS = " \t$*_:([{\\"
_RELATION = re.compile(
    r"(?:\\(?:neq?|not|notin|[lg]eq?(?:slant)?|[lg]t|ll|gg|pm|mp)\s?=?|(?<![a-z/<][a-z\d])(?<![-=>])[<>]=?|"
    r"[\u2260\u2264\u2265\u00b1]|[=$(]\s?-)$"
)
# These words may stand between a denial and the answer: `not the correct answer is`.
_WORD = re.compile(r"\S+")
_BETWEEN = frozenset(
    _WORD.findall(
        "the a an final correct right best true answer option choice value number first is are was were be been being "
        "would should could can might will equal equals to that it its quite this say says said think thinks believe "
        "claim conclude write choose pick give put report sure certain i we my our ="
    )
)
_DENIALS = frozenset(
    _WORD.findall(
        "not never nor neither doubt doubtful unlikely hardly wrong incorrect false untrue worst cannot unsure whether "
        "pretend imagine if unless nobody who except than maybe perhaps possibly or exclude excludes excluded "
        "excluding eliminate eliminates eliminated eliminating reject rejects rejected rejecting refuse mistake "
        "mistaken error tempting suppose supposing assume assuming outside besides"
    )
)
_TWO_WORDS = re.compile(r"(?:rul(?:e|es|ed|ing) out|(?:any|every|no)thing but|least (?:likely|plausible|probable))")
_NOT = r"(?:\b(?:not|never|cannot)|n['\u2019]t)"
_AFFIRMATIONS = re.compile(
    r"(?:\b(?:no|without(?: a| any)?|beyond(?: a| any)?|little) (?:doubt|question)|\bnothing but|"
    r"\b(?:none|nothing|nobody|no one|no) (?:other|else)(?: \w+)? than|"
    rf"{_NOT} be (?:anything|any \w+) (?:other|else) than|{_NOT}(?: \w+)? doubt|"
    rf"{_NOT}(?: an?)? (?:wrong|incorrect|mistake|error))$"
)
# A bound that cannot be passed is the answer: `it cannot be done in fewer than 42 moves`.
_BOUND = re.compile(
    r"(?:\b(?:not?|never|nobody|none|cannot|impossible|unable)|n['\u2019]t)\b.*"
    r"\b(?:fewer|less|more|greater|larger|smaller|lower|higher) than$",
    re.IGNORECASE,
)
# Here `not` denies nothing, because the question asks for a false statement: `the statement that is not true is B`.
_RELATIVE = re.compile(
    r"\b(?:that|which|what) (?:cannot|\w+n['\u2019]t|"
    r"(?:(?:is|are|was|were|be|can|could|should|does|do) )+(?:not )?\S+)$"
)
_SUPPOSITION, _CONDITIONAL = frozenset({"if", "were", "had"}), frozenset({"would", "could", "might"})
_BESIDE = r"(?:[^\S\n]|[$*_()\]},;:-]|\\[)\],;! ]|\\q?quad(?![a-z]))*"
_AFTER = re.compile(
    rf"{_BESIDE}(?:\\(?:text|mbox|mathrm)\s*\{{\s*)?(?:(?:is|are|may|might|could|can|be)\s+)*(?:\w+ly\s+)?"
    r"(?:(?:nor|maybe|perhaps|possibly|alternatively|unless|or(?!\s+(?:so|equivalently|simply)\b))\b|"
    r"(?:al)?though\s+it\s+(?:may|might|could)\b|\\(?:neq?|not|pm)(?![a-zA-Z])|\u2260|"
    r"and\s+(?=(?:\$[^$=<>\n]{1,40}\$|\\\([^=<>\n]{1,40}?\\\))\s*(?:[.,;!\n]|$)))",
    re.IGNORECASE,
)


def _is_between(word: str) -> bool:
    is_adverb = word.endswith("ly") and word not in _DENIALS
    return word in _BETWEEN or is_adverb or (len(word) == 1 and not word.isdigit())


def denial_before(text: str) -> str:
    """Return the words at the end of a text that deny the answer after it, or name another answer."""
    line = text[-_READ_BESIDE:].rpartition("\n")[2].rstrip(_MARKS)
    if not line or line[-1] in ".!?":
        return ""
    relation = _RELATION.search(line, max(len(line) - _LONGEST_RELATION, 0))
    if relation and line.strip() != ">":  # `>` alone marks a quotation in Markdown
        return relation[0]
    words = line.lower().rsplit(None, _WORDS)
    at = len(words)
    while at and _is_between(word := words[at - 1].strip("$*_")):
        at -= 1
    if _AFFIRMATIONS.search(" ".join(words[max(at - 6, 0) : at])):
        return ""
    if words[at:] and words[-1] in ("is", "are") and _RELATIVE.search(" ".join(words[max(at - 6, 0) : at])):
        return ""
    if _BOUND.search(line):
        return ""
    if at and (
        word in _DENIALS
        or word.endswith(("n't", "n\u2019t"))
        or _TWO_WORDS.fullmatch(" ".join(words[max(at - 2, 0) : at]))
        or not (_CONDITIONAL.isdisjoint(words[at:]) or _SUPPOSITION.isdisjoint(words[:at]))
    ):
        return " ".join(words[at - 1 :])
    return ""


def denial_after(text: str) -> str:
    """Return the words at the start of a text that name an alternative to the answer before it: `or`, `unless`."""
    denial = _AFTER.match(text[:_READ_BESIDE])
    return denial[0] if denial else ""


ADVERBS = (
    r"(?:(?:clearly|definitely|certainly|obviously|evidently|indeed|therefore|thus|hence|then|consequently|simply|just|"
    r"exactly|precisely|in fact|of course)\b[,:*\s]*)*"
)
MARKER = re.compile(rf"\banswer\b[*_]*\s*(?:\b(?:is|should\s+be|must\s+be)\b|[:=])[*_:=,\s]*{ADVERBS}", re.IGNORECASE)
"""The words before an answer: `The answer is`, `**Answer:**`, `the answer is therefore`."""
# `User:` begins a turn of somebody else, `Question 2:` another task. `_MARK` has the marks of turns in chat templates.
_ROLES = "user human system student teacher"
_TASKS = "assistant q instruction exercise question problem"


def _any_case(names: str) -> str:
    """Return a pattern for words in lower case, in upper case, or with a capital: `user`, `USER`, `User`."""
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
    """Cut a response where somebody else begins to speak, or where another task begins after the first answer."""
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
    """Return where the first answer of a response begins; the response's length if it has none."""
    marker = MARKER.search(response)
    places = [place for place in (response.find("\\boxed"), response.find("\\fbox")) if place >= 0]
    return min([*places, marker.start() if marker else len(response)])


OPENING, CLOSING = "<answer>", "</answer>"

_MAX_MARKS = 8  # nested marks: `**$4$**` has 2
LABEL = re.compile(
    r"\A(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my),? )?(?:(?:final|correct|right|best) )?"
    r"(?:answer|ans|result|solution|output|option|choice)\b\s*(?:is\b\s*:?|:|=)\s*",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Za-z]\s*=\s*(?=[-+.\d/]+$)")
_FENCE = re.compile(r"(```|~~~)[ \t]*\w*\n(.*?)\n?[ \t]*\1", re.DOTALL)
_AROUND = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), (r"\text{", "}"), (r"\mathrm{", "}"), (r"\texttt{", "}"),
)  # fmt: skip


def find_answer(response: str) -> str | None:
    """Return the marked answer; the whole response if nothing is marked; None if the mark is denied or not closed."""
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
    taken_back = retraction(before, found, after)
    return None if denial_before(before) or denial_after(after) or taken_back else found


def writings(answer: str) -> Iterator[str]:
    """Yield an answer, then the answer with one mark after the other removed: `**$4$**`, `$4$`, `4`."""
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
    label = LABEL.match(text) or _VARIABLE.match(text)
    if label and label.end() < len(text):
        return text[label.end() :]
    return text[:-1] if text.endswith((".", "!")) and len(text) > 1 and not text.endswith("..") else None
