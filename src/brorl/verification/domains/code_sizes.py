"""The largest text of a correct value: how much of an answer's reply is worth reading.

In: an expected value. Out: a bound of the size of all texts, as `values` encodes them, of values that equal it.
"""

from __future__ import annotations

from brorl.verification.sandbox.values import Size, encode, size_of

# The longest texts, see `values`: of the brackets of a container, of a complex number, of the largest float as integer.
_BRACKETS, _COMPLEX_BYTES, _LARGEST_FLOAT_BYTES = 8, 64, 280
_COMPLEX_PARTS = 2
_SMALL = 1 << 64


def is_number(value: object) -> bool:
    """Whether a value is compared as a number: a bool is none."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def largest_size(expected: object) -> Size:
    """Return a bound of the size of all values that `ValueRule.same` can accept.

    A number has other forms: 1e300 equals an integer of 300 digits, and 2 a complex number. A list can be a tuple. All
    other values are written in one way.
    """
    if isinstance(expected, list | tuple | set | frozenset | dict):
        items = [one for pair in expected.items() for one in pair] if isinstance(expected, dict) else expected
        sizes = [largest_size(item) for item in items]
        between = 2 if isinstance(expected, dict) else 1  # a comma; of a dict also the brackets and the comma of a pair
        num_bytes, num_parts = (sum(counts) for counts in zip((0, 0), *sizes, strict=True))
        return Size(_BRACKETS + num_bytes + between * len(sizes), 1 + num_parts + between * len(sizes))
    if not is_number(expected):
        return size_of(encode(expected).encode())
    is_small = isinstance(expected, int | float) and abs(expected) < _SMALL
    return Size(_COMPLEX_BYTES if is_small else _LARGEST_FLOAT_BYTES + len(encode(expected)), _COMPLEX_PARTS)
