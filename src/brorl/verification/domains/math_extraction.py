r"""Extracts the answer from a response to a mathematical question, as the model wrote it, in linear time.

It is the first of these: the last box, what follows the last `answer is`, the last formula, the last number
(docs/how-to/verify_math.md). Words that deny it (`not \boxed{4}`) stay with it.
"""

from __future__ import annotations

import re

from brorl.prompts.answer_forms import Box, find_last_box, has_open_box
from brorl.verification.domains.marked_answer import (
    MARKER,
    denial_after,
    denial_before,
    later_answer,
    without_next_turn,
)
from brorl.verification.domains.units import parse_unit

_READ = 80  # characters beside a box
_OPERATOR = re.compile(
    r"(?:\\(?:cdot|times|div|pm|mp|sqrt|frac|binom)(?:\[[^][]*\])?|[/^]|\}\s*)\s*\{?$|\d+(?:\.\d+)?$"
)
_OPEN_FORMULA = re.compile(r"(?:\$|\\\(|\\\[)(?:(?!\$|\\\)|\\\]).)*$|[=<>]\s*\S*$")
_OPERATION = re.compile(
    r"(?<!\S)(minus|negative|twice|double|triple|half|(?:half|(?:square|cube) root|square|cube|reciprocal|opposite|"
    r"inverse|negation|complement|multiple|factorial|logarithm) of)$"
)
_DIGITS_ALONE = re.compile(r"[^A-Za-z]*\d[^A-Za-z]*")
_GLUED = re.compile(r"\.?\d[\d.]*(?<!\.)|[a-zA-Z](?![a-zA-Z'])")
_PART = re.compile(
    r"[^\S\n]*(?:\}\s*)*(\\?%|(?:\^|_\s*\{?\s*\d|\\(?:cdot|times|div|pi|sqrt|frac|pm|circ)(?![a-zA-Z])|"
    r"[*/+-]\s*(?=[\d(\\]|[a-zA-Z](?![a-zA-Z])))[^$\n,;=<>&]*)"
)
_WORD = re.compile(
    r"(?:[^\S\n]|\$|\\text\s*\{)*("
    r"(?:hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial)\b|"
    r"(?:plus|minus|times|over|divided by)\s+\$?[\d\\][^\s$,;]*)"
)
_FORMULA_END = re.compile(r"\\[)\]]|\.(?!\d)|\\(?:q?quad|text|implies|Rightarrow)")
_UPRIGHT_UNIT = re.compile(
    r"(?:[\s~]|\\[,;: ])*((?:\\(?:text|mathrm|textrm)\s*\{[^{}]{1,30}\}(?:\^\{?-?\d\}?)?[\s/*]*){1,3})"
)
_PLAIN_UNIT = re.compile(r"\$?[^\S\n]*\$?((?:[^\W\d_]|[°µ])[^\s$,;:!?()]{0,20}(?: [^\W\d_][^\s$,;:!?()]{0,12}){0,3})")


def with_sign(before: str, answer: str) -> str:
    r"""Return an answer with the sign or the operator directly before its box: `-\boxed{42}` says -42."""
    if operation := _OPERATION.search(before[-_READ:].rstrip(" \t\n$({\\").lower()):
        return f"{operation[1]} {answer}"
    is_apart = before[-1:].isspace()
    line = before[-_READ:].rpartition("\n")[2].rstrip(" \t")
    if line.endswith(("$", "\\(", "\\[")) and not line[:-1].endswith("\\"):
        line = line.removesuffix("$").removesuffix("\\(").removesuffix("\\[")
        if line[-1:] not in ("-", "\N{MINUS SIGN}"):
            return answer
    if line[-1:] in ("-", "\N{MINUS SIGN}"):
        return _with_minus(line[:-1], is_apart, answer)
    if not is_apart and (operator := _OPERATOR.search(line)) and (line[-1].isdigit() or _OPEN_FORMULA.search(line)):
        return f"{operator[0]} {answer}"
    return answer


def _with_minus(body: str, is_apart: bool, answer: str) -> str:
    is_dash = is_apart and (body[-1:].isspace() or not body)  # or the mark of a list
    body = body.rstrip()
    in_formula = _OPEN_FORMULA.search(body) or _DIGITS_ALONE.fullmatch(body)
    if body.endswith("-") or (is_dash and not in_formula):
        return answer
    if in_formula and (body[-1:].isalnum() or body[-1:] in (")", "}", "]")):
        return f"{body.split()[-1]} - {answer}"
    return f"-{answer}" if re.fullmatch(r"[\d.,]+", answer) else f"-({answer})"


def with_tail(after: str, answer: str) -> tuple[str, int]:
    r"""Return an answer with the factor or the unit directly after its box, and where that ends: `\boxed{10} km/s`."""
    near = after[:_READ]
    if glued := _GLUED.match(near):
        return answer + glued[0], glued.end()
    if part := _PART.match(near):
        end = _FORMULA_END.search(part[1])
        length = end.start() if end else len(part[1])
        return f"{answer}{part[1][:length]}".rstrip(), part.start(1) + length
    if word := _WORD.match(near):
        return f"{answer} {word[1]}", word.end()
    if any(character.isalpha() for character in re.sub(r"\\[a-zA-Z]+", "", answer)):
        return answer, 0
    upright = _UPRIGHT_UNIT.match(near)
    if upright:
        unit = upright[1].strip()
        return (f"{answer} {unit}", upright.end()) if parse_unit(unit) else (answer, 0)
    plain = _PLAIN_UNIT.match(near)
    if plain is None:
        return answer, 0
    words = plain[1].split(" ")
    for length in range(len(words), 0, -1):
        text = " ".join(words[:length]).rstrip(".")
        is_last = length == len(words) and not re.match(r"[^\S\n]*[^\W\d_]", near[plain.end() :])
        if parse_unit(text) is not None and (is_last or len(text) > 3 or "/" in text or "^" in text):
            return f"{answer} {text}", plain.start(1) + len(text)
    return answer, 0


_TAIL = 2_000
_TIDIED = 4_000  # no verifier reads a longer answer; each mark at its end takes a pass over it
_MAX_JOINED = 8  # boxes
_LONGEST_LABEL = 20
_MAX_JOINT = 40  # characters
_JOINT = re.compile(r"\}((?:[\s$,;/]|\\[()\[\],;! ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*)$")
_OR = re.compile(
    r"(?:[\s$(),]|\\[)\]])*\bor,?\s+(?:(?:equivalently|simply|in \w+ (?:form|notation)|as an? \w+|written as),?\s+)*"
    r"((?:about|approximately|roughly)\s+|\\approx\s*|\N{ALMOST EQUAL TO}\s*)?"
    r"(\$[^$\n]{1,30}\$|[-\d][\d./]*(?<!\.)%?)(?=[\s.,;)$]|$)"
)
_QUESTION = re.compile(r"(?:^|[.!?\n])\s*(?:so\s+)?(?:is|could|might|can|would|may|what if)\b[^.!?\n]*$", re.IGNORECASE)
_LABEL = re.compile(
    r"\b(?:pages?|pp?\.|steps?|sections?|chapters?|equations?|eqs?\.?|theorems?|lemmas?|figures?|figs?\.?|tables?|parts?|"
    r"examples?|exercises?|problems?|questions?|cases?|lines?|notes?|appendix|version|volume|no\.|item|rule|definition|"
    r"corollary|proposition|method|footnote|reference|ref\.?)[\s#(\[]*$",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$([^$\n]*(?:\\\$[^$\n]*)*[^\\$\n])\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
# `42 apples since each ...`: the number alone. Words that may belong to it stay: `2 pi`, `3 or 4`, `5 x`.
_LEADING_NUMBER = re.compile(
    r"([-+]?[0-9][0-9,./]*)\s+(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|or|and|to|plus|minus|times|over|divided|"
    r"mod|choose|percent|pct|hundred|thousand|million|billion)\b)[A-Za-z]{2,}.*"
)
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?(?:\s*\\?%)?")


def extract_answer(response: str, with_unit: bool = False) -> str | None:
    """Return the answer in a response on one line, without surrounding space, `$` and period; None if there is none.

    `with_unit` keeps the words after a number, which may be its unit, and never takes the last number without them.
    """
    response = without_next_turn(response)
    box = find_last_box(response)
    if box is not None or has_open_box(response):
        return (_boxed(response, box) or None) if box else None
    tail = response[-_TAIL:]
    answer = _after_marker(tail, with_unit) or _last_formula(tail) or (None if with_unit else _last_number(tail))
    return (tidy(answer) or None) if answer else None


def _boxed(response: str, box: Box) -> str:
    """Return the content of the last box with what belongs to it, and words that deny it."""
    answer, start = tidy(_content_of(box)), box.start
    for _ in range(_MAX_JOINED):
        before = response[max(start - _MAX_JOINT, 0) : start]
        joint = _JOINT.search(before) if "}" in before else None
        other = find_last_box(response[: start - len(joint[1])]) if joint else None
        if joint is None or other is None or other.end != start - len(joint[1]):
            break
        start = other.start
        if MARKER.search(f"{other.content}:"):
            continue  # a box around `The answer is`
        if tidy(_content_of(other)) != answer:
            answer = f"{tidy(_content_of(other))} {'or' if 'or' in joint[1] else ','} {answer}"
    if not answer:
        return ""
    after = response[box.end :]
    answer, length = with_tail(after, answer)
    signed = with_sign(response[:start], answer)
    answer = _in_context(response, start, box.end + length, signed, is_signed=signed != answer)
    later = later_answer(after, answer)
    return f"{answer} or {tidy(later)}" if later else answer


def _content_of(box: Box) -> str:
    """Return the content of a box, and of a box that is all of its content."""
    for _ in range(_MAX_JOINED):
        inner = find_last_box(box.content)
        if inner is None or box.content.strip() != box.content[inner.start : inner.end]:
            break
        box = inner
    return box.content


def _in_context(text: str, start: int, end: int, answer: str, is_signed: bool = False) -> str:
    """Return an answer with the words around it that deny it; it may have its sign already."""
    before, after = denial_before(text[:start]), denial_after(text[end:])
    before = "" if is_signed and before.endswith("-") else before
    if not before and (other := _OR.match(text[end : end + 2 * _MAX_JOINT])):
        return " ".join((answer, r"\approx" if other[1] else "or", tidy(other[2])))
    if (
        before == ""
        and after == ""
        and text[end : end + 3].strip("$)} ").startswith("?")
        and _QUESTION.search(text[max(start - 2 * _MAX_JOINT, 0) : start])
    ):
        return f"{answer} ?"
    return f"{before} {answer} {after}".strip() if before or after else answer


def tidy(answer: str) -> str:
    r"""Strip up to 4,000 characters of space, line ends, emphasis, `$`, `\(`, `\[` and a period around them."""
    text = " ".join(answer.split())
    while len(text) <= _TIDIED:
        before = text
        text = text.strip().strip("*")
        if text.endswith((".", ",", ";")) and not text.endswith(("\\.", "\\,", "\\;", "...")):
            text = text[:-1]
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text[len(opening) : -len(closing)]
            if len(text) >= 2 * len(opening) and text.startswith(opening) and text.endswith(closing):
                if opening[0] == "$" and inner.endswith("\\"):
                    continue  # an escaped dollar
                if closing not in inner:
                    text = inner
        if text == before:
            break
    return text


def _after_marker(tail: str, with_unit: bool) -> str | None:
    markers = list(MARKER.finditer(tail))
    if not markers:
        return None
    start = markers[-1].end()
    rest = tail[start:]
    formula = _FORMULA.search(rest)
    if formula and "\n" not in rest[: formula.start()]:
        return _in_context(tail, start + formula.start(), start + formula.end(), _content(formula))
    sentence_end = _SENTENCE_END.search(rest)
    sentence = (rest[: sentence_end.start()] if sentence_end else rest).strip()
    number = None if with_unit else _LEADING_NUMBER.fullmatch(sentence)
    answer = f"{number[1]} {denial_after(sentence[number.end(1) :])}".strip() if number else sentence
    return f"{denial_before(tail[:start])} {answer}".strip() if answer else None


def _last_formula(tail: str) -> str | None:
    formulas = list(_FORMULA.finditer(tail))
    return _in_context(tail, *formulas[-1].span(), _content(formulas[-1])) if formulas else None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _last_number(tail: str) -> str | None:
    for number in reversed(list(_NUMBER.finditer(tail))):
        before = tail[: number.start()]
        if not _LABEL.search(before[-_LONGEST_LABEL:]):
            return f"{denial_before(before)} {number[0]}".strip()
    return None
