"""The units of measurement: names, symbols and prefixes, with dimensions and factors to base units.

Base units are those of the SI, and some of their own. A radian is one, so that turns, degrees and hertz (turns per
second) convert to each other. Months and years are no exact number of days. Counts that convert to no other unit, such
as bits and equivalents, have a base unit each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

BASES = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "month", "bel", "bit", "eq", "Bq", "Sv", "dollar")
RADIAN, MONTH, SECOND = BASES.index("rad"), BASES.index("month"), BASES.index("s")
TURN = 2 * Fraction("3.14159265358979323846264338327950288")
"""A turn in radians."""
MONTH_S = Fraction("30.4375") * 86_400
"""A twelfth of 365.25 days, in seconds."""


class Unit(NamedTuple):
    """A unit."""

    dimension: tuple[int, ...]  # exponent of each base unit
    factor: Fraction  # the unit in base units
    zero: Fraction = Fraction(0)  # of a temperature alone: its zero in kelvins


def unit_of(factor: int | str | Fraction, **powers: int) -> Unit:
    """Return a unit from its factor and the powers of base units."""
    return Unit(tuple(powers.get(base, 0) for base in BASES), Fraction(factor))


PREFIXES: Mapping[str, Fraction] = {
    prefix: Fraction(10) ** power
    for power, names in {
        15: "P peta", 12: "T tera", 9: "G giga", 6: "M mega", 3: "k K kilo", 2: "h hecto", 1: "da deca", -1: "d deci",
        -2: "c centi", -3: "m milli", -6: "\N{MICRO SIGN} u micro", -9: "n nano", -12: "p pico",
        -15: "f femto", -18: "a atto",
    }.items()
    for prefix in names.split()
}  # fmt: skip


def _by_name(units: Mapping[str, Unit]) -> dict[str, Unit]:
    return {name: unit for names, unit in units.items() for name in names.split()}


# Symbols and names that take prefixes; a name may end with s.
PREFIXED: Mapping[str, Unit] = _by_name(
    {
        "m meter metre": unit_of(1, m=1),
        "g gram": unit_of("1/1000", kg=1),
        "s sec second": unit_of(1, s=1),
        "yr year": unit_of(12, month=1),
        "A amp ampere": unit_of(1, A=1),
        "K kelvin": unit_of(1, K=1),
        "mol mole": unit_of(1, mol=1),
        "cd candela": unit_of(1, cd=1),
        "rad radian": unit_of(1, rad=1),
        "sr steradian": unit_of(1, rad=2),
        "Hz hz HZ hertz": unit_of(TURN, rad=1, s=-1),
        "Bq becquerel": unit_of(1, Bq=1, s=-1),
        "Ci curie": unit_of(37 * 10**9, Bq=1, s=-1),
        "N newton": unit_of(1, kg=1, m=1, s=-2),
        "Pa pascal": unit_of(1, kg=1, m=-1, s=-2),
        "J joule": unit_of(1, kg=1, m=2, s=-2),
        "W watt": unit_of(1, kg=1, m=2, s=-3),
        "Wh wh": unit_of(3600, kg=1, m=2, s=-2),
        "C coulomb": unit_of(1, A=1, s=1),
        "Ah": unit_of(3600, A=1, s=1),
        "V volt": unit_of(1, kg=1, m=2, s=-3, A=-1),
        "F farad": unit_of(1, kg=-1, m=-2, s=4, A=2),
        "\N{OHM SIGN} ohm": unit_of(1, kg=1, m=2, s=-3, A=-2),
        "S siemens": unit_of(1, kg=-1, m=-2, s=3, A=2),
        "Wb weber": unit_of(1, kg=1, m=2, s=-2, A=-1),
        "T tesla": unit_of(1, kg=1, s=-2, A=-1),
        "H henry": unit_of(1, kg=1, m=2, s=-2, A=-2),
        "lm lumen": unit_of(1, cd=1, rad=2),
        "lx lux": unit_of(1, cd=1, rad=2, m=-2),
        "Gy gray": unit_of(1, m=2, s=-2),
        "Sv sievert": unit_of(1, m=2, s=-2, Sv=1),
        "rem": unit_of("1/100", m=2, s=-2, Sv=1),
        "kat katal": unit_of(1, mol=1, s=-1),
        "eV electronvolt": unit_of("1.602176634e-19", kg=1, m=2, s=-2),
        "L l liter litre": unit_of("1/1000", m=3),
        "M molar": unit_of(1000, mol=1, m=-3),
        "molal": unit_of(1, mol=1, kg=-1),
        "Eq eq equivalent": unit_of(1, eq=1),
        "bar": unit_of(100_000, kg=1, m=-1, s=-2),
        "cal calorie": unit_of("4.184", kg=1, m=2, s=-2),
        "Da dalton": unit_of("1.66053906660e-27", kg=1),
        "pc parsec": unit_of(30_856_775_814_913_673, m=1),
        "ly lyr lightyear": unit_of(9_460_730_472_580_800, m=1),
        "P poise": unit_of("1/10", kg=1, m=-1, s=-1),
        "G Gs gauss": unit_of("1/10000", kg=1, s=-2, A=-1),
        "tonne": unit_of(1000, kg=1),
        "bit": unit_of(1, bit=1),
        "B byte": unit_of(8, bit=1),
        "bps": unit_of(1, bit=1, s=-1),
    }
)
_LONE_LETTERS_NO_UNIT = ("P", "B")  # with a prefix alone: cP, MB

_FOOT, _POUND, _GRAVITY = Fraction("0.3048"), Fraction("0.45359237"), Fraction("9.80665")
_INCH, _GALLON = Fraction("0.0254"), Fraction("0.003785411784")
_MERCURY = Fraction("133.322387415")
PLAIN: Mapping[str, Unit] = _by_name(
    {
        "min minute": unit_of(60, s=1),
        "h hr hour": unit_of(3600, s=1),
        "d day": unit_of(86_400, s=1),
        "wk week": unit_of(7 * 86_400, s=1),
        "fortnight": unit_of(14 * 86_400, s=1),
        "month mo": unit_of(1, month=1),
        "annum": unit_of(12, month=1),
        "decade": unit_of(120, month=1),
        "century centuries": unit_of(1200, month=1),
        "millennium millennia": unit_of(12_000, month=1),
        "gm": unit_of("1/1000", kg=1),
        "t": unit_of(1000, kg=1),
        "ton": unit_of(2000 * _POUND, kg=1),
        "ha hectare": unit_of(10_000, m=2),
        "acre": unit_of(43_560 * _FOOT**2, m=2),
        "in inch inches": unit_of(_INCH, m=1),
        "ft foot feet": unit_of(_FOOT, m=1),
        "yd yard": unit_of(3 * _FOOT, m=1),
        "mi mile": unit_of(5280 * _FOOT, m=1),
        "furlong": unit_of(660 * _FOOT, m=1),
        "fathom": unit_of(6 * _FOOT, m=1),
        "nmi nauticalmile": unit_of(1852, m=1),
        "mph": unit_of(Fraction("0.44704"), m=1, s=-1),
        "kph kmh kmph": unit_of("5/18", m=1, s=-1),
        "fps": unit_of(_FOOT, m=1, s=-1),
        "mps": unit_of(1, m=1, s=-1),
        "kn kt knot": unit_of("1852/3600", m=1, s=-1),
        "lb lbm pound": unit_of(_POUND, kg=1),
        "lbf poundforce": unit_of(_POUND * _GRAVITY, kg=1, m=1, s=-2),
        "slug": unit_of(_POUND * _GRAVITY / _FOOT, kg=1),
        "oz ounce": unit_of(_POUND / 16, kg=1),
        "stone": unit_of(14 * _POUND, kg=1),
        "carat": unit_of("0.0002", kg=1),
        "kgf": unit_of(_GRAVITY, kg=1, m=1, s=-2),
        "atm atmosphere": unit_of(101_325, kg=1, m=-1, s=-2),
        "torr": unit_of("101325/760", kg=1, m=-1, s=-2),
        "mmHg": unit_of(_MERCURY, kg=1, m=-1, s=-2),
        "cmHg": unit_of(10 * _MERCURY, kg=1, m=-1, s=-2),
        "inHg": unit_of(Fraction("25.4") * _MERCURY, kg=1, m=-1, s=-2),
        "psi": unit_of(_POUND * _GRAVITY / _INCH**2, kg=1, m=-1, s=-2),
        "ksi": unit_of(1000 * _POUND * _GRAVITY / _INCH**2, kg=1, m=-1, s=-2),
        "psf": unit_of(_POUND * _GRAVITY / _FOOT**2, kg=1, m=-1, s=-2),
        "hp horsepower": unit_of(550 * _FOOT * _POUND * _GRAVITY, kg=1, m=2, s=-3),
        "BTU Btu": unit_of("1055.05585262", kg=1, m=2, s=-2),
        "Cal": unit_of(4184, kg=1, m=2, s=-2),
        "therm": unit_of(Fraction("105505585.262"), kg=1, m=2, s=-2),
        "dyn dyne": unit_of("1/100000", kg=1, m=1, s=-2),
        "erg": unit_of("1e-7", kg=1, m=2, s=-2),
        "stokes": unit_of("1/10000", m=2, s=-1),
        "debye": unit_of("3.33564095e-30", A=1, s=1, m=1),
        "diopter dioptre": unit_of(1, m=-1),
        "Å angstrom": unit_of("1e-10", m=1),
        "AU au": unit_of(149_597_870_700, m=1),
        "u amu": unit_of("1.66053906660e-27", kg=1),
        "micron": unit_of("1e-6", m=1),
        "mcg": unit_of("1e-9", kg=1),
        "gal gallon": unit_of(_GALLON, m=3),
        "qt quart": unit_of(_GALLON / 4, m=3),
        "pt pint": unit_of(_GALLON / 8, m=3),
        "cup": unit_of(_GALLON / 16, m=3),
        "floz fluidounce": unit_of(_GALLON / 128, m=3),
        "tbsp tablespoon": unit_of(_GALLON / 256, m=3),
        "tsp teaspoon": unit_of(_GALLON / 768, m=3),
        "cc ccm": unit_of("1e-6", m=3),
        "barrel": unit_of(42 * _GALLON, m=3),
        "rpm": unit_of(TURN / 60, rad=1, s=-1),
        "rps": unit_of(TURN, rad=1, s=-1),
        "bpm": unit_of(TURN / 60, rad=1, s=-1),
        "rev revolution turn cycle rotation beat": unit_of(TURN, rad=1),
        "° deg degree": unit_of(TURN / 360, rad=1),
        "arcmin arcminute": unit_of(TURN / 360 / 60, rad=1),
        "arcsec arcsecond": unit_of(TURN / 360 / 3600, rad=1),
        "°C celsius": unit_of(1, K=1)._replace(zero=Fraction("273.15")),
        "°F fahrenheit": unit_of("5/9", K=1)._replace(zero=Fraction("459.67") * 5 / 9),
        "°R rankine": unit_of("5/9", K=1),
        "% percent pct": unit_of("1/100"),
        "‰ permille": unit_of("1/1000"),
        "ppm": unit_of("1e-6"),
        "ppb": unit_of("1e-9"),
        "dB decibel": unit_of("1/10", bel=1),
        "dollar USD": unit_of(1, dollar=1),
        "cent": unit_of("1/100", dollar=1),
    }
)
# Short symbols and names that people give an s, and write in capitals.
_PLURALS = frozenset(
    re.findall(
        r"\S+",
        "bar bit cal cc cm cup day erg gal gm hr kg km lb lbf mg min ml mm mol ohm oz pt qt rad rev sec ton wk yr yd",
    )
)
_SPELLED = {name.lower(): unit for units in (PREFIXED, PLAIN) for name, unit in units.items() if len(name) > 3}
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
