"""A built-in tool for arithmetic, exact on integers. Models write the input, so its size and time are limited."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from math import isfinite

_MAX_CHARACTERS = 1_000
_MAX_BITS = 4_096  # bits of an integer: 1,233 digits
_WRITE = "write numbers, + - * / // % ** and parentheses"
_TOO_LARGE = "the result is too large"
_Number = int | float


def calculator(expression: str) -> int | float:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as (17 + 4) * 2.

    Returns:
        The value; exact if all numbers are integers and divisions leave no remainder.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {_MAX_CHARACTERS:,} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"not an arithmetic expression; {_WRITE}") from None
    return _value(tree.body)


def _value(node: ast.AST) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.BinOp(_, ast.BitXor(), _):
            raise ValueError("write a power as **, not ^")
        case ast.Tuple():
            raise ValueError("write numbers without commas")
        case _:
            raise ValueError(f"only arithmetic can be computed; {_WRITE}")


def _quotient(left: _Number, right: _Number) -> _Number:
    """Divide. Integer division without a remainder stays exact."""
    is_exact = isinstance(left, int) and isinstance(right, int) and right and not left % right
    return left // right if is_exact else left / right


def _power(base: _Number, exponent: _Number) -> _Number:
    """Return a power after checking its size: computing a huge one would take hours."""
    is_integer = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if is_integer and int(base).bit_length() * exponent > 2 * _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    try:
        power = base**exponent
    except OverflowError:
        raise OverflowError(_TOO_LARGE) from None
    if isinstance(power, complex):
        raise ValueError("the power of a negative number with a fraction as exponent is not a real number")
    return power


_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip


def _bounded(value: _Number) -> _Number:
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not isfinite(value):
        raise OverflowError(_TOO_LARGE)
    return value
