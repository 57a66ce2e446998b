r"""Normalizes forms that mean the same: sets of numbers, plus-minus signs, lists of named values.

    `\pm 2`  ->  `2 or -2`        `x = 1 or x = 2`  ->  `1 or 2`        `0 < x < 1`, `(0, 1)`  ->  one `Region`

A set of real numbers is a predicate plus the numbers where it may change. One test decides between two such numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
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
    Matrix,
    Number,
    Quantity,
    Ratio,
    Relation,
    Symbol,
    Text,
    as_quantity,
    has_two_signs,
    is_decimal,
    to_expression,
    variables,
    with_sign,
)
from brorl.verification.domains.formula.names import (
    EQUAL,
    is_call,
    name_of,
    solved,
    vector_of,
    without_conditions,
)
from brorl.verification.domains.formula.values import at_point, order_key, same_value
from brorl.verification.domains.formula.words import units_of
from brorl.verification.domains.units import Conversion, conversions

_ALL = frozenset(
    {"all real numbers", "all reals", "any real number", "real numbers", "every real number", "all real x"}
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "\\le": operator.le, ">": operator.gt, "\\ge": operator.ge, "\\ne": operator.ne, "=": operator.eq,
}  # fmt: skip
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


class Region(NamedTuple):
    """A set of real numbers."""

    ends: tuple[Expression, ...]  # the numbers where the set changes, ascending: 0 and 1 for (0, 1]
    holds: tuple[bool, ...]  # (below ends[0], at ends[0], above it, at ends[1], ...): False False True True False
    variable: str | None  # the name of a number in the set, if any: `x`


class _Set(NamedTuple):
    contains: Callable[[Any], bool]  # takes an mpmath number
    ends: tuple[Expression, ...]
    variable: str | None = None


def region_of(form: Form) -> Region | None:
    """Return the region that a form describes; None if it does not describe a set of real numbers."""
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
    """Return a side's name if it is one such as `x` or `f(x)`, else None."""
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
    """Reverse a chain of relations: `1 < x` becomes `x > 1`."""
    signs = tuple(TURNED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(relation.sides[::-1], signs)


def is_equation(form: Form) -> bool:
    """Return whether a form is an equation or a list of equations."""
    if isinstance(form, Listing):
        return all(map(is_equation, form.items))
    return isinstance(form, Relation) and "=" in form.signs


@lru_cache(maxsize=4096)
def normal(form: Form) -> Form:
    r"""Return a form in the standard notation: `{4}` -> `4`, `\pm 2` -> `2 or -2`, `x = 1 or x = 2` -> `1 or 2`."""
    if isinstance(form, Relation) and form.signs == ("\\in",) and vector_of(form.sides[0]):
        points = members_of(form.sides[1]) or (form.sides[1],)
        return _normal_listing(Listing((Relation((form.sides[0], points[0]), ("=",)), *points[1:]), "or"))
    if isinstance(form, Relation) and form.signs == ("\\in",) and isinstance(form.sides[0], Symbol):
        is_finite = isinstance(form.sides[1], Bracketed) and form.sides[1].opening == "\\{"
        return form if region_of(form) and not is_finite else normal(form.sides[1])
    if isinstance(form, Relation) and isinstance(form.sides[-1], Listing) and set(form.signs) <= EQUAL:
        return normal(form.sides[-1])
    if isinstance(form, Bracketed) and form.opening == "\\{:":
        return form if region_of(form) else normal(form.items[0])
    if isinstance(form, Bracketed) and form.opening == "\\{":
        return _normal_set(form)
    if isinstance(form, Matrix) and not form.is_array and all(isinstance(row[0], Relation) for row in form.rows):
        return _normal_listing(Listing(tuple(cell for row in form.rows for cell in row), ","))
    if isinstance(form, Matrix) and not vector_of(form):
        kind = "array" if form.is_array else "lines"
        return Bracketed(kind, tuple(Bracketed("row", row, "row") for row in form.rows), kind)
    if isinstance(form, Ratio):
        first, *others = form.items
        parts = form.items if form.is_time else tuple(Apply("/", (first, other)) for other in others)
        return parts[0] if len(parts) == 1 else Bracketed(":", parts, "time" if form.is_time else ":")
    if isinstance(form, Listing):
        return _normal_listing(form)
    if isinstance(form, Relation) and any(map(has_two_signs, form.sides)) and len(form.sides) == 2 and solved(form):
        return normal(form.sides[1])
    if has_two_signs(form):
        return Listing((with_sign(form, 1), with_sign(form, -1)), "or")
    if isinstance(form, Bracketed) and (form.opening, form.closing) == ("(", ")"):
        return _with_either_sign(form)
    if isinstance(form, Quantity) and has_two_signs(form.value):
        return Listing(tuple(form._replace(value=with_sign(form.value, sign)) for sign in (1, -1)), "or")
    return form


def _with_either_sign(form: Bracketed) -> Form:
    r"""Return both points of `(2, \pm 1)`; a point with more such signs is ambiguous and is returned unchanged."""
    places = [at for at, item in enumerate(form.items) if has_two_signs(item)]
    if len(places) != 1:
        return form
    (at,) = places
    both = (with_sign(to_expression(form.items[at]), sign) for sign in (1, -1))
    return Listing(tuple(form._replace(items=(*form.items[:at], one, *form.items[at + 1 :])) for one in both), "or")


def _with_heads(items: Sequence[Form]) -> Sequence[Form]:
    """Return `(p,q) = (5,2), (7,2)` as `(p,q) = (5,2), (p,q) = (7,2)`."""
    match items[0]:
        case Relation((heads, first), ("=",)) if (names := vector_of(heads)) and vector_of(first):
            if all(len(vector_of(item) or ()) == len(names) for item in items[1:]):
                return [items[0], *(Relation((heads, item), ("=",)) for item in items[1:])]
    return items


def _in_blocks(items: list[Form]) -> list[Form]:
    """Return `p = 5, q = 2, p = 7, q = 2` as `(p,q) = (5,2), (p,q) = (7,2)`."""
    pairs = [pair for item in items if isinstance(item, Relation) and (pair := solved(item))]
    names = [name for name, _ in pairs]
    size = len(dict.fromkeys(names))
    if not 1 < size < len(items) == len(names) or names != names[:size] * (len(names) // size):
        return items
    heads = Bracketed("(", tuple(map(Symbol, names[:size])), ")")
    values = [tuple(value for _, value in pairs[at : at + size]) for at in range(0, len(pairs), size)]
    return [Relation((heads, Bracketed("(", one, ")")), ("=",)) for one in values]


def _flat(items: Sequence[Form]) -> list[Form]:
    r"""Return items with each item that means several replaced by those: `\pm 2` becomes `2` and `-2`."""
    flat: list[Form] = []
    for item in items:
        one = normal(item)
        flat.extend(one.items if isinstance(one, Listing) and item != one else [item])
    return flat


def _normal_set(form: Bracketed) -> Form:
    items = _flat(form.items)
    is_value = len(items) == 1 and not isinstance(items[0], Bracketed)
    return normal(items[0]) if is_value else form._replace(items=tuple(items))


def _normal_listing(form: Listing) -> Form:
    written = without_conditions(form)
    if len(written) == 1:
        return normal(written[0])
    items = _in_blocks(_flat(_with_heads(written)))
    names = [solved(item) if isinstance(item, Relation) and len(item.sides) == 2 else None for item in items]
    heads = {name[0].split("_")[0] for name in names if name}
    are_named = all(name or not isinstance(item, Relation) for name, item in zip(names, items, strict=True))
    if names[0] and len(heads) == 1 and are_named:
        items = [name[1] if name else item for name, item in zip(names, items, strict=True)]
    total = total_of(items) if form.joint != "or" else None
    return total or Listing(tuple(items), form.joint)


def total_of(items: Sequence[Form]) -> Quantity | None:
    """Return `2 hours and 30 minutes` as one quantity in hours; None if the items are not parts of one quantity."""
    parts = [(item, units_of(item.unit)[0]) for item in items if isinstance(item, Quantity) and units_of(item.unit)]
    if not len(parts) == len(items) > 1 or len({unit.dimension for _, unit in parts}) > 1:
        return None
    if any(one.factor <= other.factor for (_, one), (_, other) in pairwise(parts)):
        return None
    (first, whole), *_ = parts
    terms = [Apply("*", (Number(unit.factor / whole.factor), part.value)) for part, unit in parts]
    return Quantity(Apply("+", tuple(terms)), first.unit, None)


def members_of(form: Form) -> Sequence[Form] | None:
    """Return the members of a set or a list without brackets; None for other forms."""
    if isinstance(form, Listing) or (isinstance(form, Bracketed) and form.opening == "\\{"):
        return form.items
    return None


def percent_of(expression: Expression) -> Expression | None:
    """Return a percentage without its sign; None for any other expression."""
    if isinstance(expression, Apply) and expression.operation == "%":
        return expression.arguments[0]
    if isinstance(expression, Apply) and expression.operation == "-" and (inner := percent_of(expression.arguments[0])):
        return Apply("-", (inner,))
    return None


def along_axes(form: Form, vector: Form) -> Sequence[Form] | None:
    r"""Return (3, 4) for `3\mathbf{i}+4\mathbf{j}` if the other form is a vector of equal length; otherwise None."""
    parts = vector_of(vector)
    if parts is None or not isinstance(form, Expression) or not variables(form) <= {*"ijk"[: len(parts)]}:
        return None
    axes = "ijk"[: len(parts)]
    along = [at_point(form, {axis: Fraction(axis == one) for axis in axes}) for one in axes]
    total = Apply("+", tuple(Apply("*", (Symbol(axis), part)) for axis, part in zip(axes, along, strict=True)))
    return along if len(axes) == len(parts) and same_value(total, form) else None


def have_other_units(right: Form, given: Form) -> bool:
    """Return whether two quantities have units that do not convert to each other."""
    one, other = as_quantity(right), as_quantity(given)
    if one is None or other is None or not (one.unit and other.unit):
        return False
    return not any(conversions(a, b) for a in units_of(other.unit) for b in units_of(one.unit))


def converted(value: Expression, way: Conversion) -> Expression:
    """Return a value converted to a different unit."""
    factor, shift = Number(way.factor, is_decimal(value)), Number(way.shift)
    product = value if way.factor == 1 else Apply("*", (factor, value))
    return product if way.shift == 0 else Apply("+", (product, shift))
