"""How numbers are told that more than one layer tells.

In: numbers. Out: short text.
"""

from __future__ import annotations

from decimal import Decimal
from math import floor, isfinite, log10


def duration(seconds: float) -> str:
    """Return a time to wait, or one that has passed, as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def plain(value: float, digits: int = 3) -> str:
    """Return a number without an exponent: to so many significant digits, and to no less than the whole number.

    1,120; 40; 12.5; 0.351; 0.0000123.
    """
    if not isfinite(value) or value == 0:
        return f"{value:.0f}"
    decimals = max(digits - 1 - floor(log10(abs(value))), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def exact(value: float) -> str:
    """Return a number as a command takes it: all its digits, no exponent, no separators."""
    return f"{Decimal(repr(float(value))):f}".removesuffix(".0")
