"""The tests of a programming question, which decide whether an answer is correct.

There are three kinds of tests: programs with standard input and output, calls of a function, and test code with
assertions. Cases are JSON values; test code stays text and is not executed here.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from math import isfinite
from typing import Any, Literal, get_args

from brorl.format import short_repr
from brorl.prompts.prompt import check_object, read_object

OutputRule = Literal["tokens", "lines", "exact"]


@dataclass(frozen=True)
class StdinCases:
    """Runs of a whole program."""

    inputs: tuple[str, ...]  # text of standard input of each case, at least one
    outputs: tuple[str, ...]  # expected text of standard output of each case
    # `tokens` splits at white space; `lines` compares line by line without white space around each line and around the
    # whole text; `exact` ignores only one line end at the end
    compare: OutputRule = "tokens"
    # None compares text; 0 also accepts another notation of the same number; a larger value is the allowed error of a
    # number, absolute up to 1 and relative above. An expected integer has no relative error.
    tolerance: float | None = None
    ignore_case: bool = False  # whether upper and lower case are the same

    def __post_init__(self) -> None:
        _check_cases("inputs", len(self.inputs), "outputs", len(self.outputs))
        if self.compare not in get_args(OutputRule):
            raise ValueError(f"compare must be one of {', '.join(get_args(OutputRule))}, got {self.compare!r}")
        _check_tolerance(self.tolerance)
        _check_text("inputs", self.inputs)
        _check_text("outputs", self.outputs)


@dataclass(frozen=True)
class CallCases:
    """Calls of one function; arguments and expected values are JSON values."""

    function: str  # name of the function. A class `Solution` with a method of this name is accepted too.
    arguments: tuple[tuple[Any, ...], ...]  # positional arguments of each case, at least one case
    expected: tuple[Any, ...]  # expected value of each case. A list also accepts a tuple of the same values.
    # allowed error t, at most t (1 + |expected|), where one of the two numbers is a float; 0 for equal numbers
    tolerance: float = 0.0
    any_order: bool = False  # whether the order of a returned list does not count
    unwrap: bool = False  # whether an expected list of one value also accepts the value alone
    int_keys: bool = False  # whether keys that are integers as text are integers; JSON has only text as keys

    def __post_init__(self) -> None:
        _check_name(self.function)
        _check_cases("arguments", len(self.arguments), "expected", len(self.expected))
        _check_tolerance(self.tolerance)
        if self.any_order and self.tolerance:
            raise ValueError("any_order compares numbers exactly; leave tolerance at 0, or set any_order to false")

    def cases(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the arguments and the expected value of each case, as the function gets and returns them."""
        if not self.int_keys:
            return list(zip(self.arguments, self.expected, strict=True))
        pairs = zip(self.arguments, self.expected, strict=True)
        return [(tuple(_with_int_keys(list(arguments))), _with_int_keys(value)) for arguments, value in pairs]


@dataclass(frozen=True)
class TestCode:
    """Python code that calls a function of the answer and raises an AssertionError if a value is wrong."""

    __test__ = False  # pytest collects classes of this name

    function: str  # name of the function. The code calls it by this name, or by the name `candidate`.
    code: str  # the test code. It needs only the standard library, and `allclose` of numpy.
    # Run the code in the process of the answer, which can then see expected values and change the code's environment.
    # Only code that passes or receives other than plain values needs it.
    weak: bool = False

    def __post_init__(self) -> None:
        _check_name(self.function)
        if not any(name in self.code for name in (self.function, "candidate")):
            raise ValueError(f"the test code never calls {self.function!r} or 'candidate'")


_KINDS: dict[str, type[StdinCases | CallCases | TestCode]] = {"stdin": StdinCases, "calls": CallCases, "code": TestCode}
_FORMS = {
    "stdin": '{"inputs": ["1 2"], "outputs": ["3"]}',
    "calls": '{"function": "add", "arguments": [[1, 2]], "expected": [3]}',
    "code": '{"function": "add", "code": "assert add(1, 2) == 3"}',
}
_FORM = f'{{"stdin": {_FORMS["stdin"]}}}, {{"calls": {{...}}}} or {{"code": {{...}}}}'
_OPTIONS = {"time_limit_s": float, "memory_bytes": float, "prelude": str, "solution": str}


@dataclass(frozen=True)
class CodeTests:
    """The tests of one question."""

    tests: StdinCases | CallCases | TestCode  # the cases or the test code
    # time limit of one case that the dataset states, in seconds, for a compiled language; None if it states none
    time_limit_s: float | None = None
    memory_bytes: int | None = None  # memory limit that the dataset states; None if it states none
    prelude: str = ""  # code that runs before the answer, such as the imports that a dataset's own judge adds
    # an answer that passes, for trials of the verifier; None if the dataset has none in Python 3
    solution: str | None = None

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "memory_bytes"):
            limit = getattr(self, name)
            if limit is not None and not (isfinite(limit) and limit > 0):
                raise ValueError(f"{name} must be above 0, or null, got {limit!r}")

    def to_text(self) -> str:
        """Return the tests as JSON text, the reference of a prompt."""
        kind = next(name for name, tests in _KINDS.items() if isinstance(self.tests, tests))
        options = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name)}
        return json.dumps({kind: asdict(self.tests), **options}, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> CodeTests:
        """Read the text of `to_text`."""
        value = read_object(text, _FORM, {}, {**dict.fromkeys(_KINDS, dict), **_OPTIONS}, "the text ")
        kinds = [name for name in _KINDS if value.get(name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"the text has {' and '.join(kinds) or 'no tests'}; expected {_FORM}")
        made = _made(kinds[0], value[kinds[0]])
        return CodeTests(made, **{name: value[name] for name in _OPTIONS if value.get(name) is not None})


def _made(kind: str, value: Any) -> StdinCases | CallCases | TestCode:
    """Return the cases or the test code of a JSON object."""
    types: dict[bool, dict[str, type]] = {True: {}, False: {}}  # of the needed and of the optional keys
    for part in fields(_KINDS[kind]):
        of_name = {"str": str, "bool": bool, "float": float, "float | None": float, "OutputRule": str}
        types[part.default is MISSING][part.name] = of_name.get(str(part.type), list)
    checked = check_object(value, _FORMS[kind], types[True], types[False], f"{kind} ")
    return _KINDS[kind](**{name: _frozen(name, part) for name, part in checked.items() if part is not None})


def _with_int_keys(value: Any) -> Any:
    """Return a JSON value whose objects have integer keys where all keys are integers."""
    if isinstance(value, list):
        return [_with_int_keys(one) for one in value]
    if not isinstance(value, dict):
        return value
    are_integers = all(re.fullmatch("-?[0-9]{1,18}", key) for key in value)
    return {int(key) if are_integers else key: _with_int_keys(one) for key, one in value.items()}


def _frozen(name: str, value: Any) -> Any:
    """Turn the lists of cases into tuples; the values of a case stay JSON values."""
    if name == "arguments" and not all(isinstance(part, list) for part in value):
        raise ValueError("arguments must be a list of lists, one of the arguments of each call")
    if name == "arguments":
        return tuple(tuple(part) for part in value)
    return tuple(value) if isinstance(value, list) else value


def _check_cases(one: str, num_one: int, other: str, num_other: int) -> None:
    if num_one != num_other:
        raise ValueError(f"there are {num_one} {one} and {num_other} {other}; each case needs one of each")
    if not num_one:
        raise ValueError(f"there is no test case; {one} and {other} need at least one entry")


def _check_name(function: str) -> None:
    if not function.isidentifier():
        raise ValueError(f"the function must be a Python name, got {function!r}")


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be 0 or more and below 1, got {tolerance!r}")


def _check_text(name: str, texts: tuple[str, ...]) -> None:
    wrong = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ValueError(f"{name}[{wrong}] must be a string, got {short_repr(texts[wrong])}; write it in quotes")
