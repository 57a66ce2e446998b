r"""Numbers with units in text: `3.0 \times 10^8\ \text{m/s}`, `v = 36 km/h`, `about 5 million years`.

A number that is written with digits is read exactly; any other expression, such as `\sqrt{2}`, is left to the grammar
of formulas. Only what parses as a unit is one. Other words after a number are kept, to be compared as text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from brorl.verification.domains.units import Unit, parse_units, with_plain_symbols, without_markup

_MAX_DIGITS = 400
_MAX_SIDES = 4
_ABOUT = re.compile(
    r"^(?:(?:about|approximately|approx\.?|roughly|around|nearly|some|only|exactly)\s+|(?:\\approx|\\sim|\\simeq)(?![a-zA-Z])\s*|[≈~]\s*)",
    re.IGNORECASE,
)
_SIGN = r"[-+]?\s*"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\s)\d{3}(?!\d))+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\s*\d+)\s*\}|\(\s*([-+]?\d+)\s*\)|([-+]?\d+))"
_TIMES = r"\s*(?:\\times|\\cdot|[xX*])\s*"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*\{{(?P<over>\d+(?:\.\d+)?)\}}\s*\{{(?P<under>\d+(?:\.\d+)?)\}}"
    rf"|(?P<units>\d+)\s+(?P<part>\d+)/(?P<parts>\d+)(?![.\d])"
    rf"|(?P<power>{_POWER_OF_TEN})"
    rf"|(?P<digits>{_DIGITS})(?:{_TIMES}(?P<scale>{_POWER_OF_TEN})|[eE](?P<e>[-+]?\d+)(?![\d.])|/(?P<divisor>\d+(?![.\d]))"
    rf"|\s+(?P<word>thousand|million|billion|trillion)(?![a-z]))?"
    rf")"
)
_WORD_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_EXPONENT = re.compile(r"\^[^-+\d]*([-+]?)\s*(\d+)")
_EQUALS = re.compile(r"(?<![<>!:\\])=|≈|\\(?:approx|simeq|equiv)(?![a-zA-Z])")
_SENTENCE = re.compile(r"(?:\\(?:text|mathrm|mbox)\s*\{\s*|[,(]\s*)?[A-Za-z]{2,}(?:\s|\\)[^=^]*$")
_UPRIGHT = re.compile(r"\\(?:text|mathrm|rm|textrm|mbox|operatorname)(?![a-zA-Z])")
# A letter or a Greek one is a variable, unless it is a constant or belongs to a function.
_VARIABLE = re.compile(
    r"\\(?!(?:pi|[dt]?frac|sqrt|times|cdot|pm|left|right|exp|ln|log|sin|cos|tan|a?rc\w+|text|mathrm|rm|circ|degree|,)(?![a-zA-Z]))"
    r"[a-zA-Z]+|(?<![\\a-zA-Z])(?!(?:pi|e|sqrt|exp|ln|log)(?![a-zA-Z]))[a-zA-Z]"
)
# Words that say nothing about the value; what follows the others is compared.
_FILLERS = frozenset(re.findall(r"\S+", "the a an of in to due toward towards is direction directed and"))
_PRONOUNCED = re.compile(
    r"(?!(?:pi|sqrt|sin|cos|tan|exp|log|ln)$)(?=.*[aeiouyAEIOUY\u0080-\uffff])[^\W\d_]{3,}|^(?:up|in|to|of)$"
)
_PREPOSITION = re.compile(r"(?:^|[\s~])(?:in|as|am|pm|at)$")  # and no inch, if words follow
_WORDS = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")


class Quantity(NamedTuple):
    """An answer in its parts."""

    number: Fraction | None  # the number, None if it is not written with digits
    units: tuple[Unit, ...]  # what its unit can be, none if there is none
    text: str  # the number or expression without its left-hand side and its unit
    unit_text: str = ""  # the unit as it is written
    words: str | None = None  # text after the number and its unit, None if there is none

    @property
    def unit(self) -> Unit | None:
        """The first of the units, None if there is none."""
        return self.units[0] if self.units else None


def sides_of_quantity(answer: str) -> list[str]:
    """Return the sides of an equation that have a digit, or the last one: of `v = 36 km/h = 10 m/s` the last two.

    Args:
        answer: Plain text or LaTeX of at most some thousand characters.
    """
    sides = [side.strip() for side in _EQUALS.split(answer, maxsplit=_MAX_SIDES)]
    first = next(
        (at for at, side in enumerate(sides[:-1]) if re.match(r"[-+(\\{]*\s*(?:\d|\.\d|\\[dt]?frac\{\d)", side)),
        len(sides) - 1,
    )
    return [side for side in sides[first:] if side] or [answer]


def read_quantity(answer: str) -> Quantity:
    """Split a side of an answer into a number, a unit and other words.

    Args:
        answer: Plain text or LaTeX of at most some thousand characters.
    """
    text = _ABOUT.sub("", with_plain_symbols(answer).strip().replace("**", "^")).strip()
    match = _NUMBER.match(text)
    number = _value(match) if match else None
    if match is None or number is None:
        return _expression(text)
    rest = text[match.end() :].strip().rstrip(" .$\\")
    if not rest:
        return Quantity(number, (), match[0])
    units = parse_units(rest)
    if units:
        return Quantity(number, units, match[0], rest)
    length, units = _leading_unit(rest)
    if units and (words := comparable_words(rest[length:])) is not None:
        return Quantity(number, units, match[0], rest[:length], words)
    words = comparable_words(rest)
    if words is None and not _SENTENCE.match(rest):
        return _expression(text)
    return Quantity(number, (), match[0], words=rest if words is None else words)


def comparable_words(text: str) -> str | None:
    """Return words in small letters without markup, plural s and words such as `the`; None for other text."""
    plain = without_markup(text).strip(" ,;.()[]")
    words = _WORDS.findall(plain)
    if not words or re.search(r"[\d^=+*/<>_\\|]", plain) or not any(map(_PRONOUNCED.search, words)):
        return None
    return " ".join(word.rstrip("s") for word in map(str.casefold, words) if word not in _FILLERS)


def _leading_unit(text: str) -> tuple[int, tuple[Unit, ...]]:
    """Return the length of the longest start of a text that is a unit and ends at a space, comma or parenthesis."""
    found: tuple[int, tuple[Unit, ...]] = 0, ()
    for match in list(re.finditer(r"(?=[\s,;(~]|\\[ ,;:]|\\text|\.\s)", text[:80]))[:12]:
        units = parse_units(text[: match.start()])
        if units and not _PREPOSITION.search(text[: match.start()]):
            found = match.start(), units
    return found


def _expression(text: str) -> Quantity:
    """Split an expression that is not a single number: its unit is in upright letters or follows a space."""
    starts = [match.start() for match in _UPRIGHT.finditer(text)]
    starts += [match.end() for match in re.finditer(r"\s|\\[,;: ]|(?<=[\d}])(?=\^\s*\{?\\circ|\\degree|°|\\?%)", text)]
    for start in sorted(starts)[:12]:
        head = text[:start]
        upright = _UPRIGHT.match(text, start) is not None
        letters = _VARIABLE.search(head) is not None
        if not head.strip() or (letters and not upright) or head.count("{") != head.count("}"):
            continue
        units = parse_units(text[start:].rstrip(" ."))
        if units:
            return Quantity(None, units, head.rstrip("\\ ,;~"), text[start:])
    return Quantity(None, (), text)


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"].strip() == "-" else 1
    if match["over"]:
        if not Fraction(match["under"]):
            return None
        return sign * (int(match["whole"] or 0) + Fraction(match["over"]) / Fraction(match["under"]))
    if match["part"]:
        return (
            sign * (int(match["units"]) + Fraction(int(match["part"]), int(match["parts"])))
            if int(match["parts"])
            else None
        )
    digits = re.sub(r"[^\d.]", "", match["digits"] or "1")
    raised = match["power"] or match["scale"]
    exponent = _EXPONENT.search(raised or "")
    power = int(exponent[1] + exponent[2] if exponent else match["e"] or 0) + _WORD_POWERS.get(match["word"] or "", 0)
    if len(digits) > _MAX_DIGITS or abs(power) > _MAX_DIGITS:
        return None
    divisor = int(match["divisor"] or 1)
    return sign * Fraction(digits) * Fraction(10) ** power / divisor if divisor else None
