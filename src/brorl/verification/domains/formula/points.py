r"""Points for comparing two formulas: random points, and points on each side of every number where a formula changes.

    `|x - 5|`  ->  x = 1.3, -2.1, ... near 0; then x = 2.9 below the break 5, 8.4 above it, and points far from it

An absolute value, rounding, maximum, root or logarithm may follow different rules on the two sides of a number, its
break. Between and beyond breaks, one point is enough, because a formula is analytic there. Breaks are found exactly if
the argument is a polynomial of degree 1 or 2 between its own breaks; otherwise, points are placed at all magnitudes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import ceil, floor, isqrt
from random import Random
from typing import Any, NamedTuple

from brorl.verification.domains.formula.expressions import (
    INTEGER_FUNCTIONS,
    Apply,
    Expression,
    exact_value,
    variables,
    walk,
)

WHOLE_NUMBERS = frozenset("nkmj")  # letters that denote whole numbers
_NEAR_ZERO = 8
_MAX_BREAKS, _MAX_PARTS = 24, 40
_MAX_SEARCHES = 200  # limit for variables times changes; each search finds one variable's breaks in one change
_JOINT = 6  # points with all variables next to their breaks
_FAR = (Fraction(43), Fraction(2_903))
_MAGNITUDES = tuple(Fraction(9, 2) * 4**k for k in range(9))
_ROOT_DIGITS = 10**20

_AT_ZERO = frozenset({"abs", "sgn", "sign", "sqrt", "root", "ln", "log", "lg"})
_WITHIN_ONE = frozenset(
    {"arcsin", "arccos", "asin", "acos", "arcsec", "arccsc", "arcosh", "arccosh", "artanh", "arctanh", "sech", "csch"}
)
_REAL_ON_A_PART = frozenset({"sqrt", "root", "ln", "log", "lg"}) | _WITHIN_ONE
_STEPS = frozenset({"floor", "ceil", "mod"})
_OF_SIGNS = frozenset({"abs", "sgn", "sign", "max", "min"})
_OF_COUNTS = frozenset({"!", "binom", "sum", "prod", *INTEGER_FUNCTIONS})
_ZERO, _ONE = (Fraction(0),), (Fraction(-1), Fraction(1))
_FIRST_STEPS = tuple(map(Fraction, (-1, 0, 1, 2)))


class _Change(NamedTuple):
    """A formula may change where an expression has one of these values."""

    argument: Expression
    levels: tuple[Fraction, ...]
    is_jump: bool = False  # whether the formula may have a separate value at the break


class _Breaks(NamedTuple):
    at: list[Fraction]  # ascending
    jumps: list[Fraction]  # breaks of roundings
    are_all: bool  # whether all breaks were found


def near_zero(names: Sequence[str], whole: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield points with all variables within 3 of zero, whole numbers from 2 to 30."""
    random = Random(17)
    for number in range(_NEAR_ZERO):
        point: dict[str, Any] = {}
        for name in names:
            if name in whole:
                point[name] = Fraction(random.randint(2, 30))
            else:
                sign = random.choice((-1, 1)) if number > 2 else 1
                point[name] = Fraction(random.randint(200, 3_000), 1_009) * sign
        yield point


def at_changes(
    expressions: Sequence[Expression], names: Sequence[str], whole: Collection[str], fixed: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield points on each side of every break, one variable at a time, then all together; none without breaks."""
    parts = [part for expression in expressions for part in walk(expression) if isinstance(part, Apply)][::-1]
    changes = list(dict.fromkeys(change for part in parts[-_MAX_PARTS:] for change in _changes(part)))
    if not (changes and names):
        return
    changes = changes[: _MAX_SEARCHES // len(names)]
    random = Random(23)
    counted = any(part.operation in _OF_COUNTS or _is_count(part) for part in parts)
    signed = not counted and any(part.operation in _OF_SIGNS or _is_even_root(part) for part in parts)
    base = next(near_zero(names, whole))
    values: dict[str, list[Fraction]] = {}
    for name in names:
        breaks = _breaks(changes, name, {**fixed, **base})
        if name in whole:
            values[name] = _whole_beside(breaks, signed, most=30 if counted else None)
        else:
            values[name] = _beside(breaks, random)
        for value in values[name]:
            yield {**base, name: value}
    if len(names) > 1 and all(values.values()):
        for _ in range(_JOINT):
            yield {name: random.choice(values[name]) for name in names}
        yield {name: max(values[name]) for name in names}


def may_be_complex(expression: Expression) -> list[Expression]:
    """Return the roots, logarithms and inverse functions in an expression, which are real only on part of the line."""
    return [
        part
        for part in walk(expression)
        if isinstance(part, Apply)
        and part is not expression
        and (part.operation in _REAL_ON_A_PART or (part.operation == "^" and any(_changes(part))))
    ]


def _is_count(part: Apply) -> bool:
    return part.operation == "call" and len(part.arguments) > 2  # C(n, k)


def _is_even_root(part: Apply) -> bool:
    r"""Return whether a part is a root of an even power, such as `\sqrt{k^2}`, which suggests negative numbers."""
    if part.operation not in ("sqrt", "root", "^"):
        return False
    inner = part.arguments[0]
    power = exact_value(inner.arguments[1]) if isinstance(inner, Apply) and inner.operation == "^" else None
    return power is not None and power.denominator == 1 and power % 2 == 0


def _changes(part: Apply) -> Iterator[_Change]:
    """Yield where part of a formula may change, if it depends on a variable."""
    operation, arguments = part
    first = arguments[0]
    if operation in _AT_ZERO:
        yield from _if_open(first, _ZERO)
    elif operation in _WITHIN_ONE:
        yield from _if_open(first, _ONE)
    elif operation == "^":
        power = exact_value(arguments[1])
        if power is None or power.denominator != 1:
            yield from _if_open(first, _ZERO)
    elif operation in ("max", "min"):
        for first, second in combinations(arguments[:6], 2):
            yield from _if_open(Apply("+", (first, Apply("-", (second,)))), _ZERO)
    elif operation in _STEPS:
        yield from _if_open(first if operation != "mod" else Apply("/", arguments), _FIRST_STEPS, is_jump=True)
    elif operation in INTEGER_FUNCTIONS:
        steps = [value for value in map(exact_value, arguments) if value]
        for argument in arguments:
            yield from _if_open(argument, tuple(k * step for step in steps for k in (1, 2)), is_jump=True)


def _if_open(argument: Expression, levels: tuple[Fraction, ...], is_jump: bool = False) -> Iterator[_Change]:
    if variables(argument):
        yield _Change(argument, levels, is_jump)


def _breaks(changes: Sequence[_Change], name: str, point: Mapping[str, Any]) -> _Breaks:
    """Return the values of a variable at which a formula changes, found from inner changes to outer."""
    breaks: set[Fraction] = set()
    jumps: set[Fraction] = set()
    are_all = True
    for change in changes:
        if name not in variables(change.argument):
            continue
        ends = sorted(breaks)
        new: set[Fraction] = set()
        for low, high in pairwise([None, *ends, None]):
            roots = _roots(change, low, high, name, point)
            are_all = are_all and roots is not None
            new.update(roots or ())
        if len(breaks | new) > _MAX_BREAKS:
            are_all = False
            break
        breaks |= new
        jumps |= new if change.is_jump else set()
    return _Breaks(sorted(breaks), sorted(jumps), are_all)


def _roots(
    change: _Change, low: Fraction | None, high: Fraction | None, name: str, point: Mapping[str, Any]
) -> list[Fraction] | None:
    """Return where a polynomial of degree 0 to 2 reaches a change's levels in an interval; None for other formulas."""
    places = _places(low, high)
    values = [exact_value(change.argument, {**point, name: place}) for place in places]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    (p, q, r), (at_p, at_q, at_r) = places[:3], known[:3]
    slope = (at_q - at_p) / (q - p)
    square = ((at_r - at_q) / (r - q) - slope) / (r - p)
    linear = slope - square * (p + q)
    constant = at_p - square * p * p - linear * p
    if any(square * x * x + linear * x + constant != y for x, y in zip(places[3:], known[3:], strict=True)):
        return None
    roots = [root for level in change.levels for root in _solutions(square, linear, constant - level)]
    return [root for root in roots if (low is None or low <= root) and (high is None or root <= high)]


def _places(low: Fraction | None, high: Fraction | None) -> list[Fraction]:
    """Return numbers inside an interval for evaluating a formula to find its degree."""
    if low is not None and high is not None:
        return [low + (high - low) * k / 6 for k in range(1, 6)]
    far = [Fraction(step) for step in (1, 3, 4, 1_009, 1_000_003)]
    if low is None and high is None:
        return [*far, *(-step for step in far[-2:])]
    return [low + step for step in far] if low is not None else [high - step for step in far if high is not None]


def _solutions(square: Fraction, linear: Fraction, constant: Fraction) -> list[Fraction]:
    """Return the real roots of a polynomial, irrational ones to 20 digits."""
    if square == 0:
        return [-constant / linear] if linear else []
    inside = linear * linear - 4 * square * constant
    if inside < 0:
        return []
    root = Fraction(isqrt(inside.numerator * inside.denominator * _ROOT_DIGITS**2), inside.denominator * _ROOT_DIGITS)
    return [(-linear + sign * root) / (2 * square) for sign in (-1, 1)]


def _beside(breaks: _Breaks, random: Random) -> list[Fraction]:
    """Return real numbers between breaks and beyond them, and the breaks of roundings."""
    ends = breaks.at
    between = [low + (high - low) * Fraction(random.randint(20, 80), 101) for low, high in pairwise(ends)]
    beyond = [end + sign * (1 + abs(end)) * Fraction(random.randint(20, 80), 101) for end, sign in _outer(ends)]
    wide = [sign * size * Fraction(random.randint(90, 110), 101) for size in _far(breaks) for sign in (1, -1)]
    return [*beyond, *between, *breaks.jumps, *wide]


def _far(breaks: _Breaks) -> Sequence[Fraction]:
    """Return magnitudes far from 0; none if all breaks are known, because one point beyond the last is then enough."""
    if not breaks.are_all:
        return _MAGNITUDES
    return _FAR if breaks.jumps else ()


def _outer(ends: Sequence[Fraction]) -> list[tuple[Fraction, int]]:
    return [(ends[0], -1), (ends[-1], 1)] if ends else []


def _whole_beside(breaks: _Breaks, signed: bool, most: int | None) -> list[Fraction]:
    """Return whole numbers next to the breaks, and large ones if `most` is None; negative ones only if `signed`."""
    beside = {floor(end) + step for end in breaks.at for step in (-1, 0, 1, 2)} | {ceil(2 * end) for end in breaks.at}
    sizes = [] if most else [*map(floor, _far(breaks)), 10**6 + 3]
    signs = (1, -1) if signed else (1,)
    numbers = sorted(beside | {size * sign for size in sizes for sign in signs} | ({-1, -7} if signed else set()))
    return [Fraction(number) for number in numbers if signed or number > 0]
