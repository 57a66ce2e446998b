r"""Sets of real numbers: intervals, inequalities and unions of them, and what is left without some numbers.

A region is a sorted list of pieces between cuts. A cut lies before or after a number, so `(0,1]` reaches from after 0
to after 1. Numbers alone are pieces from before to after themselves.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

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

_INFINITY = Symbol("\\infty")
_ALL = frozenset(
    {"all real numbers", "all reals", "any real number", "real numbers", "every real number", "all real x"}
)
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


class Cut(NamedTuple):
    """A place beside a number."""

    value: Any  # of mpmath
    after: bool
    number: Expression

    def key(self) -> tuple[Any, bool]:
        """Return what cuts are sorted by."""
        return self.value, self.after


class Region(NamedTuple):
    """Pieces of the real line, and the variable that lies in them, if it is named."""

    pieces: tuple[tuple[Cut, Cut], ...]
    variable: str | None


def _cut(number: Expression, after: bool) -> Cut:
    value = order_key(number)
    if value is None:
        raise ValueError("no number")
    return Cut(value, after, number)


_LOW = _cut(Apply("-", (_INFINITY,)), False)
_HIGH = _cut(_INFINITY, True)
_LINE = ((_LOW, _HIGH),)


def region_of(form: Form) -> Region | None:
    """Return the region that a form describes; None if it describes none."""
    try:
        region = _region(form)
    except ValueError:
        return None
    if region is None or (isinstance(form, Bracketed) and form.opening == "\\{"):
        return None
    return Region(_united(region.pieces), region.variable)


def _region(form: Form) -> Region | None:
    match form:
        case Symbol("\\mathbb{R}"):
            return Region(_LINE, None)
        case Text(words) if words.casefold() in _ALL:
            return Region(_LINE, None)
        case Bracketed("\\{:", (condition,), _):
            inner = _region(condition)
            return inner and inner._replace(variable=None)
        case Bracketed(opening, items, closing):
            return _of_brackets(opening, items, closing)
        case Relation(sides, signs):
            return _of_relation(sides, signs)
        case Combined(sign, parts):
            return _combine(sign, [_region(part) for part in parts])
        case Listing(items, joint) if all(isinstance(item, Relation) for item in items):
            regions = [_region(item) for item in items]
            if joint == ",":
                both = _combine("\\cap", regions)
                return both if both and both.pieces else _combine("\\cup", regions)
            return _combine("\\cap" if joint == "and" else "\\cup", regions)
        case _:
            return None


def _of_brackets(opening: str, items: tuple[Form, ...], closing: str) -> Region | None:
    if opening == "\\{":
        numbers = [item for item in items if isinstance(item, Expression)]
        pieces = tuple((_cut(number, False), _cut(number, True)) for number in numbers)
        return Region(pieces, None) if len(numbers) == len(items) else None
    if len(items) != 2 or not all(isinstance(item, Expression) for item in items) or opening not in "([":
        return None
    if (opening == "[" and _is_infinite(items[0])) or (closing == "]" and _is_infinite(items[1])):
        return None
    return Region(((_bound(items[0], opening == "("), _bound(items[1], closing == "]")),), None)


def _is_infinite(number: Form) -> bool:
    return _cut(to_expression(number), False).value in (_LOW.value, _HIGH.value)


def _bound(number: Form, after: bool) -> Cut:
    cut = _cut(to_expression(number), after)
    return _LOW if cut.value == _LOW.value else _HIGH if cut.value == _HIGH.value else cut


def _of_relation(sides: tuple[Form, ...], signs: tuple[str, ...]) -> Region | None:
    if signs == ("\\in",) and (name := _variable_of(sides[0])):
        inner = _region(sides[1])
        return inner and inner._replace(variable=name)
    are_expressions = all(isinstance(side, Expression) for side in sides)
    if are_expressions and any(map(has_two_signs, sides)):
        both = [_of_relation(tuple(with_sign(to_expression(s), sign) for s in sides), signs) for sign in (1, -1)]
        return _combine("\\cap" if signs == ("\\ne",) else "\\cup", both)
    places = [at for at, side in enumerate(sides) if _variable_of(side) or _inside_bars(side)]
    if len(places) != 1 or not set(signs) <= TURNED.keys() or not are_expressions:
        return None
    (at,), parts = places, list[Region | None]()
    directions = {{"\\le": "<", "\\ge": ">"}.get(sign, sign) for sign in signs}
    if len(sides) > 2 and (at in (0, len(sides) - 1) or len(directions) > 1):
        return None
    for place, side in enumerate(sides):
        if place != at:
            sign = signs[at] if place > at else TURNED[signs[place]]
            if letter := _inside_bars(sides[at]):
                parts.append(_of_absolute_value(letter, sign, to_expression(side)))
            else:
                parts.append(Region(_half(sign, to_expression(side)), _variable_of(sides[at])))
    return _combine("\\cap", parts)


def _variable_of(side: Form) -> str | None:
    """Return the name of what lies in a region: `x` or `f(x)`; None if a side is no such name."""
    return name_of(side) if is_call(side) or isinstance(side, Symbol) else None


def _inside_bars(side: Form) -> Symbol | None:
    """Return the x of `|x|`; None if a side is something else."""
    match side:
        case Apply("abs", (Symbol() as inner,)) if _variable_of(inner):
            return inner
    return None


def _of_absolute_value(inner: Symbol, sign: str, size: Expression) -> Region | None:
    """Return the region of `|x| < 2`."""
    value = order_key(size)
    if value is None or value < 0 or sign not in ("<", "\\le", ">", "\\ge"):
        return None
    parts = [Region(_half(sign, size), inner.name), Region(_half(TURNED[sign], Apply("-", (size,))), inner.name)]
    return _combine("\\cap" if sign in ("<", "\\le") else "\\cup", list(parts))


def _half(sign: str, number: Expression) -> tuple[tuple[Cut, Cut], ...]:
    before, after = _cut(number, False), _cut(number, True)
    return {
        "<": ((_LOW, before),),
        "\\le": ((_LOW, after),),
        ">": ((after, _HIGH),),
        "\\ge": ((before, _HIGH),),
        "\\ne": ((_LOW, before), (after, _HIGH)),
        "=": ((before, after),),
    }[sign]


def _combine(sign: str, parts: list[Region | None]) -> Region | None:
    regions = [part for part in parts if part is not None]
    names = {region.variable for region in regions} - {None}
    if len(regions) < len(parts) or len(names) > 1 or not regions:
        return None
    pieces = [_united(region.pieces) for region in regions]
    if sign == "\\cup":
        joined = _united(tuple(piece for region in pieces for piece in region))
    elif sign == "\\cap":
        joined = reduce(_common, pieces)
    else:
        joined = reduce(lambda one, other: _common(one, _complement(other)), pieces)
    return Region(joined, next(iter(names), None))


def _united(pieces: tuple[tuple[Cut, Cut], ...]) -> tuple[tuple[Cut, Cut], ...]:
    """Return sorted pieces of which none touch."""
    united: list[tuple[Cut, Cut]] = []
    for low, high in sorted(pieces, key=lambda piece: piece[0].key()):
        if low.key() >= high.key():
            continue
        if united and low.key() <= united[-1][1].key():
            united[-1] = (united[-1][0], max(united[-1][1], high, key=Cut.key))
        else:
            united.append((low, high))
    return tuple(united)


def _common(one: tuple[tuple[Cut, Cut], ...], other: tuple[tuple[Cut, Cut], ...]) -> tuple[tuple[Cut, Cut], ...]:
    return _united(tuple((max(a, c, key=Cut.key), min(b, d, key=Cut.key)) for a, b in one for c, d in other))


def _complement(pieces: tuple[tuple[Cut, Cut], ...]) -> tuple[tuple[Cut, Cut], ...]:
    cuts = [_LOW, *(cut for piece in pieces for cut in piece), _HIGH]
    return _united(tuple(zip(cuts[::2], cuts[1::2], strict=True)))


def turned(relation: Relation) -> Relation:
    """Return a chain of relations from its end."""
    signs = tuple(TURNED.get(sign, sign) for sign in reversed(relation.signs))
    return Relation(relation.sides[::-1], signs)


def is_equation(form: Form) -> bool:
    """Whether a form is an equation, or a list of them."""
    if isinstance(form, Listing):
        return all(map(is_equation, form.items))
    return isinstance(form, Relation) and "=" in form.signs
