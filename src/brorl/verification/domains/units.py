r"""Units of measurement: reads them from text and converts between them.

A whole string such as `kJ/mol`, `m s^{-2}`, `\text{km/h}` or `meters per second` is a unit. All factors between one
slash and the next divide: `J/mol K` is J/(mol K). A string can mean several units: `ms^{-2}` is either per square
millisecond or meters per second squared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from brorl.verification.domains.formula.tokens import in_latex, word_list

BASES = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "month", "bel", "bit", "eq", "Bq", "Sv", "dollar")
RADIAN, MONTH, SECOND = BASES.index("rad"), BASES.index("month"), BASES.index("s")
MONTH_S = Fraction("30.4375") * 86_400
"""A twelfth of 365.25 days, in seconds."""


class Unit(NamedTuple):
    """A unit as a product of base units: km/h has the factor 5/18 and the exponents m: 1, s: -1.

    The base units are the SI base units and a few more. The radian is a base unit, so turns and degrees convert to each
    other, and hertz are turns per second. The month is one too, because months and years are not exact numbers of days.
    Counts that do not convert to any other unit, such as bits, each have a base unit.
    """

    dimension: tuple[int, ...]  # exponent of each unit in `BASES`
    factor: Fraction  # size of this unit in base units
    zero: Fraction = Fraction(0)  # for a temperature scale: its zero in kelvins


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
_LONE_LETTERS_NO_UNIT = ("P", "B")  # units only with a prefix: cP, MB


def _read_table(text: str) -> None:
    """Fill the tables of units, with and without prefixes."""
    for table, section in zip((PREFIXED, PLAIN), text.split("\n## ")[1:], strict=True):
        for line in filter(None, section.splitlines()[1:]):
            names, _, definition = line.partition(" = ")
            table.update(dict.fromkeys(names.split(), _defined(definition)))


def _defined(definition: str) -> Unit:
    """Return the unit that a string such as `1000 m / s^2` defines, from base units and units in the tables."""
    product, _, zero = definition.partition(" from ")
    above, _, below = product.partition(" / ")
    size, *factors = above.split()
    dimension = ONE.dimension
    factor = Fraction(size)
    for names, sign in ((factors, 1), (below.split(), -1)):
        for name, _, exponent in (text.partition("^") for text in names):
            power = sign * int(exponent or 1)
            unit = Unit(tuple(int(base == name) for base in BASES), Fraction(1)) if name in BASES else _exactly(name)
            assert unit is not None, definition
            dimension = tuple(a + power * b for a, b in zip(dimension, unit.dimension, strict=True))
            factor *= unit.factor**power
    return Unit(dimension, factor, Fraction(zero or 0))


# Short symbols and names that are also written with an s or in capitals: `hrs`, `KM`.
_PLURALS = frozenset(
    word_list(
        "bar bit cal cc cm cup day erg gal gm hr kg km lb lbf mg min ml mm mol ohm oz pt qt rad rev sec ton wk yr yd",
    )
)
_UNIT_OF_NAME: dict[str, Unit] = {}  # lowercase name -> unit
# Names with two meanings: a pound is a mass or a force, a ton is short or metric, a Calorie is large or small.
_SECOND = {"lb": "lbf", "pound": "lbf", "ton": "tonne", "Calorie": "Cal"}


def other_meaning(name: str) -> Unit | None:
    """Return the unit of a name's second meaning; None if it has only one."""
    return next((_exactly(_SECOND[spelling]) for spelling in _spellings(name) if spelling in _SECOND), None)


def unit_named(name: str) -> Unit | None:
    """Return the unit of a symbol or name, with or without a prefix; None if it is unknown."""
    return next((unit for spelling in _spellings(name) if (unit := _exactly(spelling)) is not None), None)


def _spellings(name: str) -> Iterator[str]:
    """Yield a name and its singular, then both in lower case if the name is longer or common."""
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
    if name in _UNIT_OF_NAME:
        return _UNIT_OF_NAME[name]
    for prefix, factor in PREFIXES.items():
        symbol = name.removeprefix(prefix)
        if symbol in PREFIXED and symbol != name and (len(prefix) > 2) == (len(symbol) > 3):
            unit = PREFIXED[symbol]
            return Unit(unit.dimension, unit.factor * factor)
    return None


_read_table(Path(__file__).with_name("units.txt").read_text("utf-8"))
_UNIT_OF_NAME |= {name.lower(): unit for units in (PREFIXED, PLAIN) for name, unit in units.items() if len(name) > 3}
TURN = PLAIN["turn"].factor
"""One turn, in radians."""


_MAX_CHARACTERS = 80
_MAX_EXPONENT = 12
_MAX_READINGS = 4
_MAX_GLUED = 8  # characters in a run of symbols: `kgm` has 3
_CALENDAR = Fraction(1, 1000)  # relative error of a conversion to days: months and years differ in length

_FONT = (
    r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathit|mathbf|mathsf|mbox|operatorname|rm|unit|si|bf|it|ce)"
    r"(?![a-zA-Z])"
)
_MARKUP = re.compile(rf"{_FONT}|\\(?:left|right)(?![a-zA-Z])|[{{}}$]")
_SPACE = re.compile(r"~|\\[,;:! ]|\\q?quad(?![a-zA-Z])|\s+")
_WRITTEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"(\1)/(\2)"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z])|º|˚", "°"),
        (r"\\mu(?![a-zA-Z])\s*", "\N{MICRO SIGN}"),
        (r"\\(?:Omega|ohm)(?![a-zA-Z])\s*", "\N{OHM SIGN}"),
        (r"\\AA(?![a-zA-Z])|\\(?:mathring|r)\s*\{\s*A\s*\}", "Å"),
        (r"\\%", "%"),
        (r"\\(?:cdot|times|ast|bullet)(?![a-zA-Z])", "*"),
        (r"\\(?:per|slash)(?![a-zA-Z])", "/"),
    )
)
# Applied after markup and extra spaces are removed.
_SPELLED = tuple(
    (re.compile(pattern, re.IGNORECASE), written)
    for pattern, written in (
        (r"\bper ?cent\b", "%"),
        (r"\bparts per (m|b)illion\b", r"pp\1"),
        (r"(?:°|\b(?:degrees?|deg) ?(?=[CFKR]))\s?(C|F|R)(?:elsius|ahrenheit|entigrade|ankine)?(?![a-z])", r"°\1"),
        (r"\b(?:degrees? )?centigrade\b", "°C"),
        (r"(?:°|\bdegrees?) ?k(?:elvin)?s?(?![a-z])", "K"),
        (r"\bmm ?hg\b|\bmillimet(?:er|re)s? of mercury\b", "mmHg"),
        (r"\bcm ?hg\b|\bcentimet(?:er|re)s? of mercury\b", "cmHg"),
        (r"\bin(?:ches)?\.? ?(?:hg|of mercury)\b", "inHg"),
        # names of several words
        (
            r"\b(light|nautical|fluid|fl|atomic|mass|astronomical|british|thermal|metric|horse|arc|\w*electron)\.?"
            r"[ -](?=[a-z])",
            r"\1",
        ),
        (r"\b(minute|second)s? of arc\b", r"arc\1"),
        (r"\b(?:u\.?s\.?(?= dollar)|unified(?= atomic)) ", ""),
        (r"\b(?:pounds?|lbs?)[ -]force\b", "lbf"),
        (r"\b(?:pounds?|lbs?) per square inch\b", "psi"),
        (r"\b(?:beats|revolutions|rotations) per minute\b", "rpm"),
        (r"\b(?:sq\b\.?|square\b) ?([^\W\d_]+)", r"\1^2"),
        (r"\b(?:cubic\b|cu\b\.?) ?([^\W\d_]+)", r"\1^3"),
        (r" squared\b", "^2"),
        (r" cubed\b", "^3"),
        (r"\bper\b", "/"),
        (r"\*\*", "^"),
        (r"(?<=[a-zµ\N{OHM SIGN}])[-.](?=[a-zµ\N{OHM SIGN}])", "*"),
        (r"(?<=[a-z])\.", ""),
    )
)
_EXPONENT = r"(?:\s?\^\s?(?:([-+]?\d{1,2})|\(\s?([-+]?\d{1,2})\s?\))|(-?\d{1,2}))?"
_TOKEN = re.compile(rf"(°[CFR](?![a-zA-Z])|[^\W\d_]+|[°%‰)]){_EXPONENT}|([*/(]|1(?![\d.]))")


def parse_unit(text: str) -> Unit | None:
    """Return the first unit from `parse_units`; None if there is none."""
    return next(iter(parse_units(text)), None)


@lru_cache(maxsize=4096)
def parse_units(text: str) -> tuple[Unit, ...]:
    """Return the units that plain text or LaTeX can mean; none if part is unknown or text is over 80 characters."""
    if len(text) > _MAX_CHARACTERS:
        return ()
    text = _plain_unit(text)
    tokens: list[tuple[str, int]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or abs(power := int(match[2] or match[3] or match[4] or "1")) > _MAX_EXPONENT:
            return ()
        tokens.append((match[1] or match[5], power))
        at = match.end() + (text[match.end() : match.end() + 1] == " ")
    return tuple(dict.fromkeys(_units(tokens)))


_GAP = re.compile(r"(?:[^\S\n]|[~$]|\\[,;:) ]|\\q?quad(?![a-zA-Z]))*")
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_PIECE = re.compile(  # one symbol of a unit, with the space after it
    rf"(?:{_FONT}\s*{_GROUP}|\\[dt]?frac\s*{_GROUP}\s*{_GROUP}|\\[a-zA-Z]+|\\[,;: ]|\^\s*(?:{_GROUP}|-?\d)|"
    r"[^\W\d_]+\d?|[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+|[°%/*()\u00b7.-])[^\S\n]*"
)
_IN_BRACKETS = re.compile(r"[(\[](?:\\text\s*\{)?(?:in )?\s*(?![A-J][)\]])((?:[^()\[\]]|\([^()\[\]]*\))+)[)\]]")
_MAX_PIECES = 12


def leading_unit(text: str) -> tuple[str, int] | None:
    r"""Return the unit at the start of a string and where it ends: ` J/(mol K).` -> `J/(mol K)`; None if there is none.

    Brackets around the whole unit are dropped: `(in kN)` -> `kN`. A short plain word is a unit only if no word follows
    it, because `in` and `a` are words too.
    """
    gap = _GAP.match(text)
    start = gap.end() if gap else 0
    if (around := _IN_BRACKETS.match(text, start)) and parse_unit(around[1]):
        return around[1].strip(), around.end()
    if text[start : start + 1] == "(":
        return None
    ends: list[int] = []
    at = start
    while len(ends) < _MAX_PIECES and (piece := _PIECE.match(text, at)):
        at = piece.end()
        ends.append(at)
    for end in reversed(ends):
        unit = text[start:end].rstrip().removesuffix(".")
        is_word_next = end < len(text) and (text[end].isalnum() or text[end] in "\\$")
        is_clear = len(unit) > 3 or any(mark in unit for mark in "/^\\")
        if (is_clear or not is_word_next) and parse_unit(unit) is not None:
            return unit, start + len(unit)
    return None


def _plain_unit(text: str) -> str:
    """Return text without markup, with single spaces, and with spelled-out units as symbols: `per` becomes `/`."""
    text = without_markup(text)
    for pattern, written in _SPELLED:
        text = pattern.sub(written, text)
    return text.strip()


def without_markup(text: str) -> str:
    """Return plain text or LaTeX without commands and braces, with single spaces."""
    text = in_latex(text)
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    return _SPACE.sub(" ", _MARKUP.sub("", _SPACE.sub(" ", text))).strip()


# Matches a malformed token sequence, with each name written as n: `n/` or `(*n`.
_MALFORMED = re.compile(r"^$|(?:^|\()[*)]|[^(]1|1(?!/)|[*/][*/)]|[*/(]$")


def _units(tokens: list[tuple[str, int]]) -> list[Unit]:
    """Return the units that tokens can mean; none unless they are products and quotients of units, with brackets."""
    if _MALFORMED.search("".join(name if name in "*/()1" else "n" for name, _ in tokens)):
        return []
    stack = [([ONE], 1)]  # per open bracket: units so far, sign of the next exponent (-1 after a slash)
    for name, power in tokens:
        units, sign = stack[-1]
        if name == "(":
            stack.append(([ONE], 1))
        elif name == "/":
            stack[-1] = units, -1
        elif name not in "*1":
            factors = _readings(name, power)
            if name == ")":
                stack.pop()
                if not stack:
                    return []
                factors = [_power(unit, power) for unit in units]
                units, sign = stack[-1]
            stack[-1] = _products(units, [_power(unit, sign) for unit in factors]), sign
    return stack[0][0] if len(stack) == 1 else []


def _readings(name: str, power: int) -> list[Unit]:
    """Return the units that letters with an exponent can mean: one symbol or several run together: `kgm`, `ms^{-2}`."""
    symbol = unit_named(name)
    units = [_power(unit, power) for unit in (symbol, other_meaning(name)) if unit]
    if len(name) <= _MAX_GLUED and (symbol is None or power < 0):
        units += islice(_glued(name, power), _MAX_READINGS)
    return units


def _glued(name: str, power: int) -> list[Unit]:
    """Return products of two to four joined symbols. The exponent applies to the last: `kgm^2` is kg times m^2."""
    products: list[Unit] = []

    def split(rest: str, before: Unit, parts: int) -> None:
        last = _symbol(rest)
        if last and parts:
            products.append(_times(before, _power(last, power)))
        for length in range(len(rest) - 1, 0, -1):
            first = _symbol(rest[:length]) if parts < 3 else None
            if first:
                split(rest[length:], _times(before, first), parts + 1)

    split(name, ONE, 0)
    return products


def _symbol(text: str) -> Unit | None:
    """Return the unit of a common symbol. Only a few symbols and prefixes count, so words are not read as products."""
    base = text[1:] if len(text) > 1 and text[0] in "kcmnM\N{MICRO SIGN}" and text != "mol" else text
    return unit_named(text) if base in _GLUED else None


_GLUED = frozenset(word_list("m g s A K mol N Pa J W C V F T L l Hz h eV H \N{OHM SIGN} lb ft °C rad"))


def _products(firsts: list[Unit], seconds: list[Unit]) -> list[Unit]:
    return [_times(first, second) for first in firsts for second in seconds][:_MAX_READINGS]


def _times(first: Unit, second: Unit) -> Unit:
    """Return a product of units. A temperature in a product loses its zero: only the size of a degree matters."""
    if second == ONE:
        return first
    if first == ONE:
        return second
    dimension = tuple(a + b for a, b in zip(first.dimension, second.dimension, strict=True))
    return Unit(dimension, first.factor * second.factor)


def _power(unit: Unit, power: int) -> Unit:
    return unit if power == 1 else Unit(tuple(power * a for a in unit.dimension), unit.factor**power)


class Conversion(NamedTuple):
    """A conversion of a number to a different unit: `number * factor + shift`."""

    factor: Fraction
    shift: Fraction = Fraction(0)
    slack: Fraction = Fraction(0)  # relative error of the factor

    def of(self, number: Fraction) -> Fraction:
        """Convert a number to the other unit."""
        return number * self.factor + self.shift


def conversions(unit: Unit, wanted: Unit) -> list[Conversion]:
    """Return the ways to convert a number from one unit to another; none if their dimensions differ.

    Radians and turns can be omitted: `rad/s` and `Hz` convert to `1/s`. Months convert to days by their average length.
    """
    extra = tuple(a - b for a, b in zip(unit.dimension, wanted.dimension, strict=True))
    factor = unit.factor / wanted.factor
    if not any(extra):
        return [Conversion(factor, (unit.zero - wanted.zero) / wanted.factor)]
    counted = {at for at, power in enumerate(extra) if power}
    if counted == {MONTH, SECOND} and extra[MONTH] == -extra[SECOND]:
        return [Conversion(factor * MONTH_S ** extra[MONTH], slack=_CALENDAR)]
    if len(counted) == 1 and (counted == {RADIAN} or counted == {_DECAYS}):
        base = counted.pop()
        if not unit.dimension[base] or not wanted.dimension[base]:
            turns = TURN ** -extra[base] if base == RADIAN else Fraction(1)
            return [Conversion(factor), Conversion(factor * turns)]
    return []


_DECAYS = BASES.index("Bq")
