"""The kinds of answers: a value with a unit, a text, a list, a set, a relation, a matrix, a ratio."""

from __future__ import annotations

from typing import NamedTuple

from brorl.verification.domains.formula.expressions import Apply, Expression, Number, Symbol
from brorl.verification.domains.formula.tokens import UnreadableError


class Quantity(NamedTuple):
    """A value with its unit, or with what is counted."""

    value: Expression
    unit: str  # `cm`, `apple`, `°`
    product: Expression | None  # what it is if the unit is read as variables; None if it cannot be


class Text(NamedTuple):
    """Words, or notation that the grammar does not know."""

    words: str


class Bracketed(NamedTuple):
    """A tuple, an interval, or a set with its elements."""

    opening: str
    items: tuple[Form, ...]
    closing: str


class Listing(NamedTuple):
    """Answers side by side, without brackets."""

    items: tuple[Form, ...]
    joint: str  # `,`, `and` or `or`


class Relation(NamedTuple):
    """A chain such as `x = 6 * 7 = 42` or `0 < x < 1`."""

    sides: tuple[Form, ...]
    signs: tuple[str, ...]


class Combined(NamedTuple):
    r"""Sets joined by one of `\cup`, `\cap` and `\setminus`."""

    sign: str
    parts: tuple[Form, ...]


class Matrix(NamedTuple):
    """Rows of cells."""

    rows: tuple[tuple[Form, ...], ...]
    is_array: bool  # a determinant or cases are something else


class Ratio(NamedTuple):
    """`2:3:5`, or a time such as `7:30`."""

    items: tuple[Expression, ...]
    is_time: bool


class Based(NamedTuple):
    """A number in another base than ten: `1011_2`."""

    digits: str
    base: int


Form = Number | Symbol | Apply | Quantity | Text | Bracketed | Listing | Relation | Combined | Matrix | Ratio | Based


def to_expression(form: Form) -> Expression:
    """Return a form that is an expression; letters that may be a unit are variables.

    Raises:
        UnreadableError: If it is another form.
    """
    if isinstance(form, Quantity) and form.product is not None:
        return form.product
    if isinstance(form, Expression):
        return form
    raise UnreadableError("an operation on what is no expression")


def as_quantity(form: Form) -> Quantity | None:
    """Return a quantity, or an expression as one without a unit; None if a form is neither."""
    if isinstance(form, Quantity):
        return form
    return Quantity(form, "", form) if isinstance(form, Expression) else None
