"""Numbers as they are written: `1.5e8`, `1011_2`, `5th`, `0.333...`; each refuses digits that it cannot read."""

from __future__ import annotations

from fractions import Fraction

from brorl.verification.domains.formula.expressions import Based, Form, Number
from brorl.verification.domains.formula.tokens import UnreadableError
from brorl.verification.domains.formula.words import NUMERALS


def number_of(text: str) -> Number:
    """Return the number of digits with a point or an exponent: `1.5e8`."""
    mantissa, _, power = text.lower().partition("e")
    if abs(int(power or 0)) > 4_000:
        raise UnreadableError("too large")
    mantissa = mantissa.removesuffix(".")
    return Number(Fraction(mantissa) * Fraction(10) ** int(power or 0), not text.removesuffix(".").isdigit())


def based_of(digits: str, base: str) -> Form:
    """Return a number in a base, `1011_2` or `1011_{two}`; in base ten, an ordinary number."""
    base = base.strip("()").removeprefix("base")
    if not (base.isdigit() or base in NUMERALS) or not digits.isdigit():
        raise UnreadableError("no base")
    radix = int(base[:3]) if base.isdigit() else NUMERALS[base]
    return number_of(digits) if radix == 10 else Based(digits, radix)


def ordinal_of(number: Number, suffix: str) -> Number:
    """Return the number of `5th`."""
    last = int(number.value) % 100
    ending = "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(last % 10, "th")
    if number.value.denominator != 1 or suffix != ending:
        raise UnreadableError("no ordinal")
    return Number(number.value)


def repeating_of(text: str, period: str) -> Number:
    """Return the number whose last digits repeat: `0.3` and `3` give a third."""
    whole, _, fixed = text.partition(".")
    if not period.isdigit() or "e" in text.lower():
        raise UnreadableError("no period of digits")
    under = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Number(Fraction(int(whole + fixed + period) - int(whole + fixed), under))
