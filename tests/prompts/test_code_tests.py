"""The codec of tests: random tests survive it, and malformed text has its problem."""

import json
import re
from typing import Any

import numpy as np
import pytest

from brorl.prompts.code_tests import CallCases, CodeTests, StdinCases, TestCode
from each_row import each_row


def random_tests(rng: np.random.Generator) -> StdinCases | CallCases | TestCode:
    number = int(rng.integers(1, 4))
    texts = tuple(
        "".join(rng.choice(list("a1 \n\t\u00e9\u2028'\""), size=rng.integers(0, 9))) for _ in range(2 * number)
    )
    match rng.integers(3):
        case 0:
            compare = str(rng.choice(["tokens", "lines", "exact"]))
            tolerance = None if rng.random() < 0.5 else float(rng.random())
            return StdinCases(texts[:number], texts[number:], compare, tolerance, bool(rng.random() < 0.5))  # type: ignore[arg-type]
        case 1:
            values = [None, True, 1, 1.5, "x", [1, [2.0, "y"]], {"k": [True]}, 10**30]
            arguments = tuple(
                tuple(values[i] for i in rng.integers(0, len(values), size=rng.integers(0, 3))) for _ in range(number)
            )
            expected = tuple(values[i] for i in rng.integers(0, len(values), size=number))
            return CallCases(
                "f", arguments, expected, unwrap=bool(rng.random() < 0.5), int_keys=bool(rng.random() < 0.5)
            )
    return TestCode("f", f"assert f({number}) == '{number}\\n'")


def test_tests_survive_their_text(rng: np.random.Generator) -> None:
    for _ in range(100):
        options = {"time_limit_s": 1.5, "memory_bytes": 1 << 28, "prelude": "import math\n", "solution": "x = '\u00e9'"}
        chosen = {name: value for name, value in options.items() if rng.random() < 0.5}
        tests = CodeTests(random_tests(rng), **chosen)  # type: ignore[arg-type]
        assert CodeTests.from_text(tests.to_text()) == tests
        assert json.loads(tests.to_text()).keys() <= {"stdin", "calls", "code", *options}


def test_integer_keys_come_back() -> None:
    cases = CallCases("f", (({"1": {"-2": "a"}}, [{"3": 0}]),), ({"1": 2, "b": {"4": 5}},), int_keys=True)
    assert cases.cases() == [(({1: {-2: "a"}}, [{3: 0}]), {"1": 2, "b": {4: 5}})]
    assert CallCases("f", (({"1": 2},),), (3,)).cases() == [(({"1": 2},), 3)]


FINE = {"inputs": ["1"], "outputs": ["1"]}
CALL = {"function": "f", "arguments": [[]], "expected": [1]}


@each_row(
    ("value", "problem"),
    [
        (42, 'has 42 (input should be an object); expected {"stdin": {"inputs": ["1 2"]'),
        ({}, "has no tests; expected"),
        ({"stdin": FINE, "calls": CALL}, "has stdin and calls; expected"),
        ({"stdin": 3}, "has 3 as stdin (input should be an object)"), ({"calls": []}, "has [] as calls (input sh"),
        ({"stdin": FINE, "hint": 1}, "has the unknown key hint; expected"),
        ({"stdin": FINE, "time_limit_s": 0}, "time_limit_s must be above 0"),
        ({"stdin": FINE, "time_limit_s": "2"}, "has '2' as time_limit_s"),
        ({"stdin": FINE, "prelude": 2}, "has 2 as prelude (input should be a valid string)"),
        ({"stdin": {}}, "has no stdin.inputs; expected"),
        ({"stdin": {"inputs": ["1"]}}, "has no stdin.outputs"),
        ({"stdin": {**FINE, "spaces": 2}}, "has the unknown key stdin.spaces"),
        ({"stdin": {"inputs": [], "outputs": []}}, "there are no test cases"),
        ({"stdin": {"inputs": ["1"], "outputs": []}}, "there are 1 inputs and 0 outputs"),
        ({"stdin": {**FINE, "inputs": [1]}}, "has 1 as stdin.inputs.0 (input should be a valid string)"),
        ({"stdin": {**FINE, "inputs": "1"}}, "has '1' as stdin.inputs (input should be a valid array)"),
        ({"stdin": {**FINE, "compare": "x"}}, "has 'x' as stdin.compare (input should be 'tokens', 'lines'"),
        ({"stdin": {**FINE, "tolerance": 2}}, "tolerance must be at least 0"),
        ({"calls": {"function": "f", "arguments": [[]]}}, "has no calls.expected"),
        ({"calls": {**CALL, "arguments": [1]}}, "has 1 as calls.arguments.0 (input should be a valid array)"),
        ({"calls": {**CALL, "function": "f()"}}, "must be a Python name, got 'f()'"),
        ({"calls": {**CALL, "arguments": [], "expected": []}}, "there are no test cases"),
        ({"calls": {**CALL, "any_order": True, "tolerance": 0.1}}, "any_order compares numbers exactly"),
        ({"code": {"function": "f", "code": 5}}, "has 5 as code.code"),
        ({"code": {"function": "f", "code": "assert True"}}, "never calls 'f' or 'candidate'"),
    ],
)  # fmt: skip
def test_malformed_tests_have_their_problem(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        CodeTests.from_text(json.dumps(value))
    assert "__init__" not in str(error.value)


@each_row("text", ["nonsense", "[" * 100_000])
def test_text_that_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not JSON text \(.*\); expected \{"):
        CodeTests.from_text(text)
