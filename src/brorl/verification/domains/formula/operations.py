"""Signs, products and arguments of forms that the grammar reads: most need expressions, a product allows a vector."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from brorl.verification.domains.formula.expressions import (
    Apply,
    Bracketed,
    Expression,
    Form,
    Matrix,
    Number,
    Quantity,
    Text,
    computed,
    to_expression,
)
from brorl.verification.domains.formula.tokens import UnreadableError


def arguments_in(form: Form) -> tuple[Expression, ...]:
    """Return the arguments in brackets: 1 and 2 for `(1, 2)`, x for `(x)`."""
    is_list = isinstance(form, Bracketed) and form.items and form.closing in (")", "\\}")
    return tuple(map(to_expression, form.items if isinstance(form, Bracketed) and is_list else (form,)))


def signed_form(sign: str, form: Form) -> Form:
    """Return a form with a sign before it."""
    if sign == "+":
        return form
    if sign == "-":
        if isinstance(form, Number):
            return Number(-form.value, form.is_decimal)
        if isinstance(form, Quantity):
            return form._replace(value=Apply("-", (form.value,)), product=form.product and Apply("-", (form.product,)))
        return Apply("-", (form,)) if isinstance(form, Expression) else scaled([Number(Fraction(-1)), form])
    return Apply(sign, (to_expression(form),))


def multiplied(factors: Sequence[Form]) -> Expression:
    """Return a product of expressions; UnreadableError if a factor is not an expression."""
    expressions = tuple(map(to_expression, factors))
    return expressions[0] if len(expressions) == 1 else Apply("*", expressions)


def scaled(factors: Sequence[Form]) -> Form:
    """Return a product, in which one factor may be a matrix or vector."""
    factors = [to_expression(factor) if isinstance(factor, Text) else factor for factor in factors]
    others = [factor for factor in factors if not isinstance(factor, Expression)]
    scalars = [factor for factor in factors if isinstance(factor, Expression)]
    if not others:
        return multiplied(factors)
    scalar, (form, *more) = multiplied(scalars or [Number(Fraction(1))]), others
    if isinstance(form, Matrix) and form.is_array and not more:
        rows = (tuple(computed("*", (scalar, to_expression(cell))) for cell in row) for row in form.rows)
        return Matrix(tuple(rows), True)
    is_vector = isinstance(form, Bracketed) and form.closing in (")", "\\rangle") and form.opening != "["
    if isinstance(form, Bracketed) and is_vector and factors[-1] is form and not more:
        return form._replace(items=tuple(computed("*", (scalar, to_expression(item))) for item in form.items))
    raise UnreadableError("a product with a form that is not an expression")
