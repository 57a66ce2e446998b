r"""Sets of real numbers: intervals, inequalities and unions of them, and what is left without some numbers.

A set is a predicate with the numbers at which it may change; between two of these, one test decides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mpmath import mp

from brorl.verification.domains.formula.expressions import (
    Apply,
    Bracketed,
    Combined,
    Expression,
    Form,
    Listing,
    Relation,
    Symbol,
    Text,
    has_two_signs,
    to_expression,
    with_sign,
)
from brorl.verification.domains.formula.names import is_call, name_of
from brorl.verification.domains.formula.values import order_key

_ALL = frozenset(
    {"all real numbers", "all reals", "any real number", "real numbers", "every real number", "all real x"}
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "\\le": operator.le, ">": operator.gt, "\\ge": operator.ge, "\\ne": operator.ne, "=": operator.eq,
}  # fmt: skip
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


class Region(NamedTuple):
    """A set of real numbers."""

    ends: tuple[Expression, ...]  # where it changes, ascending
    holds: tuple[bool, ...]  # whether it has the numbers before the first end, this end, those after it, ...
    variable: str | None  # what lies in it, if that is named


class _Set(NamedTuple):
    contains: Callable[[Any], bool]  # of a number of mpmath
    ends: tuple[Expression, ...]
    variable: str | None = None


def region_of(form: Form) -> Region | None:
    """Return the region that a form describes; None if it describes none."""
    try:
        found = None if isinstance(form, Bracketed) and form.opening == "\\{" else _set(form)
        return _region(found) if found else None
    except ValueError:
        return None


def _region(found: _Set) -> Region:
    end_of = {_value(end): end for end in reversed(found.ends)}
    values = sorted(value for value in end_of if mp.isfinite(value))
    with mp.workdps(60):
        around = [values[0] - 1, *((a + b) / 2 for a, b in pairwise(values)), values[-1] + 1] if values else [mp.mpf(0)]
        at, beside = [found.contains(value) for value in values], [found.contains(point) for point in around]
    kept = [k for k in range(len(values)) if not at[k] == beside[k] == beside[k + 1]]
    holds = [beside[0], *(one for k in kept for one in (at[k], beside[k + 1]))]
    return Region(tuple(end_of[values[k]] for k in kept), tuple(holds), found.variable)


def _value(number: Form) -> Any:
    """Return the value of a real number, which may be infinite."""
    value = order_key(to_expression(number)) if isinstance(number, Expression) else None
    if value is None:
        raise ValueError("no number")
    return value


def _half(sign: str, number: Form, variable: str | None = None) -> _Set:
    value = _value(number)
    return _Set(lambda x: _COMPARE[sign](x, value), (to_expression(number),), variable)


def _set(form: Form) -> _Set | None:
    match form:
        case Symbol("\\mathbb{R}"):
            return _Set(lambda _: True, ())
        case Text(words) if words.casefold() in _ALL:
            return _Set(lambda _: True, ())
        case Bracketed("\\{:", (condition,), _):
            inner = _set(condition)
            return inner and inner._replace(variable=None)
        case Bracketed("\\{", items, _):
            return _combine("\\cup", [_half("=", item) for item in items])
        case Bracketed("(" | "[" as opening, (low, high), closing):
            if (opening == "[" and mp.isinf(_value(low))) or (closing == "]" and mp.isinf(_value(high))):
                return None
            ends = _half(">" if opening == "(" else "\\ge", low), _half("<" if closing == ")" else "\\le", high)
            return _combine("\\cap", ends)
        case Relation(sides, signs):
            return _of_relation(sides, signs)
        case Combined(sign, parts):
            return _combine(sign, [_set(part) for part in parts])
        case Listing(items, joint) if all(isinstance(item, Relation) for item in items):
            sets = [_set(item) for item in items]
            both = _combine("\\cap", sets)
            is_union = joint == "or" or (joint == "," and both is not None and not any(_region(both).holds))
            return _combine("\\cup", sets) if is_union else both
        case _:
            return None


def _of_relation(sides: tuple[Form, ...], signs: tuple[str, ...]) -> _Set | None:
    if signs == ("\\in",) and (name := _variable_of(sides[0])):
        inner = _set(sides[1])
        return inner and inner._replace(variable=name)
    are_expressions = all(isinstance(side, Expression) for side in sides)
    if are_expressions and any(map(has_two_signs, sides)):
        both = [_of_relation(tuple(with_sign(to_expression(s), sign) for s in sides), signs) for sign in (1, -1)]
        return _combine("\\cap" if signs == ("\\ne",) else "\\cup", both)
    places = [at for at, side in enumerate(sides) if _variable_of(side) or _inside_bars(side)]
    if len(places) != 1 or not set(signs) <= TURNED.keys() or not are_expressions:
        return None
    (at,), parts = places, list[_Set | None]()
    directions = {{"\\le": "<", "\\ge": ">"}.get(sign, sign) for sign in signs}
    if len(sides) > 2 and (at in (0, len(sides) - 1) or len(directions) > 1):
        return None
    for place, side in enumerate(sides):
        if place != at:
            sign, number = signs[at] if place > at else TURNED[signs[place]], to_expression(side)
            name, letter = _variable_of(sides[at]), _inside_bars(sides[at])
            parts.append(_beside_zero(letter, sign, number) if letter else _half(sign, number, name))
    return _combine("\\cap", parts)


def _variable_of(side: Form) -> str | None:
    """Return the name of what lies in a region: `x` or `f(x)`; None if a side is no such name."""
    return name_of(side) if is_call(side) or isinstance(side, Symbol) else None


def _inside_bars(side: Form) -> str | None:
    """Return the x of `|x|`; None if a side is something else."""
    if isinstance(side, Apply) and side.operation == "abs" and isinstance(side.arguments[0], Symbol):
        return _variable_of(side.arguments[0])
    return None


def _beside_zero(variable: str, sign: str, size: Expression) -> _Set | None:
    """Return the set of `|x| < 2`."""
    value = _value(size)
    if value < 0 or sign not in ("<", "\\le", ">", "\\ge"):
        return None
    return _Set(lambda x: _COMPARE[sign](abs(x), value), (size, Apply("-", (size,))), variable)


def _combine(sign: str, parts: Sequence[_Set | None]) -> _Set | None:
    sets = [part for part in parts if part is not None]
    names = {one.variable for one in sets} - {None}
    if len(sets) < len(parts) or len(names) > 1 or not sets:
        return None
    first, *others = (one.contains for one in sets)
    contains: dict[str, Callable[[Any], bool]] = {
        "\\cup": lambda x: first(x) or any(other(x) for other in others),
        "\\cap": lambda x: first(x) and all(other(x) for other in others),
        "\\setminus": lambda x: first(x) and not any(other(x) for other in others),
    }
    return _Set(contains[sign], tuple(end for one in sets for end in one.ends), next(iter(names), None))


def turned(relation: Relation) -> Relation:
    """Return a chain of relations from its end."""
    signs = tuple(TURNED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(relation.sides[::-1], signs)


def is_equation(form: Form) -> bool:
    """Whether a form is an equation, or a list of them."""
    if isinstance(form, Listing):
        return all(map(is_equation, form.items))
    return isinstance(form, Relation) and "=" in form.signs
