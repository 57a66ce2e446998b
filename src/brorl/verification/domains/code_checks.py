"""The checks of answers: calls with expected values, also of the test code of datasets.

Values arrive as exact builtin types or as `Elements`: nothing here runs a method of the answer.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from brorl.prompts.code_tests import TestCode
from brorl.verification.sandbox.values import Size, encode, size_of

_CONSTANTS: Mapping[str, object] = {"inf": math.inf, "nan": math.nan}
_COLLECTIONS = {"set": set, "frozenset": frozenset, "list": list, "tuple": tuple}
_ITERABLES = (list, tuple, set, frozenset, dict, str, bytes)
_CLOSE_BY_DEFAULT = 1e-6  # of evalplus, for expected floats
_RELATIVE = 1e-7  # of evalplus
_REPEATED_BYTES = 1 << 16
_BYTES_PER_PART = 2  # of the densest text, a list of digits
# The longest texts, see `values`: of the brackets of a container, of a complex number, of the largest float as integer.
_BRACKETS, _COMPLEX_BYTES, _LARGEST_FLOAT_BYTES = 8, 64, 280
_COMPLEX_PARTS = 2
_SMALL = 1 << 64


@dataclass(frozen=True)
class ValueRule:
    """When two values are the same."""

    absolute: float = 0.0  # allowed absolute error where one of two numbers is a float; 0 for equal numbers
    relative: float = 0.0  # allowed error relative to the expected number, added to the absolute one
    sequences_alike: bool = False  # whether a list and a tuple of the same values are the same, as in JSON
    any_order: bool = False  # whether the order of an outer list or tuple does not count

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
        keys = {self._key(value) for value in expected}
        seen: set[Hashable] = set()
        for value in values:  # no key that is not expected enters a set: an answer could choose equal hashes
            key = self._key(value)
            if key not in keys:
                return False
            seen.add(key)
        return len(seen) == len(keys)

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
            items = {self._key(key): item for key, item in value.items()}
            keys = [(self._key(key), item) for key, item in expected.items()]
            return all(key in items and self._same(item, items[key]) for key, item in keys)
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
    """Whether a value is compared as a number: a bool is none."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


_EQUAL = ValueRule()

Kind = Literal["value", "wrapped", "set", "not none", "truth"]


@dataclass(frozen=True)
class Check:
    """One call and its expected value."""

    arguments: tuple[object, ...]  # positional arguments
    expected: object  # the expected value
    rule: ValueRule = _EQUAL  # when a value is the expected one
    # `value` compares the value, `set` the set of its elements, and `truth` its truth. `wrapped` also accepts the one
    # element of an expected list alone, and `not none` any value but None instead of True.
    kind: Kind = "value"

    @cached_property
    def max_size(self) -> Size:
        """Bound of the size of an accepted value, as encoded text.

        0 for a value of which only its truth, or whether it is None, counts: a long one is true. The elements of a set
        may be repeated, as often as the arguments and 64 KiB have room for.
        """
        if self.kind in ("truth", "not none"):
            return Size(0, 0)
        size = _largest_size(self.expected)
        if self.kind != "set":
            return size
        repeated = _largest_size(self.arguments)
        return Size(
            size.num_bytes + repeated.num_bytes + _REPEATED_BYTES,
            size.num_parts + repeated.num_parts + _REPEATED_BYTES // _BYTES_PER_PART,
        )

    def accepts(self, value: object) -> bool:
        """Whether a value of the program is the expected one."""
        if self.kind == "truth":
            return bool(value) is self.expected
        if self.kind == "not none" and not isinstance(value, bool):
            return self.expected is (value is not None)
        if self.kind == "set":
            assert isinstance(self.expected, set | frozenset)
            return isinstance(value, _ITERABLES) and self.rule.same_set(self.expected, value)
        if self.kind == "wrapped" and isinstance(self.expected, list) and len(self.expected) == 1:
            return self.rule.same(self.expected, value) or self.rule.same(self.expected[0], value)
        return self.rule.same(self.expected, value)


def _largest_size(expected: object) -> Size:
    """Return a bound of the size of all values that `ValueRule.same` can accept, as encoded text."""
    # A number has other forms: 1e300 equals an integer of 300 digits, and 2 a complex number. A list can be a tuple.
    if isinstance(expected, list | tuple | set | frozenset | dict):
        items = [one for pair in expected.items() for one in pair] if isinstance(expected, dict) else expected
        sizes = [_largest_size(item) for item in items]
        between = 2 if isinstance(expected, dict) else 1  # a comma; of a dict also the brackets and the comma of a pair
        num_bytes, num_parts = (sum(counts) for counts in zip((0, 0), *sizes, strict=True))
        return Size(_BRACKETS + num_bytes + between * len(sizes), 1 + num_parts + between * len(sizes))
    if not _is_number(expected):
        return size_of(encode(expected).encode())
    is_small = isinstance(expected, int | float) and abs(expected) < _SMALL
    return Size(_COMPLEX_BYTES if is_small else _LARGEST_FLOAT_BYTES + len(encode(expected)), _COMPLEX_PARTS)


def parse_checks(test: TestCode) -> tuple[Check, ...] | None:
    """Return the checks of test code; None if it does more than call the function with literal arguments."""
    try:
        checks = _Parser(test.function).block(ast.parse(test.code).body)
    except (_UnknownError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return None
    return tuple(checks) or None


class _UnknownError(Exception):
    """The code does something that this file does not understand."""


class _Parser:
    """Reads statements in order; `constants` are the names that they have assigned so far."""

    def __init__(self, function: str) -> None:
        self._names = {function, "candidate"}
        self._constants = dict(_CONSTANTS)
        self._functions: dict[str, ast.FunctionDef] = {}

    def block(self, statements: list[ast.stmt]) -> list[Check]:
        checks: list[Check] = []
        for statement in statements:
            checks += self._statement(statement)
        return checks

    def _statement(self, statement: ast.stmt) -> list[Check]:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
                return []
            case ast.Assert(test=ast.Constant(value=True)):
                return []
            case ast.FunctionDef(name=name):
                self._functions[name] = statement
                return []
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name != "METADATA":  # of HumanEval
                    self._constants[name] = self._constant(value)
                return []
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name(id=argument)], keywords=[])) if (
                argument in self._names and name in self._functions  # check(candidate)
            ):
                function = self._functions[name]
                if [part.arg for part in function.args.args] != ["candidate"] or function.decorator_list:
                    raise _UnknownError
                return self.block(function.body)
            case ast.Assert(test=test):
                return [self._assertion(test)]
            case ast.For():
                return self._loop(statement)
            case _:
                raise _UnknownError

    def _assertion(self, test: ast.expr) -> Check:
        match test:
            case ast.Compare(left=ast.Call(args=[call]) as left, ops=[ast.Eq()], comparators=[right]) if _is_set(
                left
            ) and _is_set(right):
                return Check(self._arguments(call), self._constant(right), kind="set")
            case ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                return Check(self._arguments(call), self._constant(right))
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call, op=ast.Sub(), right=expected)]),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[bound],
            ):
                return self._close(call, expected, self._number(bound), 0.0)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[call, expected], keywords=options
            ) if all(option.arg in ("rel_tol", "abs_tol") for option in options):
                given = {option.arg: self._number(option.value) for option in options}
                return self._close(call, expected, given.get("abs_tol", 0.0), given.get("rel_tol", 1e-9))
            case ast.UnaryOp(op=ast.Not(), operand=call):
                return Check(self._arguments(call), False, kind="truth")
            case _:
                return Check(self._arguments(test), True, kind="truth")

    def _close(self, call: ast.expr, expected: ast.expr, absolute: float, relative: float) -> Check:
        """Return the check of a real number; not of an integer that another one is close to: see `ValueRule`."""
        number = self._constant(expected)
        if type(number) is not float and not (type(number) is int and absolute + relative * (abs(number) + 1) < 1):
            raise _UnknownError
        return Check(self._arguments(call), number, ValueRule(absolute, relative))

    def _loop(self, loop: ast.For) -> list[Check]:
        """Return the checks of the loop of evalplus over `inputs` and `results`."""
        if ast.unparse(loop.target) != "(i, (inp, exp))" or ast.unparse(loop.iter) != "enumerate(zip(inputs, results))":
            raise _UnknownError
        if len(loop.body) != 1 or loop.orelse or "assertion" not in self._functions:
            raise _UnknownError
        written = ast.unparse(loop.body[0])
        call = next((f"assertion({name}(*inp), exp, " for name in self._names if f"assertion({name}(" in written), None)
        if call is None or not written.startswith(call):
            raise _UnknownError
        atol = float(written.removeprefix(call).removesuffix(")"))
        inputs, results = self._constants.get("inputs"), self._constants.get("results")
        if not isinstance(inputs, list) or not isinstance(results, list) or len(inputs) != len(results):
            raise _UnknownError
        kind = _assertion_kind(self._functions["assertion"])
        return [
            _evalplus_check(tuple(given), expected, atol, kind) for given, expected in zip(inputs, results, strict=True)
        ]

    def _arguments(self, call: ast.expr) -> tuple[object, ...]:
        match call:
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in self._names:
                return tuple(self._constant(argument) for argument in arguments)
            case _:
                raise _UnknownError

    def _number(self, node: ast.expr) -> float:
        value = self._constant(node)
        if not isinstance(value, int | float):
            raise _UnknownError
        return float(value)

    def _constant(self, node: ast.expr) -> object:
        """Return the value of an expression without calls other than those of collections and `float`."""
        match node:
            case ast.Constant(value=value) if value is not Ellipsis:
                return value
            case ast.Name(id=name) if name in self._constants:
                return self._constants[name]
            case ast.Attribute(value=ast.Name(id="math" | "np"), attr=name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                return _made(kind, [self._constant(part) for part in parts])
            case ast.Dict(keys=keys, values=values):
                return _made(dict, [(self._key(k), self._constant(v)) for k, v in zip(keys, values, strict=True)])
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() | complex() as number)):
                return -number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return -math.inf
            case ast.BinOp(
                left=left, op=ast.Add() | ast.Sub() as sign, right=ast.Constant(value=complex() as imaginary)
            ):
                real = self._number(left)  # a complex number is written as a sum
                return real + imaginary if isinstance(sign, ast.Add) else real - imaginary
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as text)], keywords=[]):
                return float(text)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _COLLECTIONS:
                return _made(_COLLECTIONS[name], *(self._constant(argument) for argument in arguments))
            case _:
                raise _UnknownError

    def _key(self, node: ast.expr | None) -> object:
        if node is None:  # {**other}
            raise _UnknownError
        return self._constant(node)


def _is_set(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "set"


def _made(kind: type, *parts: object) -> object:
    try:
        return kind(*parts)
    except TypeError as error:
        raise _UnknownError from error


def _assertion_kind(function: ast.FunctionDef) -> Kind:
    """Return the kind of a function `assertion(out, exp, atol)` of evalplus, from the lines that distinguish them."""
    if [part.arg for part in function.args.args] != ["out", "exp", "atol"]:
        raise _UnknownError
    body = ast.unparse(function)
    if "exp == (out is not None)" in body and "isinstance(out, bool)" in body:
        return "not none"
    if "allclose" not in body or "is_floats(exp)" not in body:
        raise _UnknownError
    if "out = set(out)" in body and "exp = set(exp)" in body:
        return "set"
    if "out == exp" in body and "set(" not in body and "sorted(" not in body:
        return "value"
    raise _UnknownError


def _evalplus_check(arguments: tuple[object, ...], expected: object, atol: float, kind: Kind) -> Check:
    if kind == "not none":
        return Check(arguments, bool(expected), kind=kind)
    if kind == "set":
        return Check(arguments, _made(frozenset, expected), kind=kind)
    if atol == 0 and _is_floats(expected):
        atol = _CLOSE_BY_DEFAULT
    if atol == 0:
        return Check(arguments, expected)
    return Check(arguments, expected, ValueRule(atol, _RELATIVE, sequences_alike=_is_floats(expected)))


def _is_floats(value: object) -> bool:
    """Whether evalplus compares a value with a tolerance: a float, or a list or tuple of floats."""
    if isinstance(value, list | tuple):
        return all(isinstance(part, float) for part in value)
    return isinstance(value, float)
