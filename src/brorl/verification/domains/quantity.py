r"""Numbers with units in text.

In: an answer such as `3.0 \times 10^8\ \text{m/s}` or `v = 36 km/h`. Out: its number and its unit. A number that is
written with digits is read exactly; any other expression, such as `\sqrt{2}`, is left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from brorl.verification.domains.units import Unit, parse_unit, with_plain_symbols

_MAX_DIGITS = 400
_LEFT_SIDE = re.compile(r"^(?![-+.\d])[^=≈]{0,60}?(?:=|≈|\\approx|\\simeq|\\sim)\s*(?=[^=]*$)")
_ABOUT = re.compile(r"^(?:about|approximately|roughly|around|\\approx|\\sim|≈|~)\s*", re.IGNORECASE)
_SIGN = r"[-+]?\s*"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|\(\s*([-+]?\d+)\s*\)|([-+]?\d+))"
_TIMES = r"\s*(?:\\times|\\cdot|[x*])\s*"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:"
    rf"\\[dt]?frac\s*\{{(?P<over>\d+(?:\.\d+)?)\}}\s*\{{(?P<under>\d+(?:\.\d+)?)\}}"
    rf"|(?P<power>{_POWER_OF_TEN})"
    rf"|(?P<digits>{_DIGITS})(?:{_TIMES}(?P<scale>{_POWER_OF_TEN})|[eE](?P<e>[-+]?\d+)(?![\d.])|/(?P<divisor>\d+(?![.\d])))?"
    rf")"
)
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")  # of a variable: the last letter of a product is no unit
_EXPONENT = re.compile(r"\^[^-+\d]*([-+]?\d+)")
# Words after the unit that belong to the sentence, without a digit: `5 m, 7 m` is no answer.
_UPRIGHT = re.compile(r"\\(?:text|mathrm|rm)\b")
_REST = re.compile(r"(?:,|;|\s+(?:since|because|as|which|where|so|when|for|to|toward?|in\s+the|at)\b)\D*$")


class Quantity(NamedTuple):
    """An answer in its parts.

    Attributes:
        number: The number, None if it is not written with digits.
        unit: The unit, None if there is none.
        text: The answer without its left-hand side and its unit.
        unknown: Text after a number that is no known unit; None if there is none.
    """

    number: Fraction | None
    unit: Unit | None
    text: str
    unknown: str | None = None


def read_quantity(answer: str) -> Quantity:
    """Split an answer into a number and a unit.

    Args:
        answer: Plain text or LaTeX of at most some thousand characters.
    """
    text = _ABOUT.sub("", _LEFT_SIDE.sub("", with_plain_symbols(answer).strip())).strip()
    match = _NUMBER.match(text)
    number = _value(match) if match else None
    if match is None or number is None:
        return _expression(text)
    rest = text[match.end() :].strip()
    if not rest.strip("$. "):
        return Quantity(number, None, match[0])
    unit = parse_unit(rest) or parse_unit(_REST.sub("", rest))
    if unit is not None:
        return Quantity(number, unit, match[0])
    if _goes_on(rest):
        return _expression(text)
    return Quantity(None, None, text, unknown=rest)


def _expression(text: str) -> Quantity:
    """Split an expression that is not one number: its unit is the text after the last space or in upright letters."""
    match = _UPRIGHT.search(text)
    start = match.start() if match else text.rfind(" ")
    is_formula = not match and (_LETTER.search(text[:start]) or text[:start].count("{") > text[:start].count("}"))
    unit = parse_unit(text[start:]) if start > 0 and text[start:].strip(" .") and not is_formula else None
    return Quantity(None, unit, text[:start].rstrip("\\ ,;~") if unit else text)


def _goes_on(rest: str) -> bool:
    """Whether a number goes on as a formula: with an operator, a symbol or a command, not with words."""
    return re.match(r"[-+*/^(\[{!%,;:=<>]|\\(?!text|mathrm|rm)[a-zA-Z%,;]|[a-zA-Z](?![a-zA-Z])", rest) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"].strip() == "-" else 1
    if match["over"]:
        return sign * Fraction(match["over"]) / Fraction(match["under"]) if Fraction(match["under"]) else None
    digits = re.sub(r"[^\d.]", "", match["digits"] or "1")
    raised = match["power"] or match["scale"]
    exponent = _EXPONENT.search(raised or "")
    power = int(exponent[1] if exponent else match["e"] or 0)
    if len(digits) > _MAX_DIGITS or abs(power) > _MAX_DIGITS:
        return None
    divisor = int(match["divisor"] or 1)
    return sign * Fraction(digits) * Fraction(10) ** power / divisor if divisor else None
