"""The units of measurement of `units.txt`: names, symbols and prefixes, with dimensions and factors to base units.

Base units are those of the SI, and some of their own. A radian is one, so that turns, degrees and hertz (turns per
second) convert to each other. Months and years are no exact number of days. Counts that convert to no other unit, such
as bits and equivalents, have a base unit each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

BASES = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "month", "bel", "bit", "eq", "Bq", "Sv", "dollar")
RADIAN, MONTH, SECOND = BASES.index("rad"), BASES.index("month"), BASES.index("s")
MONTH_S = Fraction("30.4375") * 86_400
"""A twelfth of 365.25 days, in seconds."""


class Unit(NamedTuple):
    """A unit."""

    dimension: tuple[int, ...]  # exponent of each base unit
    factor: Fraction  # the unit in base units
    zero: Fraction = Fraction(0)  # of a temperature alone: its zero in kelvins


PREFIXES: Mapping[str, Fraction] = {
    prefix: Fraction(10) ** power
    for power, names in {
        15: "P peta", 12: "T tera", 9: "G giga", 6: "M mega", 3: "k K kilo", 2: "h hecto", 1: "da deca", -1: "d deci",
        -2: "c centi", -3: "m milli", -6: "\N{MICRO SIGN} u micro", -9: "n nano", -12: "p pico",
        -15: "f femto", -18: "a atto",
    }.items()
    for prefix in names.split()
}  # fmt: skip
PREFIXED: dict[str, Unit] = {}
PLAIN: dict[str, Unit] = {}
ONE = Unit((0,) * len(BASES), Fraction(1))
_LONE_LETTERS_NO_UNIT = ("P", "B")  # with a prefix alone: cP, MB


def _read_table(text: str) -> None:
    """Fill the tables of units with prefixes and without."""
    for table, part in zip((PREFIXED, PLAIN), text.split("\n## ")[1:], strict=True):
        for line in filter(None, part.splitlines()[1:]):
            names, _, definition = line.partition(" = ")
            table.update(dict.fromkeys(names.split(), _defined(definition)))


def _defined(definition: str) -> Unit:
    """Return the unit of a definition, which uses base units and units of the tables."""
    product, _, zero = definition.partition(" from ")
    above, _, below = product.partition(" / ")
    number, *factors = above.split()
    dimension, factor = ONE.dimension, Fraction(number)
    for names, sign in ((factors, 1), (below.split(), -1)):
        for name, _, exponent in (one.partition("^") for one in names):
            power = sign * int(exponent or 1)
            unit = Unit(tuple(int(base == name) for base in BASES), Fraction(1)) if name in BASES else _exactly(name)
            assert unit is not None, definition
            dimension = tuple(a + power * b for a, b in zip(dimension, unit.dimension, strict=True))
            factor *= unit.factor**power
    return Unit(dimension, factor, Fraction(zero or 0))


# Short symbols and names that people give an s, and write in capitals.
_PLURALS = frozenset(
    re.findall(
        r"\S+",
        "bar bit cal cc cm cup day erg gal gm hr kg km lb lbf mg min ml mm mol ohm oz pt qt rad rev sec ton wk yr yd",
    )
)
_SPELLED: dict[str, Unit] = {}  # by small letters
# A second meaning of a name: pounds are a mass and a force, a ton is short or metric, a Calorie is large or small.
_SECOND = {"lb": "lbf", "pound": "lbf", "ton": "tonne", "Calorie": "Cal"}


def other_meaning(name: str) -> Unit | None:
    """Return the unit of a name's second meaning; None if it has one meaning."""
    return next((_exactly(_SECOND[one]) for one in _spellings(name) if one in _SECOND), None)


def named(name: str) -> Unit | None:
    """Return the unit of a symbol or a name, with a prefix or without; None if it is unknown."""
    return next((unit for one in _spellings(name) if (unit := _exactly(one)) is not None), None)


def _spellings(name: str) -> Iterator[str]:
    """Yield a name, its singular, and both in lower case if they are spelled out."""
    yield name
    stem = name[:-1] if name[-1:] in ("s", "S") and name[-2:-1] not in ("s", "S") else name
    stem = stem if len(stem) > 3 or stem.lower() in _PLURALS else name
    yield stem
    if len(stem) > 2 or stem.lower() in _PLURALS:
        yield from (name.lower(), stem.lower())


def _exactly(name: str) -> Unit | None:
    if name in PLAIN:
        return PLAIN[name]
    if name in PREFIXED:
        return None if name in _LONE_LETTERS_NO_UNIT else PREFIXED[name]
    if name in _SPELLED:
        return _SPELLED[name]
    for prefix, factor in PREFIXES.items():
        symbol = name.removeprefix(prefix)
        if symbol in PREFIXED and symbol != name and (len(prefix) > 2) == (len(symbol) > 3):
            unit = PREFIXED[symbol]
            return Unit(unit.dimension, unit.factor * factor)
    return None


_read_table(Path(__file__).with_name("units.txt").read_text("utf-8"))
_SPELLED |= {name.lower(): unit for units in (PREFIXED, PLAIN) for name, unit in units.items() if len(name) > 3}
TURN = PLAIN["turn"].factor
"""A turn in radians."""
