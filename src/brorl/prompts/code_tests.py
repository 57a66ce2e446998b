"""A programming question's tests, which decide whether an answer is correct.

There are three kinds: program runs with standard input and output, function calls, and test code with assertions. Cases
are JSON values. Test code is stored as text and not executed here.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

from brorl.prompts.json_text import FORBID_UNKNOWN_KEYS, read_json

OutputRule = Literal["tokens", "lines", "exact"]


@dataclass(frozen=True)
class StdinCases:
    """Runs of a whole program."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    inputs: tuple[str, ...]  # standard input of each case; at least one case
    outputs: tuple[str, ...]  # expected standard output of each case
    # `tokens` splits at white space. `lines` compares line by line, ignoring white space around each line and around
    # the whole output. `exact` ignores only a single final line break.
    compare: OutputRule = "tokens"
    # None compares text. 0 also accepts other notations of the same number: 1.50 for 1.5. A larger value is the
    # permitted error: absolute for numbers up to 1, relative above. Integers are not allowed a relative error.
    tolerance: float | None = None
    ignore_case: bool = False

    def __post_init__(self) -> None:
        _check_cases("inputs", len(self.inputs), "outputs", len(self.outputs))
        _check_tolerance(self.tolerance)


@dataclass(frozen=True)
class CallCases:
    """Calls to a single function. Arguments and expected values are JSON values."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    function: str  # a class `Solution` with a method of this name is also accepted
    arguments: tuple[tuple[Any, ...], ...]  # positional arguments of each case; at least one case
    expected: tuple[Any, ...]  # expected value of each case; a list also accepts a tuple of the same values
    # If either number is a float, they may differ by tolerance * (1 + |expected|); 0 requires equal numbers.
    tolerance: float = 0.0
    any_order: bool = False  # whether a returned list may be in any order
    unwrap: bool = False  # whether an expected list with one value, [7], also accepts the bare value, 7
    int_keys: bool = False  # whether keys such as "1" become integers; JSON keys are always strings

    def __post_init__(self) -> None:
        _check_name(self.function)
        _check_cases("arguments", len(self.arguments), "expected", len(self.expected))
        _check_tolerance(self.tolerance)
        if self.any_order and self.tolerance:
            raise ValueError("any_order compares numbers exactly; leave tolerance at 0, or set any_order to false")

    def cases(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return (arguments, expected value) of each case, as the function receives and returns them."""
        if not self.int_keys:
            return list(zip(self.arguments, self.expected, strict=True))
        pairs = zip(self.arguments, self.expected, strict=True)
        return [(tuple(_with_int_keys(list(arguments))), _with_int_keys(value)) for arguments, value in pairs]


@dataclass(frozen=True)
class TestCode:
    """Python code that calls a function from the answer and raises an AssertionError if a value is wrong."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS
    __test__ = False  # keeps pytest from collecting the class because of its name

    function: str  # the function's name in the code, unless the code calls it `candidate`
    code: str  # needs only the standard library and numpy's `allclose`

    def __post_init__(self) -> None:
        _check_name(self.function)
        if not any(name in self.code for name in (self.function, "candidate")):
            raise ValueError(f"the test code never calls {self.function!r} or 'candidate'")


_FORM = (
    '{"stdin": {"inputs": ["1 2"], "outputs": ["3"]}}, {"calls": {"function": "add", "arguments": [[1, 2]], '
    '"expected": [3]}} or {"code": {"function": "add", "code": "assert add(1, 2) == 3"}}'
)
_KINDS = {StdinCases: "stdin", CallCases: "calls", TestCode: "code"}
_OPTIONS = ("time_limit_s", "memory_bytes", "prelude", "solution")


@dataclass(frozen=True)
class _Stored:
    """The JSON object that stores a question's tests. Exactly one of the three kinds is set."""

    __pydantic_config__ = FORBID_UNKNOWN_KEYS

    stdin: StdinCases | None = None
    calls: CallCases | None = None
    code: TestCode | None = None
    time_limit_s: int | float | None = None
    memory_bytes: int | float | None = None  # a float because some files write 1e9
    prelude: str | None = None
    solution: str | None = None


@dataclass(frozen=True)
class CodeTests:
    """The tests of one question."""

    tests: StdinCases | CallCases | TestCode
    # The dataset's time limit per case, meant for compiled languages; None if the dataset sets no limit.
    time_limit_s: float | None = None
    memory_bytes: float | None = None  # the dataset's memory limit; None if the dataset sets no limit
    prelude: str = ""  # code that runs before the answer, such as the imports that the dataset's judge adds
    # A passing answer for testing the verifier; None if the dataset does not have one in Python 3.
    solution: str | None = None

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "memory_bytes"):
            limit = getattr(self, name)
            if limit is not None and not (isfinite(limit) and limit > 0):
                raise ValueError(f"{name} must be above 0, or null, got {limit!r}")

    def to_text(self) -> str:
        """Return the tests as JSON text, the form of a prompt's reference."""
        options = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name)}
        stored = {_KINDS[type(self.tests)]: asdict(self.tests), **options}
        return json.dumps(stored, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> CodeTests:
        """Parse the result of `to_text`. Anything else raises a `ValueError` that names the problem."""
        stored = {name: value for name, value in vars(read_json(_Stored, text, _FORM)).items() if value is not None}
        kinds = [name for name in _KINDS.values() if name in stored]
        if len(kinds) != 1:
            raise ValueError(f"has {' and '.join(kinds) or 'no tests'}; expected {_FORM}")
        return CodeTests(stored.pop(kinds[0]), **stored)


def _with_int_keys(value: Any) -> Any:
    """Return a JSON value with integer keys in every object whose keys are all integers: {"1": 2} -> {1: 2}."""
    if isinstance(value, list):
        return [_with_int_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    are_integers = all(re.fullmatch("-?[0-9]{1,18}", key) for key in value)
    return {int(key) if are_integers else key: _with_int_keys(item) for key, item in value.items()}


def _check_cases(inputs: str, num_inputs: int, results: str, num_results: int) -> None:
    if num_inputs != num_results:
        raise ValueError(f"there are {num_inputs} {inputs} and {num_results} {results}; each case needs one of each")
    if not num_inputs:
        raise ValueError(f"there are no test cases; {inputs} and {results} need at least one entry")


def _check_name(function: str) -> None:
    if not function.isidentifier():
        raise ValueError(f"the function must be a Python name, got {function!r}")


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")
