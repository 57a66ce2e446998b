r"""Units of measurement with exact factors, and numbers with units in text.

Text such as `kJ/mol`, `m s^{-2}` or `\text{km/h}` has a dimension and a factor to SI base units, as a fraction.
Everything after a slash, up to the next one, divides: `J/mol K` is J/(mol K). Degrees Celsius and degrees of arc have
dimensions of their own, since they convert to no other unit by an exact factor. A number that is written with digits is
read exactly; any other expression, such as `\sqrt{2}`, is left to math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_BASES = ("m", "kg", "s", "A", "K", "mol", "cd", "celsius", "arc")
_MAX_CHARACTERS = 80
_MAX_EXPONENT = 12


class Unit(NamedTuple):
    """A unit."""

    dimension: tuple[int, ...]  # exponent of each base unit
    factor: Fraction  # the unit in base units


def _unit(factor: int | str | Fraction, **powers: int) -> Unit:
    return Unit(tuple(powers.get(base, 0) for base in _BASES), Fraction(factor))


_PREFIXES: Mapping[str, Fraction] = {
    prefix: Fraction(10) ** power
    for power, names in {
        15: "P peta", 12: "T tera", 9: "G giga", 6: "M mega", 3: "k kilo", 2: "h hecto", 1: "da deca", -1: "d deci",
        -2: "c centi", -3: "m milli", -6: "\N{MICRO SIGN} u micro", -9: "n nano", -12: "p pico",
        -15: "f femto", -18: "a atto",
    }.items()
    for prefix in names.split()
}  # fmt: skip

# Symbols and names that take prefixes; a name may end with s.
_PREFIXED: Mapping[str, Unit] = {
    name: unit
    for names, unit in {
        "m meter metre": _unit(1, m=1),
        "g gram": _unit("1/1000", kg=1),
        "s sec second": _unit(1, s=1),
        "A amp ampere": _unit(1, A=1),
        "K kelvin": _unit(1, K=1),
        "mol mole": _unit(1, mol=1),
        "cd candela": _unit(1, cd=1),
        "rad radian sr": _unit(1),
        "Hz hertz Bq becquerel": _unit(1, s=-1),
        "N newton": _unit(1, kg=1, m=1, s=-2),
        "Pa pascal": _unit(1, kg=1, m=-1, s=-2),
        "J joule": _unit(1, kg=1, m=2, s=-2),
        "W watt": _unit(1, kg=1, m=2, s=-3),
        "Wh": _unit(3600, kg=1, m=2, s=-2),
        "C coulomb": _unit(1, A=1, s=1),
        "Ah": _unit(3600, A=1, s=1),
        "V volt": _unit(1, kg=1, m=2, s=-3, A=-1),
        "F farad": _unit(1, kg=-1, m=-2, s=4, A=2),
        "\N{OHM SIGN} ohm": _unit(1, kg=1, m=2, s=-3, A=-2),
        "S siemens": _unit(1, kg=-1, m=-2, s=3, A=2),
        "Wb weber": _unit(1, kg=1, m=2, s=-2, A=-1),
        "T tesla": _unit(1, kg=1, s=-2, A=-1),
        "H henry": _unit(1, kg=1, m=2, s=-2, A=-2),
        "lm lumen": _unit(1, cd=1),
        "lx lux": _unit(1, cd=1, m=-2),
        "Gy gray Sv sievert": _unit(1, m=2, s=-2),
        "kat katal": _unit(1, mol=1, s=-1),
        "eV electronvolt": _unit("1.602176634e-19", kg=1, m=2, s=-2),
        "L l liter litre": _unit("1/1000", m=3),
        "M molar": _unit(1000, mol=1, m=-3),
        "bar": _unit(100_000, kg=1, m=-1, s=-2),
        "cal calorie": _unit("4.184", kg=1, m=2, s=-2),
    }.items()
    for name in names.split()
}

_PLAIN: Mapping[str, Unit] = {
    name: unit
    for names, unit in {
        "min minute": _unit(60, s=1),
        "h hr hour": _unit(3600, s=1),
        "d day": _unit(86_400, s=1),
        "t tonne": _unit(1000, kg=1),
        "ha hectare": _unit(10_000, m=2),
        "in inch inches": _unit("0.0254", m=1),
        "ft foot feet": _unit("0.3048", m=1),
        "yd yard": _unit("0.9144", m=1),
        "mi mile": _unit("1609.344", m=1),
        "mph": _unit("0.44704", m=1, s=-1),
        "lb lbs pound": _unit("0.45359237", kg=1),
        "oz ounce": _unit("0.028349523125", kg=1),
        "atm atmosphere": _unit(101_325, kg=1, m=-1, s=-2),
        "torr Torr": _unit("101325/760", kg=1, m=-1, s=-2),
        "mmHg": _unit("133.322387415", kg=1, m=-1, s=-2),
        "dyn dyne": _unit("1/100000", kg=1, m=1, s=-2),
        "erg": _unit("1e-7", kg=1, m=2, s=-2),
        "G gauss": _unit("1/10000", kg=1, s=-2, A=-1),
        "Å angstrom": _unit("1e-10", m=1),
        "AU au": _unit(149_597_870_700, m=1),
        "ly": _unit(9_460_730_472_580_800, m=1),
        "°C celsius": _unit(1, celsius=1),
        "° deg degree": _unit(1, arc=1),
    }.items()
    for name in names.split()
}

_MARKUP = re.compile(r"\\(?:text|textrm|mathrm|mathit|mathsf|operatorname|rm|,|;|:|!|quad|left|right)|[{}$~]|\\ ")
_WRITTEN = (
    (re.compile(r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}"), r"\1/\2"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b"), "°"),
    (re.compile(r"\\mu\b\s*"), "\N{MICRO SIGN}"),
    (re.compile(r"\\(?:Omega|ohm)\b\s*"), "\N{OHM SIGN}"),
    (re.compile(r"\\AA\b"), "Å"),
    (re.compile(r"°\s*(?:\\\w+\s*)?\{?C\}?|\b(?:degrees?|deg) C(?:elsius)?\b"), "°C"),
    (re.compile(r"\\cdot\b|\\times\b"), "*"),
    (re.compile(r"\bsq(?:uare|\.)?\s+([^\W\d_]+)"), r"\1^2"),
    (re.compile(r"\bcubic\s+([^\W\d_]+)"), r"\1^3"),
    (re.compile(r"\s+squared\b"), "^2"),
    (re.compile(r"\s+cubed\b"), "^3"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"\*\*"), "^"),
)
_SYMBOLS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DOT OPERATOR}": "*",
        "\N{GREEK SMALL LETTER MU}": "\N{MICRO SIGN}",
        "\N{GREEK CAPITAL LETTER OMEGA}": "\N{OHM SIGN}",
        "\N{ANGSTROM SIGN}": "Å",
    }
)
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_POWER = re.compile(r"([^\W\d_]+|°C|°)(?:\s*\^\s*\(?\s*([-+]?\d{1,2})\s*\)?|(-?\d{1,2}))?")


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """Return the unit that plain text or LaTeX stands for; None if a part is unknown, or above 80 characters."""
    if len(text) > _MAX_CHARACTERS:
        return None
    text = with_plain_symbols(text)
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    text = _MARKUP.sub(lambda match: " " if match[0] in ("~", r"\ ", r"\,", r"\;", r"\quad") else "", text)
    parts = [part.strip().removeprefix("(").removesuffix(")") for part in text.strip().split("/")]
    unit = _unit(1)
    for number, part in enumerate(parts):
        factor = _product(part)
        if factor is None and not (number == 0 and part.strip() in ("", "1") and len(parts) > 1):
            return None
        unit = _times(unit, factor or _unit(1), -1 if number else 1)
    return unit


def with_plain_symbols(text: str) -> str:
    """Return a text with `^2` for a raised 2, and with one sign each for minus, times, micro and ohm."""
    return _RAISED.sub(lambda match: "^" + match[0].translate(_SUPERSCRIPT), text.translate(_SYMBOLS))


def _product(text: str) -> Unit | None:
    """Return the unit of a product without a slash; None if a part is unknown."""
    product, factors = _unit(1), text.replace("*", " ").split()
    rest = " ".join(factors)
    while rest:
        match = _POWER.match(rest)
        unit = _symbol(match[1]) if match else None
        if match is None or unit is None:
            return None
        power = int(match[2] or match[3] or "1")
        if abs(power) > _MAX_EXPONENT:
            return None
        product = _times(product, unit, power)
        rest = rest[match.end() :].strip()
    return product if factors else None


def _times(one: Unit, other: Unit, power: int) -> Unit:
    dimension = tuple(a + b * power for a, b in zip(one.dimension, other.dimension, strict=True))
    return Unit(dimension, one.factor * other.factor**power)


def _symbol(name: str) -> Unit | None:
    """Return the unit of a symbol or a name, with a prefix or without."""
    names = [name, name[:-1]] if name.endswith("s") and len(name) > 3 else [name]
    names += [one.lower() for one in names if len(one) > 4]
    for one in names:
        if one in _PLAIN:
            return _PLAIN[one]
        if one in _PREFIXED:
            return _PREFIXED[one]
        for prefix, factor in _PREFIXES.items():
            symbol = one.removeprefix(prefix)
            if symbol in _PREFIXED and symbol != one and (len(prefix) > 2) == (len(symbol) > 3):
                unit = _PREFIXED[symbol]
                return Unit(unit.dimension, unit.factor * factor)
    return None


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
# A number goes on as a formula: with an operator, a symbol or a command, not with words.
_FORMULA = re.compile(r"[-+*/^(\[{!%,;:=<>]|\\(?!text|mathrm|rm)[a-zA-Z%,;]|[a-zA-Z](?![a-zA-Z])")
_UPRIGHT = re.compile(r"\\(?:text|mathrm|rm)\b")
_REST = re.compile(r"(?:,|;|\s+(?:since|because|as|which|where|so|when|for|to|toward?|in\s+the|at)\b)\D*$")


class Quantity(NamedTuple):
    """An answer in its parts."""

    number: Fraction | None  # the number, None if it is not written with digits
    unit: Unit | None  # the unit, None if there is none
    text: str  # the answer without its left-hand side and its unit
    unknown: str | None = None  # text after a number that is no known unit; None if there is none


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
    if _FORMULA.match(rest):
        return _expression(text)
    return Quantity(None, None, text, unknown=rest)


def _expression(text: str) -> Quantity:
    """Split an expression that is not a single number: its unit is in upright letters or follows the last space."""
    match = _UPRIGHT.search(text)
    start = match.start() if match else text.rfind(" ")
    is_formula = not match and (_LETTER.search(text[:start]) or text[:start].count("{") > text[:start].count("}"))
    unit = parse_unit(text[start:]) if start > 0 and text[start:].strip(" .") and not is_formula else None
    return Quantity(None, unit, text[:start].rstrip("\\ ,;~") if unit else text)


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
