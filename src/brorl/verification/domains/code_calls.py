"""Calls to an answer's function, with their expected values; some are parsed from test code.

    `assert f(2) == 4`  ->  ExpectedCall(arguments=(2,), expected=4)

Values arrive as exact built-in types or as `Elements`, so the answer's methods never run here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from brorl.prompts.code_tests import TestCode
from brorl.verification.sandbox.values import Size, encode, size_of

# Maximum encoded lengths (see `values`) of a container's brackets, a complex number, the largest float as an integer.
_BRACKETS, _COMPLEX_BYTES, _MAX_FLOAT_BYTES = 8, 64, 280
_COMPLEX_PARTS = 2
_SMALL = 1 << 64


@dataclass(frozen=True)
class ValueRule:
    """Decides when two values count as the same."""

    absolute: float = 0.0  # allowed absolute error if either number is a float
    relative: float = 0.0  # allowed error relative to the expected number; added to `absolute`
    sequences_alike: bool = False  # whether [1, 2] and (1, 2) are the same, as in JSON
    any_order: bool = False  # whether the items of an outer list or tuple may be in any order

    def same(self, expected: object, value: object) -> bool:
        """Return whether the program's value, made of built-in types at any depth, is the expected value."""
        try:
            if not self.any_order or not isinstance(expected, list | tuple):
                return self._same(expected, value)
            if not self._alike(value, expected) or len(expected) != len(value):
                return False
            missing = Counter(map(self._key, expected))
            for key in map(self._key, value):  # never store an unexpected key: an answer could force hash collisions
                if not missing[key]:
                    return False
                missing[key] -= 1
            return True
        except RecursionError:  # the value is nested far deeper than the expected value
            return False

    def _same(self, expected: object, value: object) -> bool:
        if _is_number(expected):
            return _is_number(value) and self._same_number(expected, value)
        if isinstance(expected, list | tuple):
            return (
                self._alike(value, expected) and len(expected) == len(value) and all(map(self._same, expected, value))
            )
        if isinstance(expected, set | frozenset):
            if not isinstance(value, set | frozenset):
                return False
            known = {*map(self._key, expected)}
            keys = [*map(self._key, value)]
            return all(key in known for key in keys) and len({*keys}) == len(known)
        if isinstance(expected, dict):
            if not isinstance(value, dict) or len(expected) != len(value):
                return False
            items = {self._key(key): item for key, item in value.items()}
            pairs = [(self._key(key), item) for key, item in expected.items()]
            return all(key in items and self._same(item, items[key]) for key, item in pairs)
        return type(expected) is type(value) and expected == value

    def _alike(self, value: object, expected: object) -> TypeGuard[list[object] | tuple[object, ...]]:
        """Return whether a value is the same kind of sequence as the expected value."""
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
        """Return a key shared by equal values. A bool is not a number. A list may equal a tuple."""
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
    """Return whether a value is compared as a number. A bool is not."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


_EQUAL = ValueRule()


@dataclass(frozen=True)
class ExpectedCall:
    """One call and its expected value."""

    arguments: tuple[object, ...]  # positional
    expected: object  # the expected value
    rule: ValueRule = _EQUAL  # how values are compared
    unwrap: bool = False  # whether 4 is accepted where [4] is expected

    @cached_property
    def max_size(self) -> Size:
        """Upper bound on the encoded size of any accepted value."""
        return _largest_size(self.expected)

    def accepts(self, value: object) -> bool:
        """Return whether the program's value is the expected value."""
        if self.rule.same(self.expected, value):
            return True
        is_one = self.unwrap and isinstance(self.expected, list) and len(self.expected) == 1
        return is_one and self.rule.same(self.expected[0], value)  # type: ignore[index]


def _largest_size(expected: object) -> Size:
    """Return an upper bound on the encoded size of every value that `ValueRule.same` can accept."""
    # Equal numbers can be longer: 1e300 equals a 301-digit integer, and 2 a complex number. A list can be a tuple.
    if isinstance(expected, list | tuple | set | frozenset | dict):
        items = [item for pair in expected.items() for item in pair] if isinstance(expected, dict) else expected
        sizes = [_largest_size(item) for item in items]
        between = 2 if isinstance(expected, dict) else 1  # a comma; in a dict, also a pair's brackets and comma
        num_bytes, num_parts = (sum(counts) for counts in zip((0, 0), *sizes, strict=True))
        return Size(_BRACKETS + num_bytes + between * len(sizes), 1 + num_parts + between * len(sizes))
    if not _is_number(expected):
        return size_of(encode(expected).encode())
    is_small = isinstance(expected, int | float) and abs(expected) < _SMALL
    return Size(_COMPLEX_BYTES if is_small else _MAX_FLOAT_BYTES + len(encode(expected)), _COMPLEX_PARTS)


def parse_calls(test: TestCode) -> tuple[ExpectedCall, ...] | None:
    """Return the calls in test code that only asserts literal results of literal calls; None for other test code."""
    names = {test.function, "candidate"}
    try:
        body = ast.parse(test.code).body
        match body:
            case [
                *before,
                ast.FunctionDef(name=name, args=arguments, body=inner, decorator_list=[]),
                ast.Expr(value=ast.Call(func=ast.Name(id=called), args=[ast.Name(id=passed)], keywords=[])),
            ] if called == name and passed in names and ast.unparse(arguments) == "candidate":  # HumanEval's `check`
                body = [*before, *inner]
        return tuple(call for statement in body for call in _calls(statement, names)) or None
    except (TypeError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return None


def _calls(statement: ast.stmt, names: set[str]) -> list[ExpectedCall]:
    if any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(statement)):
        raise ValueError("not a value that a program can return")
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Assert(test=ast.Constant(value=True)) | ast.Assign(targets=[ast.Name(id="METADATA")]):
            return []
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]),
                ops=[ast.Eq() | ast.Is()],
                comparators=[expected],
            )
        ) if name in names:
            return [ExpectedCall(ast.literal_eval(ast.Tuple(arguments)), ast.literal_eval(expected))]
    raise ValueError("not an assertion on literals")
