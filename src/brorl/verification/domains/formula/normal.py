"""Brings forms that say the same into one form: sets of one member, two signs, lists of named values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from brorl.verification.domains.formula.expressions import (
    Apply,
    Expression,
    Number,
    Symbol,
    has_two_signs,
    walk,
    with_sign,
)
from brorl.verification.domains.formula.forms import (
    Bracketed,
    Form,
    Listing,
    Matrix,
    Quantity,
    Relation,
    is_expression,
    to_expression,
)
from brorl.verification.domains.formula.names import EQUAL, named, variables_of, vector_of
from brorl.verification.domains.formula.regions import region_of
from brorl.verification.domains.formula.values import same_value
from brorl.verification.domains.formula.words import unit_of


@lru_cache(maxsize=4096)
def normal(form: Form) -> Form:
    """Return a form without sets of one member, without two signs, and without names that stand before each member."""
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
    if isinstance(form, Listing):
        return _normal_listing(form)
    if isinstance(form, Relation):
        values = [side for side in form.sides if is_expression(side) and has_two_signs(to_expression(side))]
        if values and len(form.sides) == 2 and named(form):
            return normal(form.sides[1])
    if is_expression(form) and has_two_signs(to_expression(form)):
        return Listing((with_sign(to_expression(form), 1), with_sign(to_expression(form), -1)), "or")
    if isinstance(form, Quantity) and has_two_signs(form.value):
        return Listing(tuple(form._replace(value=with_sign(form.value, sign)) for sign in (1, -1)), "or")
    return form


def _normal_set(form: Bracketed) -> Form:
    items: list[Form] = []
    for item in form.items:
        one = normal(item)
        items.extend(one.items if isinstance(one, Listing) and is_expression(item) else [item])
    if len(items) == 1 and not isinstance(items[0], Bracketed):
        return normal(items[0])
    return form._replace(items=tuple(items))


def _normal_listing(form: Listing) -> Form:
    items: list[Form] = []
    written = [item for item in form.items if not _is_side_condition(item, form)]
    if len(written) == 1:
        return normal(written[0])
    for item in written:
        one = normal(item)
        items.extend(one.items if isinstance(one, Listing) and item != one else [item])
    names = [named(item) if isinstance(item, Relation) and len(item.sides) == 2 else None for item in items]
    heads = {name[0].split("_")[0] for name in names if name}
    are_named = all(name or not isinstance(item, Relation) for name, item in zip(names, items, strict=True))
    if names[0] and len(heads) == 1 and are_named:
        items = [name[1] if name else item for name, item in zip(names, items, strict=True)]
    total = _total(items) if form.joint != "or" else None
    return total or Listing(tuple(items), form.joint)


def _total(items: Sequence[Form]) -> Quantity | None:
    """Return `2 hours and 30 minutes` in the first unit; None if the items are no such parts of one quantity."""
    parts = [(item, unit_of(item.unit)) for item in items if isinstance(item, Quantity)]
    units = [unit for _, unit in parts if unit is not None]
    if not len(units) == len(items) > 1 or len({unit.dimension for unit in units}) > 1:
        return None
    if any(one.factor <= other.factor for one, other in pairwise(units)):
        return None
    first = units[0].factor
    terms = [
        Apply("*", (Number(unit.factor / first), part.value)) for (part, _), unit in zip(parts, units, strict=True)
    ]
    return Quantity(Apply("+", tuple(terms)), parts[0][0].unit, None)


def _is_side_condition(item: Form, form: Listing) -> bool:
    r"""Whether an item says in which numbers a variable of another item lies: `k \in \mathbb{Z}`."""
    if not (isinstance(item, Relation) and item.signs == ("\\in",) and isinstance(item.sides[1], Symbol)):
        return False
    others = [other for other in form.items if other is not item]
    variable = variables_of(item.sides[0])
    return item.sides[1].name.startswith("\\mathbb") and any(variable & variables_of(one) for one in others)


def members_of(form: Form) -> Sequence[Form] | None:
    """Return the members of a set or of a list without brackets; None if it is neither."""
    if isinstance(form, Listing) or (isinstance(form, Bracketed) and form.opening == "\\{"):
        return form.items
    return None


def percent_of(expression: Expression) -> Expression | None:
    """Return a percentage without its sign; None if it is none."""
    if isinstance(expression, Apply) and expression.operation == "%":
        return expression.arguments[0]
    if isinstance(expression, Apply) and expression.operation == "-" and (inner := percent_of(expression.arguments[0])):
        return Apply("-", (inner,))
    return None


def at_point(expression: Expression, point: dict[str, Fraction]) -> Expression:
    """Return an expression with values for its variables, as a function of new ones."""
    if isinstance(expression, Symbol):
        return Number(point[expression.name]) if expression.name in point else expression
    if isinstance(expression, Apply):
        head = expression.arguments[:1] if expression.operation == "call" else ()
        others = expression.arguments[len(head) :]
        return Apply(expression.operation, (*head, *(at_point(one, point) for one in others)))
    return expression


def along_axes(form: Form, vector: Form) -> Sequence[Form] | None:
    r"""Return the parts of `3\mathbf{i}+4\mathbf{j}` if the other form is a vector; None if it is no such sum."""
    parts = vector_of(vector)
    if parts is None or not is_expression(form) or not variables_of(form) <= {*"ijk"[: len(parts)]}:
        return None
    expression, axes = to_expression(form), "ijk"[: len(parts)]
    along = [at_point(expression, {axis: Fraction(axis == one) for axis in axes}) for one in axes]
    total = Apply("+", tuple(Apply("*", (Symbol(axis), part)) for axis, part in zip(axes, along, strict=True)))
    return along if len(axes) == len(parts) and same_value(total, expression) else None


def with_constant(right: Expression, given: Expression) -> Expression:
    """Return an answer whose constant of integration, c or K, is the C of the reference."""
    terms = [one.arguments if isinstance(one, Apply) and one.operation == "+" else () for one in (right, given)]
    constant = next((one for one in terms[1] if one in (Symbol("c"), Symbol("K"), Symbol("k"))), None)
    if Symbol("C") not in terms[0] or constant is None or Symbol("C") in walk(given) or constant in walk(right):
        return given
    return Apply("+", tuple(Symbol("C") if one == constant else one for one in terms[1]))
