r"""Expressions (numbers, symbols, operations) with their values, and the other forms an answer can take.

    `2x + 1`     Apply("+", (Apply("*", (Number(2), Symbol("x"))), Number(1)))
    `x = 3 cm`   Relation((Symbol("x"), Quantity(Number(3), "cm", ...)), ("=",))

A value is an exact fraction if possible, otherwise an mpmath number of any precision. To limit the work, values whose
logarithm exceeds a bound are not computed.
"""

from __future__ import annotations

import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import ceil, comb, factorial, floor, gcd, isqrt, lcm, prod
from typing import Any, NamedTuple, TypeGuard

import mpmath
from mpmath import mp

from brorl.verification.domains.formula.tokens import UnreadableError

_CAPITALS = re.compile("[A-Z]{2,4}")
_MAX_BITS = 400_000  # for an exact number
_MAX_MAGNITUDE = 10**30  # for the logarithm of a number
_MAX_TERMS = 10_000
_MAX_ARGUMENT, _MAX_FACTORIAL = 5_000, 10**20  # of an exact factorial, and of any factorial


class UndefinedError(ArithmeticError):
    """An expression has no value, or its value cannot be computed."""


class Number(NamedTuple):
    """A number written with digits."""

    value: Fraction
    is_decimal: bool = False


class Symbol(NamedTuple):
    """A variable or a constant, with its marks and subscripts."""

    name: str


class Apply(NamedTuple):
    """An operation on expressions."""

    operation: str
    arguments: tuple[Expression, ...]


Expression = Number | Symbol | Apply
Point = Mapping[str, Any]

LOG = "\\log"  # the implicit base of a logarithm
CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "\\pi": lambda: +mp.pi,
    "e": lambda: +mp.e,
    "\\infty": lambda: mp.inf,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc, "arcsin": mp.asin,
    "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "arcsec": mp.asec, "arccsc": mp.acsc, "asin": mp.asin,
    "acos": mp.acos, "atan": mp.atan, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth,
    "sech": mp.sech, "csch": mp.csch, "arsinh": mp.asinh, "arcsinh": mp.asinh, "arcosh": mp.acosh,
    "arccosh": mp.acosh, "artanh": mp.atanh, "arctanh": mp.atanh, "exp": mp.exp, "ln": mp.ln, "lg": mp.log10,
    "abs": abs, "sqrt": mp.sqrt, "floor": mp.floor, "ceil": mp.ceil, "Re": mp.re, "Im": mp.im, "sgn": mp.sign,
    "sign": mp.sign, "cis": mp.expj, "max": max, "min": min,
}  # fmt: skip
_OF_ALL_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "+": lambda *values: sum(values), "*": lambda *values: prod(values), "/": operator.truediv, "mod": operator.mod,
    "-": operator.neg, "%": lambda value: value / 100, "abs": abs, "max": max, "min": min,
}  # fmt: skip
INTEGER_FUNCTIONS: Mapping[str, Callable[..., int]] = {"gcd": gcd, "lcm": lcm}


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all its parts."""
    todo = [expression]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, Apply):
            todo.extend(part.arguments)


def variables(form: object) -> frozenset[str]:
    """Return the variables of all expressions in a form, except units and logarithm bases."""
    if isinstance(form, Symbol):
        return frozenset() if form.name in CONSTANTS or form.name == LOG else frozenset({form.name})
    parts = (form.value,) if isinstance(form, Quantity) else form if isinstance(form, tuple) else ()
    return frozenset().union(*map(variables, parts))


def has_two_signs(form: object) -> TypeGuard[Apply]:
    """Return whether a form is an expression with a plus-minus sign."""
    return isinstance(form, Apply) and any(
        isinstance(part, Apply) and part.operation in ("\\pm", "\\mp") for part in walk(form)
    )


def with_sign(expression: Expression, sign: int) -> Expression:
    r"""Return an expression with each plus-minus replaced by one sign: `1 \pm x` and -1 give `1 - x`."""
    if not isinstance(expression, Apply):
        return expression
    arguments = tuple(with_sign(argument, sign) for argument in expression.arguments)
    if expression.operation not in ("\\pm", "\\mp"):
        return Apply(expression.operation, arguments)
    is_plus = (sign > 0) == (expression.operation == "\\pm")
    return arguments[0] if is_plus else Apply("-", arguments)


def is_decimal(expression: Expression) -> bool:
    """Return whether an expression is only digits with a decimal point or exponent: `-0.5`, `1e5`, `5.1%`."""
    parts = [*walk(expression)]
    has_digits_alone = all(isinstance(p, Number) or (isinstance(p, Apply) and p.operation in "-*^%") for p in parts)
    return has_digits_alone and any(isinstance(part, Number) and part.is_decimal for part in parts)


def is_numeral(expression: Expression) -> bool:
    r"""Return whether a number has no operation to carry out: `5\%`, `90^\circ`, `\frac{3}{4}`, `2 \times 10^3`.

    `\frac{84}{2}` has one: the division leaves no remainder.
    """
    match expression:
        case Number():
            return True
        case Apply("-" | "%" | "degree", (number,)):
            return is_numeral(number)
        case Apply("/", (Number(top, False), Number(under, False))):
            are_whole = top.denominator == under.denominator == 1
            return are_whole and under != 0 and (top / under).denominator > 1
        case Apply("*", (Number(), Apply("^") as power)) | Apply("/", (Number(_, False), Apply("^") as power)):
            return is_numeral(power)
        case Apply("^", (Number(base), Number(exponent))):
            return base == 10 and exponent.denominator == 1
        case _:
            return False


def exact_value(expression: Expression, point: Point | None = None) -> Fraction | None:
    """Return the value of a rational expression at a point; None for other expressions or values that are too large."""
    try:
        value = _value(expression, point or {})
    except UndefinedError:
        return None
    return value if isinstance(value, Fraction) else None


def computed(operation: str, arguments: tuple[Expression, ...]) -> Expression:
    """Return an operation that is part of the notation, as in `2 h 30 min` or `3:4`: a number, if all arguments are."""
    form = Apply(operation, arguments)
    value = exact_value(form) if all(map(is_numeral, arguments)) else None
    return form if value is None else Number(value, is_decimal(form))


def value_at(expression: Expression, point: Point) -> Any:
    """Return an expression's value at mpmath's working precision. `point` contains the values of its variables.

    Raises an UndefinedError if there is no value or it cannot be computed within the bounds.
    """
    value = _as_mp(_value(expression, point))
    if mp.isnan(value):
        raise UndefinedError("not a number")
    return value


def _as_mp(value: Any) -> Any:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _value(expression: Expression, point: Point) -> Any:
    """Return a value: a fraction if it is rational and not too large, otherwise an mpmath number."""
    try:
        if isinstance(expression, Number):
            return expression.value
        if isinstance(expression, Symbol):
            return point[expression.name] if expression.name in point else CONSTANTS[expression.name]()
        operation, arguments = expression
        if operation in ("sum", "prod"):
            return _series(operation, arguments, point)
        if operation == "call":
            return _call(arguments, point)
        values = [_value(argument, point) for argument in arguments]
        if all(isinstance(value, Fraction) for value in values) and sum(map(_bits, values)) <= _MAX_BITS:
            value = _exact(operation, values)
            if value is not None:
                return value
        return _rounded(operation, values)
    except (ValueError, ZeroDivisionError, OverflowError, TypeError, KeyError, mpmath.libmp.NoConvergence) as error:
        raise UndefinedError(str(error)) from error


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _exact(operation: str, values: list[Fraction]) -> Fraction | None:
    """Return the value of an operation on fractions; None if it is irrational or too large."""
    first, *others = values
    are_whole = all(value.denominator == 1 for value in values)
    match operation:
        case "^":
            return _power(first, others[0])
        case "root":
            return _power(first, 1 / others[0])
        case "sqrt":
            return _power(first, Fraction(1, 2))
        case "!" | "binom":
            is_small = are_whole and 0 <= first <= _MAX_ARGUMENT and min(values) >= 0
            return Fraction((factorial if operation == "!" else comb)(*map(int, values))) if is_small else None
        case "floor" | "ceil":
            return Fraction(floor(first) if operation == "floor" else ceil(first))
        case "gcd" | "lcm":
            return Fraction(INTEGER_FUNCTIONS[operation](*map(int, values))) if are_whole else None
        case _:
            return _OF_ALL_NUMBERS[operation](*values) if operation in _OF_ALL_NUMBERS else None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return an exact power; None if it is irrational or too large."""
    if exponent.denominator == 2 and base >= 0:
        top, under = isqrt(base.numerator), isqrt(base.denominator)
        if top * top != base.numerator or under * under != base.denominator:
            return None
        base, exponent = Fraction(top, under), exponent * 2
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MAX_BITS:
        return None
    return base ** int(exponent)


def _rounded(operation: str, values: list[Any]) -> Any:
    """Return the value of an operation at the working precision."""
    rational = values[-1] if isinstance(values[-1], Fraction) else None
    first, *others = map(_as_mp, values)
    is_negative = mp.im(first) == 0 and mp.re(first) < 0
    match operation:
        case "degree":
            return first * mp.pi / 180
        case "^" if is_negative and rational and rational.denominator > 1 and rational.denominator % 2:
            # An odd root of a negative number is real: (-8)^(1/3) is -2.
            return (-1) ** (rational.numerator % 2) * _raised(-mp.re(first), others[0])
        case "^":
            return _raised(first, others[0])
        case "root":
            is_real = is_negative and others[0] % 2 == 1
            return -mp.root(-first, int(others[0])) if is_real else _raised(first, 1 / others[0])
        case "!":
            if abs(first) > _MAX_FACTORIAL:
                raise UndefinedError("too large")
            return mp.factorial(first)
        case "binom":
            return mp.binomial(first, others[0])
        case "log":
            return mp.log(first) / mp.log(others[0])
        case _:
            return (_OF_ALL_NUMBERS.get(operation) or FUNCTIONS[operation])(first, *others)


def _raised(base: Any, exponent: Any) -> Any:
    if base != 0 and mp.isfinite(base) and mp.isfinite(exponent):
        magnitude = abs(mp.mag(base)) + 1
        if magnitude * (abs(exponent) + 1) > _MAX_MAGNITUDE:
            raise UndefinedError("too large")
    return mp.power(base, exponent)


def _series(operation: str, arguments: tuple[Expression, ...], point: Point) -> Any:
    """Return a sum or product over a variable that runs from one whole number to another."""
    variable, low, high, term = arguments
    first, last = _value(low, point), _value(high, point)
    are_whole = all(isinstance(end, Fraction) and end.denominator == 1 for end in (first, last))
    if not isinstance(variable, Symbol) or not are_whole or last - first >= _MAX_TERMS:
        raise UndefinedError("too many terms, or bounds that are not whole numbers")
    terms = [value_at(term, {**point, variable.name: mp.mpf(k)}) for k in range(int(first), int(last) + 1)]
    return mp.fsum(terms) if operation == "sum" else mp.fprod(terms)


def _call(arguments: tuple[Expression, ...], point: Point) -> Any:
    """Return a value for `f(x)`, an arbitrary but fixed function of x, or for `a(x)`, a product."""
    head, *others = arguments
    assert isinstance(head, Symbol)
    values = [value_at(other, point) for other in others]
    if (head.name in point or head.name in CONSTANTS) and len(values) == 1 and head.name[0] not in "fgh":
        return value_at(head, point) * values[0]
    if head.name == "C" and len(values) == 2:
        return mp.binomial(*values)
    seed = zlib.crc32(head.name.encode())
    return mp.fsum(mp.cos(value * (1 + seed % 97) / 50 + seed % (89 + k)) + 2 * value for k, value in enumerate(values))


class Quantity(NamedTuple):
    """A value with its unit or counted noun."""

    value: Expression
    unit: str  # `cm`, `apple`, `°`
    product: Expression | None  # `3 m` as 3 times the variable m; None if the unit cannot be read as variables
    words: str = ""  # the words after the unit: `east`, `of NaOH`


class Text(NamedTuple):
    """Words, or notation that the grammar cannot read."""

    words: str
    is_text: bool = True  # an extra field, so a `Text` never equals a `Symbol` as a cache key


class Bracketed(NamedTuple):
    """A tuple, an interval, or a set with its elements."""

    opening: str
    items: tuple[Form, ...]
    closing: str


class Listing(NamedTuple):
    """Several answers, without brackets."""

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
    is_array: bool  # false for a determinant or cases


class Ratio(NamedTuple):
    """`2:3:5`, or a time such as `7:30`."""

    items: tuple[Expression, ...]
    is_time: bool


class Based(NamedTuple):
    """A number in a base other than ten: `1011_2`."""

    digits: str
    base: int


class Residue(NamedTuple):
    r"""A number up to multiples of a modulus: `3 \pmod 7`."""

    value: Expression
    modulus: Expression


Form = (
    Number
    | Symbol
    | Apply
    | Quantity
    | Text
    | Bracketed
    | Listing
    | Relation
    | Combined
    | Matrix
    | Ratio
    | Based
    | Residue
)


def to_expression(form: Form) -> Expression:
    """Return a form as an expression, with letters in units or capitals (`RT`) as variables.

    Raises an UnreadableError if the form is not an expression.
    """
    if isinstance(form, Text) and _CAPITALS.fullmatch(form.words):
        return product_of(form.words)
    if isinstance(form, Quantity) and form.product is not None:
        return form.product
    if isinstance(form, Expression):
        return form
    raise UnreadableError("an operation on a form that is not an expression")


def product_of(letters: str) -> Expression:
    """Return `ab` as a times b."""
    return Apply("*", tuple(map(Symbol, letters)))


def as_quantity(form: Form) -> Quantity | None:
    """Return a quantity, or an expression as a quantity without a unit; None for other forms."""
    if isinstance(form, Quantity):
        return form
    return Quantity(form, "", form) if isinstance(form, Expression) else None
