r"""Reads what stands beside a box and belongs to its answer: a sign, a factor, a unit, or a later conclusion.

`-\boxed{42}` says -42, `\boxed{42}\%` is a percentage, and `\boxed{10} km/s` has a unit. After `\boxed{42}`, the
sentence `The final answer is 43.` names another answer. The time is linear in the length of the text.
"""

from __future__ import annotations

import re

from brorl.verification.domains.units import parse_unit

_READ = 80  # characters beside a box
_OPERATOR = re.compile(r"(?:\\(?:cdot|times|div|pm|mp|sqrt|frac|binom)(?:\[[^][]*\])?|[/^]|\}\s*)\s*\{?$|\d$")
_OPEN_FORMULA = re.compile(r"(?:\$|\\\(|\\\[)(?:(?!\$|\\\)|\\\]).)*$|[=<>]\s*\S*$")
_OPERATIONS = tuple(
    f" {name}"
    for name in (
        "minus", "negative", "twice", "double", "triple", "half", "half of", "square root of", "cube root of",
        "square of", "cube of", "reciprocal of", "opposite of", "inverse of", "negation of", "complement of",
        "multiple of", "factorial of", "logarithm of",
    )
)  # fmt: skip
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
    """Return an answer with the sign or the operator that stands directly before its box."""
    words = f" {before[-_READ:]}".rstrip(" \t\n$({\\").lower()
    if words.endswith(_OPERATIONS):
        return f"{next(name for name in _OPERATIONS if words.endswith(name)).strip()} {answer}"
    is_apart = before[-1:].isspace()
    line = before[-_READ:].rpartition("\n")[2].rstrip(" \t")
    if line.endswith(("$", "\\(", "\\[")) and not line[:-1].endswith("\\"):
        line = line.removesuffix("$").removesuffix("\\(").removesuffix("\\[")
        if line[-1:] not in ("-", "\N{MINUS SIGN}"):
            return answer
    if line[-1:] in ("-", "\N{MINUS SIGN}"):
        return _with_minus(line[:-1], is_apart, answer)
    if not is_apart and (operator := _OPERATOR.search(line)) and _OPEN_FORMULA.search(line):
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
    """Return an answer with the factor or the unit that stands directly after its box, and where that ends."""
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
