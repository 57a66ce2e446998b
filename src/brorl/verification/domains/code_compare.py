"""Whether the output or the value of a program is the expected one.

In: an expected value, and one that a program returned. Out: True or False, by type and value. True is not 1, text is
not a number, and 2 equals 2.0. Nothing here runs a method of the answer: values arrive as exact builtin types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from decimal import Decimal

from brorl.prompts.code_tests import StdinCases
from brorl.verification.sandbox.values import encode

_NUMBER = re.compile(r"[-+]?(?:\d{1,4000}(?:\.\d{0,4000})?|\.\d{1,4000})(?:[eE][-+]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)

# The longest texts, see `values`: of the brackets of a container, of a complex number, of the largest float as integer.
_BRACKETS, _COMPLEX_BYTES, _LARGEST_FLOAT_BYTES = 8, 64, 280
_SMALL = 1 << 64


@dataclass(frozen=True)
class ValueRule:
    """When two values are the same.

    Attributes:
        absolute: Allowed absolute error where one of two numbers is a float; 0 for equal numbers.
        relative: Allowed error relative to the expected number, added to the absolute one.
        sequences_alike: Whether a list and a tuple of the same values are the same, as in JSON.
        any_order: Whether the order of an outer list or tuple does not count.
    """

    absolute: float = 0.0
    relative: float = 0.0
    sequences_alike: bool = False
    any_order: bool = False

    def same(self, expected: object, value: object) -> bool:
        """Whether a value of the program, of builtin types and any depth, is the expected one."""
        try:
            if not self.any_order or not isinstance(expected, list | tuple):
                return self._same(expected, value)
            if not self._alike(expected, value):
                return False
            assert isinstance(value, list | tuple)
            return len(expected) == len(value) and self._same_elements(expected, value)
        except RecursionError:  # a value that is nested far deeper than the expected one
            return False

    def same_set(self, expected: Collection[object], values: Iterable[object]) -> bool:
        """Whether values without their order and repetitions are the expected ones."""
        keys = {self._key(one) for one in expected}
        found: set[Hashable] = set()
        for value in values:  # no key that is not expected enters a set: an answer could choose equal hashes
            key = self._key(value)
            if key not in keys:
                return False
            found.add(key)
        return len(found) == len(keys)

    def _same_elements(self, expected: Iterable[object], values: Iterable[object]) -> bool:
        """Whether as many expected values as other values are the same, in any order."""
        missing = Counter(map(self._key, expected))
        for value in values:
            key = self._key(value)
            if not missing[key]:
                return False
            missing[key] -= 1
        return True

    def _same(self, expected: object, value: object) -> bool:
        if _is_number(expected):
            return _is_number(value) and self._same_number(expected, value)
        if isinstance(expected, list | tuple):
            if not self._alike(expected, value):
                return False
            assert isinstance(value, list | tuple)
            return len(expected) == len(value) and all(map(self._same, expected, value))
        if isinstance(expected, set | frozenset):
            return isinstance(value, set | frozenset) and self.same_set(expected, value)
        if isinstance(expected, dict):
            if not isinstance(value, dict) or len(expected) != len(value):
                return False
            found = {self._key(key): item for key, item in value.items()}
            keys = [(self._key(key), item) for key, item in expected.items()]
            return all(key in found and self._same(item, found[key]) for key, item in keys)
        return type(expected) is type(value) and expected == value

    def _alike(self, expected: object, value: object) -> bool:
        """Whether a value is a sequence of the kind of the expected one."""
        return isinstance(value, list | tuple) if self.sequences_alike else type(value) is type(expected)

    def _same_number(self, expected: object, value: object) -> bool:
        if expected == value or (expected != expected and value != value):
            return True
        if not (self.absolute or self.relative) or not (isinstance(expected, float) or isinstance(value, float)):
            return False
        assert isinstance(expected, int | float | complex)
        assert isinstance(value, int | float | complex)
        try:
            return abs(value - expected) <= self.absolute + self.relative * abs(expected) < float("inf")
        except OverflowError:
            return False

    def _key(self, value: object) -> Hashable:
        """Return a key that equal values share: a bool is no number, and a list is a tuple where both are alike."""
        if isinstance(value, list | tuple):
            return ("sequence" if self.sequences_alike else type(value), *map(self._key, value))
        if isinstance(value, set | frozenset):
            return frozenset(map(self._key, value))
        if isinstance(value, dict):
            return "dict", frozenset((self._key(key), self._key(item)) for key, item in value.items())
        if _is_number(value):
            return "nan" if value != value else value
        return type(value), value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def most_bytes(expected: object) -> int:
    """Return a bound of the size of all values that `ValueRule.same` can accept, as encoded text in bytes.

    A number has other forms: 1e300 equals an integer of 300 digits, and 2 a complex number. A list can be a tuple. All
    other values are written in one way.
    """
    if isinstance(expected, list | tuple | set | frozenset):
        return _BRACKETS + sum(most_bytes(item) + 1 for item in expected)
    if isinstance(expected, dict):
        return _BRACKETS + sum(most_bytes(key) + most_bytes(item) + 4 for key, item in expected.items())
    if not _is_number(expected):
        return len(encode(expected))
    is_small = isinstance(expected, int | float) and abs(expected) < _SMALL
    return _COMPLEX_BYTES if is_small else _LARGEST_FLOAT_BYTES + len(encode(expected))


def same_output(expected: str, output: str, cases: StdinCases) -> bool:
    """Whether the output of a program is the expected one, by the rule of the cases."""
    if cases.ignore_case:
        expected, output = expected.casefold(), output.casefold()
    if cases.compare == "exact":
        return expected.replace("\r\n", "\n").removesuffix("\n") == output.replace("\r\n", "\n").removesuffix("\n")
    if cases.compare == "tokens":
        return _same_tokens(expected.split(), output.split(), cases.tolerance)
    expected_lines, lines = ([line.split() for line in text.strip().split("\n")] for text in (expected, output))
    if cases.tolerance is None:  # white space within a line counts
        return [s.strip() for s in expected.strip().split("\n")] == [s.strip() for s in output.strip().split("\n")]
    return len(expected_lines) == len(lines) and all(
        _same_tokens(one, other, cases.tolerance) for one, other in zip(expected_lines, lines, strict=True)
    )


def _same_tokens(expected: list[str], tokens: list[str], tolerance: float | None) -> bool:
    return len(expected) == len(tokens) and all(
        one == other or (tolerance is not None and _same_number(one, other, tolerance))
        for one, other in zip(expected, tokens, strict=True)
    )


def _same_number(expected: str, token: str, tolerance: float) -> bool:
    """Whether two tokens are numbers of the same value; an expected integer has no relative error."""
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(token)):
        return False
    right, number = Decimal(expected), Decimal(token)
    if right == number:
        return True
    scale = 1 if _INTEGER.fullmatch(expected) else max(Decimal(1), abs(right))
    return abs(number - right) <= Decimal(tolerance) * scale
