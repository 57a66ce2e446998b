r"""Normalizes forms with the same meaning: sets of numbers, plus-minus signs, lists of named values.

    `\pm 2`  ->  `2 or -2`        `x = 1 or x = 2`  ->  `1 or 2`        `0 < x < 1`, `(0, 1)`  ->  one `Region`

A set of real numbers is a predicate plus the numbers where it may change. Between two neighbors, one test is enough.
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
    computed,
    exact_value,
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
        numbers = None if isinstance(form, Bracketed) and form.opening == "\\{" else _set(form)
        return _region(numbers) if numbers else None
    except ValueError:
        return None


def _region(numbers: _Set) -> Region:
    end_of = {_value(end): end for end in reversed(numbers.ends)}
    values = sorted(value for value in end_of if mp.isfinite(value))
    with mp.workdps(60):
        around = [values[0] - 1, *((a + b) / 2 for a, b in pairwise(values)), values[-1] + 1] if values else [mp.mpf(0)]
        at = [numbers.contains(value) for value in values]
        beside = [numbers.contains(point) for point in around]
    # An end at which nothing changes, such as 1 in `(0, 1] \cup (1, 2)`, is dropped.
    kept = [k for k in range(len(values)) if not at[k] == beside[k] == beside[k + 1]]
    holds = [beside[0]]
    for k in kept:
        holds += [at[k], beside[k + 1]]
    return Region(tuple(end_of[values[k]] for k in kept), tuple(holds), numbers.variable)


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
    if not all(isinstance(side, Expression) for side in sides):
        return None
    if any(map(has_two_signs, sides)):
        both = [_of_relation(tuple(with_sign(to_expression(s), sign) for s in sides), signs) for sign in (1, -1)]
        return _combine("\\cap" if signs == ("\\ne",) else "\\cup", both)
    places = [place for place, side in enumerate(sides) if _variable_of(side) or _inside_bars(side)]
    if len(places) != 1 or not set(signs) <= TURNED.keys():
        return None
    (place,) = places
    if len(sides) > 2:  # a chain is a set if x is inside and the signs point the same way: `0 < x \le 1`
        directions = {{"\\le": "<", "\\ge": ">"}.get(sign, sign) for sign in signs}
        if place in (0, len(sides) - 1) or len(directions) > 1:
            return None
    # `0 < x \le 1` is `x > 0` and `x \le 1`: signs before x are reversed.
    before = [(TURNED[sign], side) for sign, side in zip(signs[:place], sides[:place], strict=True)]
    after = [(signs[place], side) for side in sides[place + 1 :]]
    return _combine("\\cap", [_bounded(sides[place], sign, to_expression(side)) for sign, side in before + after])


def _variable_of(side: Form) -> str | None:
    """Return the name if a side is a name such as `x` or `f(x)`; None for other sides."""
    return name_of(side) if is_call(side) or isinstance(side, Symbol) else None


def _inside_bars(side: Form) -> str | None:
    """Return x if a side is `|x|`; None for other sides."""
    if isinstance(side, Apply) and side.operation == "abs" and isinstance(side.arguments[0], Symbol):
        return _variable_of(side.arguments[0])
    return None


def _bounded(side: Form, sign: str, number: Expression) -> _Set | None:
    """Return the set of x that satisfy `x < 2` or `|x| < 2`."""
    letter = _inside_bars(side)
    if letter is None:
        return _half(sign, number, _variable_of(side))
    size = _value(number)
    if size < 0 or sign not in ("<", "\\le", ">", "\\ge"):
        return None
    return _Set(lambda x: _COMPARE[sign](abs(x), size), (number, Apply("-", (number,))), letter)


def _combine(sign: str, parts: Sequence[_Set | None]) -> _Set | None:
    sets = [part for part in parts if part is not None]
    names = {part.variable for part in sets} - {None}
    if len(sets) < len(parts) or len(names) > 1 or not sets:
        return None
    first, *others = (part.contains for part in sets)
    contains: dict[str, Callable[[Any], bool]] = {
        "\\cup": lambda x: first(x) or any(other(x) for other in others),
        "\\cap": lambda x: first(x) and all(other(x) for other in others),
        "\\setminus": lambda x: first(x) and not any(other(x) for other in others),
    }
    return _Set(contains[sign], tuple(end for part in sets for end in part.ends), next(iter(names), None))


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
    r"""Return a form in standard notation: `{4}` -> `4`, `\pm 2` -> `2 or -2`, `x = 1 or x = 2` -> `1 or 2`."""
    match form:
        case Relation():
            return _normal_relation(form)
        case Bracketed():
            return _normal_bracketed(form)
        case Matrix():
            return _normal_matrix(form)
        case Ratio():
            return _normal_ratio(form)
        case Listing():
            return _normal_listing(form)
        case Quantity() if has_two_signs(form.value):
            return Listing(tuple(form._replace(value=with_sign(form.value, sign)) for sign in (1, -1)), "or")
        case Apply() if has_two_signs(form):
            return Listing((with_sign(form, 1), with_sign(form, -1)), "or")
        case _:
            return form


def _normal_relation(form: Relation) -> Form:
    first, last = form.sides[0], form.sides[-1]
    is_member = form.signs == ("\\in",)
    if is_member and vector_of(first):  # `(x, y) \in \{(1, 2), (3, 4)\}` -> `(x, y) = (1, 2) or (x, y) = (3, 4)`
        points = members_of(last) or (last,)
        return _normal_listing(Listing((Relation((first, points[0]), ("=",)), *points[1:]), "or"))
    if is_member and isinstance(first, Symbol):  # `x \in \{4\}` -> `4`, but `x \in (0, 1)` remains a region
        is_finite = isinstance(last, Bracketed) and last.opening == "\\{"
        return form if region_of(form) and not is_finite else normal(last)
    if isinstance(last, Listing) and set(form.signs) <= EQUAL:  # `x = 1 or 2` -> `1 or 2`
        return normal(last)
    if len(form.sides) == 2 and any(map(has_two_signs, form.sides)) and solved(form):  # `x = \pm 2` -> `2 or -2`
        return normal(last)
    return form


def _normal_bracketed(form: Bracketed) -> Form:
    if form.opening == "\\{:":
        return form if region_of(form) else normal(form.items[0])
    if form.opening == "\\{":  # `\{4\}` -> `4`, `\{\pm 2\}` -> `\{2, -2\}`
        items = _flat(form.items)
        is_value = len(items) == 1 and not isinstance(items[0], Bracketed)
        return normal(items[0]) if is_value else form._replace(items=tuple(items))
    return _with_either_sign(form) if (form.opening, form.closing) == ("(", ")") else form


def _normal_matrix(form: Matrix) -> Form:
    if not form.is_array and all(isinstance(row[0], Relation) for row in form.rows):  # a system of equations
        return _normal_listing(Listing(tuple(cell for row in form.rows for cell in row), ","))
    if vector_of(form):
        return form
    kind = "array" if form.is_array else "lines"
    return Bracketed(kind, tuple(Bracketed("row", row, "row") for row in form.rows), kind)


def _normal_ratio(form: Ratio) -> Form:
    """Return `2:3` as `2/3`, and `1:2:3` as `1/2` and `1/3`."""
    if form.is_time:
        return Bracketed(":", form.items, "time")
    first, *others = form.items
    quotients = tuple(computed("/", (first, other)) for other in others)
    return quotients[0] if len(quotients) == 1 else Bracketed(":", quotients, ":")


def _with_either_sign(form: Bracketed) -> Form:
    r"""Return both points of `(2, \pm 1)`. A point with several such signs is ambiguous and is returned unchanged."""
    places = [place for place, item in enumerate(form.items) if has_two_signs(item)]
    if len(places) != 1:
        return form
    (place,) = places
    before, item, after = form.items[:place], to_expression(form.items[place]), form.items[place + 1 :]
    points = (form._replace(items=(*before, with_sign(item, sign), *after)) for sign in (1, -1))
    return Listing(tuple(points), "or")


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
    points = [tuple(value for _, value in pairs[start : start + size]) for start in range(0, len(pairs), size)]
    return [Relation((heads, Bracketed("(", point, ")")), ("=",)) for point in points]


def _flat(items: Sequence[Form]) -> list[Form]:
    r"""Expand each item that stands for several: `\pm 2` becomes `2` and `-2`."""
    flat: list[Form] = []
    for item in items:
        form = normal(item)
        flat.extend(form.items if isinstance(form, Listing) and item != form else [item])
    return flat


def _normal_listing(form: Listing) -> Form:
    written = without_conditions(form)
    if len(written) == 1:
        return normal(written[0])
    items = _in_blocks(_flat(_with_heads(written)))
    # `x_1 = 1, x_2 = 3` and `x = 1, 3` -> `1, 3`, but `x = 1, y = 3` keeps its names
    pairs = [solved(item) if isinstance(item, Relation) and len(item.sides) == 2 else None for item in items]
    heads = {pair[0].split("_")[0] for pair in pairs if pair}
    are_named = all(pair or not isinstance(item, Relation) for pair, item in zip(pairs, items, strict=True))
    if pairs[0] and len(heads) == 1 and are_named:
        items = [pair[1] if pair else item for pair, item in zip(pairs, items, strict=True)]
    total = total_of(items) if form.joint != "or" else None
    return total or Listing(tuple(items), form.joint)


def total_of(items: Sequence[Form]) -> Quantity | None:
    """Return `2 hours and 30 minutes` as one quantity in hours; None if the items are not parts of one quantity."""
    quantities = [item for item in items if isinstance(item, Quantity) and units_of(item.unit)]
    units = [units_of(quantity.unit)[0] for quantity in quantities]
    if not len(quantities) == len(items) > 1 or len({unit.dimension for unit in units}) > 1:
        return None
    if any(larger.factor <= smaller.factor for larger, smaller in pairwise(units)):
        return None
    terms = [
        computed("*", (Number(unit.factor / units[0].factor), quantity.value))
        for quantity, unit in zip(quantities, units, strict=True)
    ]
    return Quantity(computed("+", tuple(terms)), quantities[0].unit, None)


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
    r"""Return (3, 4) for `3\mathbf{i}+4\mathbf{j}` if the other form is a vector of the same length; otherwise None."""
    parts = vector_of(vector)
    if parts is None or not isinstance(form, Expression) or not variables(form) <= {*"ijk"[: len(parts)]}:
        return None
    axes = "ijk"[: len(parts)]
    along = [at_point(form, {other: Fraction(other == axis) for other in axes}) for axis in axes]
    total = Apply("+", tuple(Apply("*", (Symbol(axis), part)) for axis, part in zip(axes, along, strict=True)))
    if len(axes) != len(parts) or not same_value(total, form):
        return None
    return [part if (value := exact_value(part)) is None else Number(value) for part in along]


def have_other_units(reference: Form, answer: Form) -> bool:
    """Return whether two quantities have units that cannot be converted to each other."""
    first, second = as_quantity(reference), as_quantity(answer)
    if first is None or second is None or not (first.unit and second.unit):
        return False
    return not any(conversions(a, b) for a in units_of(second.unit) for b in units_of(first.unit))


def converted(value: Expression, way: Conversion) -> Expression:
    """Return a value converted to a different unit."""
    product = value if way.factor == 1 else Apply("*", (Number(way.factor, is_decimal(value)), value))
    return product if way.shift == 0 else Apply("+", (product, Number(way.shift)))
