"""The codec of tests: random tests survive it, and malformed text has its problem."""

import json
import re

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
    return TestCode("f", f"assert f({number}) == '{number}\\n'", weak=bool(rng.random() < 0.5))


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


@each_row(
    ("text", "problem"),
    [
        ("42", "the tests must be a JSON object with one of the keys stdin, calls, code, got 42"),
        ("{}", "got none; keep one of them"),
        ("nonsense", "the tests must be JSON text: Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"stdin": {"inputs": [], "outputs": []}}', "there is no test case"),
        ('{"stdin": {"inputs": ["1"], "outputs": []}}', "there are 1 inputs and 0 outputs"),
        ('{"stdin": {"inputs": [1], "outputs": ["1"]}}', "inputs[0] must be a string, got 1; write it in quotes"),
        ('{"stdin": {"inputs": "1", "outputs": ["1"]}}', 'inputs must be a list with one entry per case, got "1"'),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"], "compare": "x"}}', "compare must be one of tokens, lines"),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"], "tolerance": 2}}', "tolerance must be 0 or more"),
        (
            '{"stdin": {"inputs": ["1"], "outputs": ["1"], "spaces": 2}}',
            "stdin has an unknown key 'spaces' (keys: inputs, outputs, compare, tolerance, ignore_case); delete or",
        ),
        ('{"stdin": {"inputs": ["1"]}}', "stdin has no key 'outputs' (keys: inputs); add it"),
        ('{"stdin": 3}', "stdin must be a JSON object with the keys inputs, outputs, got 3"),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"]}, "hint": 1}', "got stdin, hint; delete or correct 'hint'"),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"]}, "time_limit_s": 0}', "time_limit_s must be above 0"),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"]}, "time_limit_s": "2"}', "time_limit_s must be above 0"),
        ('{"stdin": {"inputs": ["1"], "outputs": ["1"]}, "prelude": 2}', "prelude and solution must be strings"),
        (
            '{"calls": {"function": "f", "arguments": [1], "expected": [1]}}',
            "arguments[0] must be the list of a call's arguments, got 1",
        ),
        ('{"calls": {"function": "f()", "arguments": [[1]], "expected": [1]}}', "must be a Python name, got 'f()'"),
        ('{"calls": {"function": "f", "arguments": [], "expected": []}}', "there is no test case"),
        (
            '{"calls": {"function": "f", "arguments": [[]], "expected": [1], "any_order": true, "tolerance": 0.1}}',
            "any_order compares numbers exactly",
        ),
        ('{"code": {"function": "f", "code": "assert f()", "weak": "yes"}}', 'weak must be true or false, got "yes"'),
        ('{"calls": {"function": "f", "arguments": [[]]}}', "calls has no key 'expected' (keys: function, arguments)"),
        ('{"calls": []}', "calls must be a JSON object with the keys function, arguments, expected, got a list"),
        ('{"stdin": {}}', "stdin has no key 'inputs' (keys: none); add it"),
        ('{"code": {"function": "f", "code": "assert True"}}', "never calls 'f' or 'candidate'"),
    ],
)
def test_malformed_text_has_its_problem(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        CodeTests.from_text(text)
    assert "__init__" not in str(error.value)
