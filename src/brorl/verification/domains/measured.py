"""Whether numbers with units agree: after a conversion, within a tolerance; and the two ends of a range."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from brorl.verification.domains.quantity import Quantity, read_quantity
from brorl.verification.domains.units import Conversion, conversions, parse_unit, without_markup
from brorl.verification.domains.wording import beside_the_value, is_direction

ROUNDING = Fraction(1, 1_000_000)
"""The least relative tolerance of numbers that are not both whole."""

_DEGREE, _RADIAN = parse_unit("°"), parse_unit("rad")
_TEMPERATURE = {"C": parse_unit("°C"), "F": parse_unit("°F")}
_COMMAND = re.compile(r"\\(?!text|mathrm|rm\b)[a-zA-Z]+")
_CONSTANT = re.compile(r"(?<![a-zA-Z])(?:pi|e|sqrt|exp|ln|log)(?![a-zA-Z])")
_RATIO = re.compile(r"\s*(?::|\bto\b|\\colon\b)\s*")
_RANGE = re.compile(r"\s*(?:\bto\b|--?|\u2013|\u2014)\s*|\s+and\s+")
_BOUNDS = re.compile(r"^(?:from|between)\s+", re.IGNORECASE)


def same_kind(right: Quantity, given: Quantity) -> bool:
    """Whether an answer has a unit that converts to the reference's, or none, and no other words."""
    if right.words is not None:
        # `15` answers `15 apples`, and `40 g` answers `40 g of NaOH`, but `5 m/s` does not answer `5 m/s east`.
        bare = given.words is None and (given.unit is None) == (right.unit is None) and not is_direction(right.words)
        if given.words != right.words and not bare:
            return False
    elif given.words is not None:
        counted = right.unit is None and given.unit is None and given.words.replace(" ", "").isalpha()
        if not counted and not beside_the_value(given.words):
            return False
    if right.unit is None or given.unit is None:
        words = _CONSTANT.sub("", _COMMAND.sub("", given.text))
        return right.unit is None or not any(character.isalpha() for character in words)
    return bool(_conversions(right, given))


def agree(right: Quantity, given: Quantity, tolerance: float) -> bool:
    """Whether two numbers agree after a conversion, within a relative tolerance."""
    if right.number is None or given.number is None:
        return False
    whole = right.number.denominator == given.number.denominator == 1
    if whole and tolerance == 0 and right.unit is None and given.unit is None:
        return right.number == given.number
    for conversion in _conversions(right, given):
        relative = max(Fraction(tolerance), ROUNDING, conversion.slack)
        if abs(conversion.of(given.number) - right.number) <= relative * abs(right.number):
            return True
    return False


def factor_of(right: Quantity, given: Quantity) -> Fraction | None:
    r"""Return the factor of an expression's value in the reference's unit; None if it cannot be converted by one.

    An angle without a unit is in radians if it has a `\pi`.
    """
    unit = right.unit or given.unit
    if unit in (_DEGREE, _RADIAN) and (right.unit is None or given.unit is None):
        assert unit is not None
        if right.unit is None:
            return unit.factor if "\\pi" in right.text else Fraction(1)
        return 1 / unit.factor if "\\pi" in given.text else Fraction(1)
    found = _conversions(right, given)[0]
    return None if found.shift else found.factor


def _conversions(right: Quantity, given: Quantity) -> list[Conversion]:
    """Return how the number of an answer can be read in the unit of the reference."""
    if right.unit is None or given.unit is None:
        unit, found = right.unit or given.unit, [Conversion(Fraction(1))]
        if unit is not None and not any(unit.dimension):  # `50%` is 50 and 0.5
            found.append(Conversion(1 / unit.factor if right.unit else unit.factor))
        return found
    if _TEMPERATURE.get(given.unit_text) in right.units:  # `25 C`
        return [Conversion(Fraction(1))]
    return [found for unit in given.units for wanted in right.units for found in conversions(unit, wanted)]


class _Ends(NamedTuple):
    """The parts of a ratio, or the two ends of a range."""

    is_ratio: bool
    parts: list[Quantity]


def same_range(reference: str, answer: str) -> bool | None:
    """Whether an answer is the range or the ratio of a reference that is one; None for another reference."""
    right = _ends(reference, is_ratio=":" in reference)
    if right is None:
        return None
    given = _ends(answer, right.is_ratio)
    if given is None or len(right.parts) != len(given.parts):
        return False
    pairs = list(zip(right.parts, given.parts, strict=True))
    if not right.is_ratio:
        return all(same_kind(*pair) and agree(*pair, 0.0) for pair in pairs)
    numbers = [(a.number, b.number) for a, b in pairs if a.number is not None and b.number is not None]
    first = numbers[0]
    return len(numbers) == len(pairs) and all(a * first[1] == b * first[0] for a, b in numbers)


def _ends(text: str, is_ratio: bool) -> _Ends | None:
    """Return the parts of a ratio or a range; a unit at its end is that of both ends."""
    plain = _BOUNDS.sub("", without_markup(text))
    texts = (_RATIO if is_ratio else _RANGE).split(plain)
    if (
        len(texts) < 2
        or (len(texts) > 2 and not is_ratio)
        or not all(part[:1].isdigit() or part[:1] == "." for part in texts)
    ):
        return None
    parts = [read_quantity(part) for part in texts]
    if is_ratio:
        return _Ends(is_ratio, parts) if all(part.unit is None and part.words is None for part in parts) else None
    low, high = parts
    if low.number is None or high.number is None or (low.number >= high.number and low.unit is None):
        return None
    low = low._replace(units=low.units or high.units, unit_text=low.unit_text or high.unit_text)
    return _Ends(is_ratio, [low, high._replace(units=high.units or low.units)])
