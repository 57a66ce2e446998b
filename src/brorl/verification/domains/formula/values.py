"""Compares the values of two expressions: exactly, at random points, or to the digits of a decimal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor, inf, log10
from typing import Any

from mpmath import mp

from brorl.verification.domains.formula.expressions import (
    INTEGER_FUNCTIONS,
    LOG,
    Apply,
    Expression,
    Number,
    Symbol,
    UndefinedError,
    exact_value,
    is_decimal,
    is_numeral,
    value_at,
    variables,
    walk,
)
from brorl.verification.domains.formula.points import WHOLE_NUMBERS, at_changes, may_be_complex, near_zero

IMAGINARY = "i"
_DIGITS, _MANY_DIGITS, _DIGITS_AT_POINTS = 40, 600, 120
_SMALL = Fraction(1, 1000)  # below this, rounding to six decimals leaves fewer than three digits
_HALF_UNIT = Fraction(1, 2) + Fraction(1, 10**9)  # in units of the third digit
_ZERO = mp.mpf(10) ** -35
_CLEAR, _TINY = mp.mpf(10) ** -12, mp.mpf(10) ** -20
_INFINITE_PARTS = 2  # only a sign and infinity, no arithmetic with infinity


def same_value(reference: Expression, answer: Expression, is_complex: bool = False) -> bool:
    """Return whether expressions are equal wherever the first is real. With `is_complex`, i is the imaginary unit."""
    fixed = {IMAGINARY: mp.mpc(0, 1)} if is_complex else {}
    names = sorted((variables(reference) | variables(answer)) - fixed.keys())
    for base in [mp.e, mp.mpf(10)] if Symbol(LOG) in (*walk(reference), *walk(answer)) else [mp.e]:
        try:
            point = {**fixed, LOG: base}
            if _same_at_points(reference, answer, names, point) if names else _same_number(reference, answer, point):
                return True
        except UndefinedError:
            pass
    return False


def is_evaluated(numeral: Expression, answer: Expression, is_complex: bool) -> bool:
    r"""Return whether an answer that agrees with a numeral has no operation to carry out.

    An exact value such as `2\sqrt{3}`, of which the numeral `3.464102` is a rounding, has none either.
    """
    value = exact_value(numeral)
    return is_numeral(answer) or not same_value(numeral if value is None else Number(value), answer, is_complex)


def _same_number(reference: Expression, answer: Expression, fixed: Mapping[str, Any]) -> bool:
    """Return whether numbers are equal, or one is the other rounded to six decimals (below 1/1000: to three digits)."""
    reference, answer = _without_common_terms(reference, answer)
    values = [exact_value(reference), exact_value(answer)]
    decimals = [is_decimal(reference), is_decimal(answer)]
    if values[0] == values[1] if None not in values else _equal(reference, answer, fixed, _MANY_DIGITS):
        return True
    if not any(decimals):
        return False
    with mp.workdps(_DIGITS):
        pairs = zip(values, (reference, answer), strict=True)
        first, second = (_as_decimal(value_at(form, fixed)) if value is None else value for value, form in pairs)
    is_whole = [value.denominator == 1 for value in (first, second)]
    if 0 in (first, second) or (is_whole[0] and not decimals[0]) or (is_whole[1] and not decimals[1]):
        return False
    if abs(first) < _SMALL:
        return abs(first - second) <= _HALF_UNIT * Fraction(10) ** (_exponent(min(abs(first), abs(second))) - 2)
    return round(first * 10**6) == round(second * 10**6)


def _without_common_terms(reference: Expression, answer: Expression) -> tuple[Expression, Expression]:
    """Remove terms shared by two sums, because large ones can hide the rest in rounding errors."""
    terms = [
        [*form.arguments] if isinstance(form, Apply) and form.operation == "+" else [form]
        for form in (reference, answer)
    ]
    if max(map(len, terms)) == 1:
        return reference, answer
    for term in [*terms[0]]:
        if term in terms[1]:
            terms[0].remove(term)
            terms[1].remove(term)
    first, second = (Apply("+", tuple(left)) if left else Number(Fraction(0)) for left in terms)
    return first, second


def _as_decimal(value: Any) -> Fraction:
    """Return a real number rounded to 30 digits; UndefinedError if it is not real, or too large for a decimal."""
    size = abs(value)
    if abs(mp.im(value)) > _ZERO or size > mp.mpf(10) ** 300 or 0 < size < mp.mpf(10) ** -300:
        raise UndefinedError("not a decimal")
    return Fraction(mp.nstr(mp.re(value), 30)) if size > _ZERO else Fraction(0)


def _exponent(value: Fraction) -> int:
    """Return the power of ten of a positive number's first digit: -2 for 0.05."""
    power = floor((value.numerator.bit_length() - value.denominator.bit_length()) * log10(2)) + 1
    while Fraction(10) ** power > value:
        power -= 1
    return power


def _same_at_points(reference: Expression, answer: Expression, names: list[str], fixed: Mapping[str, Any]) -> bool:
    """Return whether two formulas are equal at random points and on each side of every break."""
    are_whole = any(isinstance(part, Apply) and part.operation in INTEGER_FUNCTIONS for part in walk(reference))
    whole = {name for name in names if are_whole or (name[0] in WHOLE_NUMBERS and IMAGINARY not in fixed)}
    parts = [reference, *may_be_complex(reference)]
    agree: dict[bool, list[bool]] = {True: [], False: []}  # keyed by whether the reference is real at a point
    for near in near_zero(names, whole):
        point = {**fixed, **near}
        if (is_real := _is_real(parts, point)) is None:
            continue
        try:
            agree[is_real].append(_equal(reference, answer, point, _DIGITS_AT_POINTS))
        except UndefinedError:
            agree[is_real].append(False)
        if is_real and not agree[True][-1]:
            return False
    if IMAGINARY in fixed:
        return _all(agree[True])
    points = ({**fixed, **beside} for beside in at_changes((reference, answer), names, whole, fixed))
    if agree[True]:
        return not any(_differ(reference, answer, point) and _is_real(parts, point) for point in points)
    real = [_equal_or_gap(reference, answer, point) for point in points if _is_real(parts, point)]
    compared = [equal for equal in real if equal is not None]
    return _all(compared or agree[False])


def _all(compared: list[bool]) -> bool:
    return bool(compared) and all(compared)


def _differ(reference: Expression, answer: Expression, point: Mapping[str, Any]) -> bool:
    """Return whether values clearly differ. Far from 0, a formula may lose digits and an answer may have gaps."""
    with mp.workdps(_DIGITS):
        try:
            first, second = value_at(reference, point), value_at(answer, point)
        except UndefinedError:
            return False
        size = max(abs(first), abs(second))
        return bool(mp.isfinite(size) and size > _TINY and abs(first - second) > size * _CLEAR)


def _equal_or_gap(reference: Expression, answer: Expression, point: Mapping[str, Any]) -> bool | None:
    """Return whether two values are equal; None if either is infinite or undefined, such as at a removable pole."""
    try:
        with mp.workdps(_DIGITS):
            are_finite = mp.isfinite(value_at(reference, point)) and mp.isfinite(value_at(answer, point))
        return _equal(reference, answer, point, _DIGITS_AT_POINTS) if are_finite else None
    except UndefinedError:
        return None


def _is_real(parts: Sequence[Expression], point: Mapping[str, Any]) -> bool | None:
    r"""Return whether an expression (the first part) and its roots are real at a point; None if there is no value.

    `\sqrt{x-10}\sqrt{x-12}` is not real at 0, although the product of its two imaginary factors is.
    """
    if IMAGINARY in point:
        return True
    with mp.workdps(_DIGITS):
        for part in parts:
            try:
                if mp.im(value_at(part, point)) != 0:
                    return False
            except UndefinedError:
                if part is parts[0]:
                    return None
    return True


def _equal(reference: Expression, answer: Expression, point: Mapping[str, Any], digits: int) -> bool:
    """Return whether two values stay equal, apart from rounding, when computed with more digits."""
    with mp.workdps(_DIGITS):
        first, second = value_at(reference, point), value_at(answer, point)
        if mp.isinf(first) or mp.isinf(second):
            return bool(first == second) and len([*walk(answer)]) <= _INFINITE_PARTS
        coarse, size = abs(first - second), max(abs(first), abs(second))
        if coarse > size * _CLEAR and size > _TINY:
            return False
    with mp.workdps(digits):
        first, second = value_at(reference, point), value_at(answer, point)
        fine, size = abs(first - second), max(abs(first), abs(second))
        if fine == 0 or fine <= size * mp.mpf(10) ** int(-0.8 * digits):
            return True
        return bool(fine <= coarse * mp.mpf(10) ** int(-0.7 * (digits - _DIGITS)))


def within(reference: Expression, answer: Expression, tolerance: Fraction, are_counts: bool) -> bool | None:
    """Return whether numbers agree within a relative tolerance (whole counts: exactly); None if one has no value."""
    first, second = _value(reference, mp.mpf(10)), _value(answer, mp.mpf(10))
    if first is None or second is None:
        return None
    exact, other_exact = exact_value(reference), exact_value(answer)
    if exact is not None and other_exact is not None:
        tolerance = Fraction(0) if are_counts and exact.denominator == other_exact.denominator == 1 else tolerance
        return abs(exact - other_exact) <= tolerance * abs(exact)
    with mp.workdps(_DIGITS):
        most = abs(first) * tolerance.numerator / tolerance.denominator
        return bool(mp.isfinite(first) and mp.isfinite(second) and abs(first - second) <= most)


def is_rounded(precise: Expression, decimal: Expression) -> bool:
    r"""Return whether a decimal is a number truncated or rounded to that many digits: `\pi \approx 3.14`."""
    exact, rounded = _value(precise), _value(decimal)
    if exact is None or rounded is None:
        return False
    value = exact_value(decimal)
    with mp.workdps(_DIGITS):
        difference, size = abs(exact - rounded), abs(rounded)
        if value is None or value == 0 or isinstance(decimal, Apply):
            return bool(difference <= size / 100)
        first = -floor(mp.log10(size)) if value.denominator == 1 else 0
        places = next((k for k in range(first, 60) if (value * Fraction(10) ** k).denominator == 1), 60)
        unit = mp.mpf(10) ** -places
        return bool(difference <= unit / 2 or (difference < unit and size <= abs(exact)))


def order_key(expression: Expression) -> Any:
    """Return a number's real value as a sort key; None if there is none."""
    value = _value(expression)
    return None if value is None or mp.im(value) != 0 else mp.re(value)


def place_of(form: object) -> tuple[float, ...]:
    """Return a sort key for forms: the values of their expressions, to ten digits, at a fixed point."""
    if isinstance(form, Number | Symbol | Apply):
        point = {name: Fraction(100 + sum(name.encode()), 83) for name in variables(form)}
        try:
            value = complex(value_at(form, {LOG: mp.e, **point}))
        except (UndefinedError, OverflowError):
            return (inf,)
        return float(f"{value.real:.9e}"), float(f"{value.imag:.9e}")
    parts = form if isinstance(form, tuple) else ()
    return tuple(key for part in parts for key in place_of(part))


def _value(expression: Expression, base: Any = mp.e) -> Any:
    """Return an expression's value, with `base` for plain logarithms; None if it has variables or no value."""
    with mp.workdps(_DIGITS):
        try:
            return None if variables(expression) else value_at(expression, {LOG: +base})
        except UndefinedError:
            return None


def at_point(expression: Expression, point: dict[str, Fraction]) -> Expression:
    """Replace an expression's variables with their values at a point: `x + y` at x = 2 is `2 + y`."""
    if isinstance(expression, Symbol):
        return Number(point[expression.name]) if expression.name in point else expression
    if isinstance(expression, Apply):
        head = expression.arguments[:1] if expression.operation == "call" else ()
        rest = expression.arguments[len(head) :]
        return Apply(expression.operation, (*head, *(at_point(argument, point) for argument in rest)))
    return expression


def is_multiple(reference: Expression, answer: Expression, is_positive: bool, is_complex: bool) -> bool:
    """Return whether one expression is a constant times the other."""
    point = {name: Fraction(1_009 + 97 * k, 613) for k, name in enumerate(sorted(variables(reference)))}
    try:
        ratio = value_at(answer, point) / value_at(reference, point)
    except (UndefinedError, ZeroDivisionError, KeyError):
        return False
    if ratio == 0 or (is_positive and not ratio > 0):
        return False
    first = Apply("*", (reference, at_point(answer, point)))
    second = Apply("*", (answer, at_point(reference, point)))
    return same_value(first, second, is_complex)
