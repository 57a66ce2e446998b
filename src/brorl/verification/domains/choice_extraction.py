r"""Finds the option that a response to a multiple-choice question names.

In: a response's text and the options. Out: the place of one option, or why there is none. The right option is not read:
a response names at most one option, whichever is right. The first of these that exists decides:

1. the last complete `\boxed{...}`;
2. the last line that concludes an option: `answer is B`, `answer: B`, `B is correct`, `B is the answer`;
3. the last text in bold that names an option;
4. the last line, if it names an option.

2 to 4 only read the last 2,000 characters. `choice_statement` reads a statement. These are hedges, and no option
counts: boxes of one paragraph with different options, different conclusions in one line, `is correct` of different
options in several lines, lines that start with different options in bold, and an option in bold in a line with another
option. `wrong answer is B` is no conclusion. A last line such as `So B` is one. The time is linear in the response's
length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from brorl.prompts.boxed import find_last_box
from brorl.prompts.choices import Choices
from brorl.verification.domains.choice_statement import (
    NO_OPTION,
    NOTHING,
    SEVERAL,
    Chosen,
    clean,
    is_only_options,
    is_rejected,
    named,
    names_another,
)
from brorl.verification.domains.denial import denial_after, denial_before

_TAIL = 2_000
_SHOWN = 200
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_ADVERB = r"(?:clearly|therefore|thus|hence|then|probably|likely|indeed|definitely|certainly|obviously|simply)"
_MARKER = re.compile(
    r"\b(?:answer|choice|option)\b[*_\s]*"
    rf"(?:\b(?:is|(?:would|should|must|will) be)\b(?:\s+{_ADVERB}\b,?)*|[:=])[*_:=\s]*|<answer>\s*",
    re.IGNORECASE,
)
_IS_RIGHT = re.compile(
    rf"\s(?:is|are)\s+(?:{_ADVERB}\s+)*(?:the\s+)?(?:only\s+)?"
    r"(?:(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?|answer)\b"
    r"(?=[*_]*(?:[.,;:!)]|\s*$|\s+(?:because|since|as|and|or|but|here|for|due|not|rather)\b))",
    re.IGNORECASE,
)
# Where the subject of `is correct` may start.
_CLAUSE = re.compile(
    r"^|(?:[,:;!?]|(?<!\b[A-Za-z])\.)\s+|"
    r"\b(?:so|thus|therefore|hence|(?:conclude|means|implies|shows|follows|see|find|know) that)\b[,:]?\s+",
    re.IGNORECASE,
)
_CLAUSES = 6  # the last ones before `is correct` that are tried
_LEAD = re.compile(
    r"^(?:(?:so|thus|therefore|hence|among the options|in conclusion|finally|only)\b[\s,:]*)+", re.IGNORECASE
)
_LIST_MARK = r"[ \t]*(?:[-+\u2022]|\*(?!\*)|\d+[.)])?[ \t]*"
_BOLD_ITEM = re.compile(rf"^{_LIST_MARK}\*\*([^*\n]+)\*\*", re.MULTILINE)


class _Statements(NamedTuple):
    """Statements of one kind in one line.

    Attributes:
        texts: The statements.
        around: Text before and after the first of them that must not name another option.
        rivals: Statements in other lines that must not name another option.
    """

    texts: list[str]
    around: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()


def choose(response: str, choices: Choices) -> Chosen:
    """Find the option that a response names.

    Args:
        response: Any string.
        choices: The options; the right one is not read.
    """
    box = find_last_box(response)
    if box is not None:
        chosen = named(box.content, choices)
        chosen = _agreed(chosen, (named(box, choices) for box in _boxes_beside(response)))
        denied = denial_before(response[: box.start]) or denial_after(response[box.end :])
        if chosen is NOTHING or (denied and chosen.problem is None):
            return Chosen(None, box.content[:_SHOWN].strip(), NO_OPTION)
        return chosen
    tail = response[-_TAIL:]
    beside: list[str] = []  # text that names no option, and must not name another one
    for statements in (*_conclusions(tail, choices), _in_bold(tail), _Statements([_last_line(tail)[1]])):
        found = [chosen for chosen in (named(one, choices) for one in statements.texts) if chosen is not NOTHING]
        if found:
            rivals = (named(one, choices) for one in statements.rivals)
            chosen = _agreed(found[-1], [*found, *rivals])
            place = chosen.place
            hedged = place is not None and (
                any(names_another(clean(text), place, choices) for text in statements.around)
                or any(names_another(clean(text), place, choices, joints=("",)) for text in beside)
            )
            return Chosen(None, chosen.text, SEVERAL) if hedged else chosen
        beside += statements.texts
    return NOTHING


def _agreed(chosen: Chosen, others: Iterator[Chosen] | list[Chosen]) -> Chosen:
    """Return a statement's option if no statement beside it names another one."""
    differ = any(other.place not in (chosen.place, None) or other.problem == SEVERAL for other in others)
    return Chosen(None, chosen.text, SEVERAL) if differ and chosen.problem is None else chosen


def _boxes_beside(response: str) -> Iterator[str]:
    """Yield the contents of the boxes in the paragraph of the last box; a box has one level of braces at most."""
    last = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    start = max(response.rfind("\n\n", 0, max(last, 0)), last - _TAIL, 0)
    return (match[1] for match in _BOX.finditer(response[start : last + _TAIL]))


def _conclusions(tail: str, choices: Choices) -> list[_Statements]:
    """Return what each line concludes, the last line first."""
    marked: dict[int, list[str]] = {}  # by the start of a line
    markers = list(_MARKER.finditer(tail))
    for marker, end in zip(markers, [*(after.start() for after in markers[1:]), len(tail)], strict=False):
        start = tail.rfind("\n", 0, marker.start()) + 1
        if not denial_before(tail[start : marker.end()]):
            marked.setdefault(start, []).append(tail[marker.end() : end].partition("\n")[0])
    verdicts: dict[int, list[str]] = {}
    start = 0
    for line in tail.split("\n"):
        verdicts[start] = _verdicts(line, choices)
        start += len(line) + 1
    last, line = _last_line(tail)
    if _LEAD.match(line) and is_only_options(_LEAD.sub("", line), choices):
        verdicts[last].append(_LEAD.sub("", line))
    rivals = tuple(one for statements in verdicts.values() for one in statements)
    return [
        _Statements([*marked.get(start, []), *found], rivals=rivals if found and start not in marked else ())
        for start, found in reversed(verdicts.items())
        if found or start in marked
    ]


def _verdicts(line: str, choices: Choices) -> list[str]:
    """Return the statements of the form `B is correct` in a line, without these words but with the text after them."""
    found, start = [], 0
    predicates = list(_IS_RIGHT.finditer(line))
    for predicate, end in zip(predicates, [*(after.start() for after in predicates[1:]), len(line)], strict=False):
        subject = _subject(line[start : predicate.start()], choices)
        if subject is not None:
            found.append(subject + line[predicate.end() : end])
        start = predicate.end()
    return found


def _subject(before: str, choices: Choices) -> str | None:
    """Return the options at the end of the text before `is correct`: of the last clause, and of clauses beside it."""
    starts = [match.end() for match in _CLAUSE.finditer(before)]
    starts = starts[:1] + starts[1:][-_CLAUSES:]
    texts = [_LEAD.sub("", before[start:].strip(" *_-")) for start in starts]
    last = next((at for at, text in enumerate(texts) if is_only_options(text, choices)), None)
    if last is None:
        return None
    between = (_LEAD.sub("", before[start : starts[last]].strip(" *_-.,:;")) for start in starts[:last])
    first = next((at for at, text in enumerate(between) if is_only_options(text, choices)), last)
    return texts[first]


def _in_bold(tail: str) -> _Statements:
    """Return the texts in bold of the last line that has one, without those that the words after them reject."""
    bold = list(_BOLD.finditer(tail))
    if not bold:
        return _Statements([])
    start = tail.rfind("\n", 0, bold[-1].start()) + 1
    here = [match for match in bold if match.start() >= start]
    line = tail[start:].partition("\n")[0]
    around = line[: here[0].start() - start], line[here[0].end() - start :]
    rivals = tuple(match[1] for match in _BOLD_ITEM.finditer(tail)) if _BOLD_ITEM.match(line) else ()
    texts = [match[1] for match in here if not is_rejected(line[match.end() - start :])]
    return _Statements(texts, around, rivals)


def _last_line(tail: str) -> tuple[int, str]:
    """Return the start and the text of the last line that is not blank."""
    text = tail.rstrip()
    start = text.rfind("\n") + 1
    return start, text[start:].strip()
