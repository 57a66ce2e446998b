"""Test code as checks: against the same code executed here, on right and wrong values."""

import ast
import math
from collections.abc import Callable

import numpy as np
import pytest
from evalplus_sources import IS_FLOATS, PLAIN

from brorl.prompts.code_tests import TestCode
from brorl.verification.domains.code_checks import parse_checks
from case_tables import table
from each_row import each_row

OLD_PLAIN = PLAIN.replace(
    "assert np.allclose(out, exp, rtol=1e-07, atol=atol)", "np.testing.assert_allclose(out, exp, atol=atol)"
)
SETS = '''
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    out = set(out)
    exp = set(exp)
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
'''  # fmt: skip
NOT_NONE = '''
def assertion(out, exp, atol):
    if isinstance(out, bool):
        exact_match = out == exp
    else:
        exact_match = exp == (out is not None)
'''  # fmt: skip
HUMAN_EVAL = """
import numpy as np
{aux}

def check(candidate):
    inputs = {inputs}
    results = {results}
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, {atol})

check(candidate)
"""
MBPP = """
import numpy as np
from math import inf
{aux}

inputs = {inputs}
results = {results}
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(f(*inp), exp, {atol})
"""


def parsed(code: str) -> bool:
    return parse_checks(TestCode("f", code)) is not None


def passes_here(code: str, function: Callable[..., object]) -> bool:
    """Whether the code passes, by executing it."""
    try:
        exec(code, {"f": function, "candidate": function, "math": math})
    except (AssertionError, TypeError):
        return False
    return True


def passes_checks(code: str, function: Callable[..., object]) -> bool:
    checks = parse_checks(TestCode("f", code))
    assert checks is not None, code
    return all(check.accepts(function(*check.arguments)) for check in checks)


@each_row(*table(__file__, "each_form_decides_as_python_does"))
def test_each_form_decides_as_python_does(code: str) -> None:
    """On the expected value, on values near it, and on values of other types."""
    code = f"from math import inf\n{code}"
    values = [1, [1, (2, "x"), {3: {4}}, None, b"z", -1.5], None, True, False, 1.5, 1.5000000001, 2.55, 2.7, 0.5, 0.51,
              (1, 2), [2, 1, 1], {1, 2}, set(), -math.inf, math.inf, 1 + 2j, frozenset({1}), [1, 2], "ab", (), "",
              {"a": [1.5]}, {"a": [2]}, [1, [2, "x"], {3: {4}}, None, b"z", -1.5], 0, 2]  # fmt: skip
    outcomes = set()
    for value in values:
        if isinstance(value, bool) or value == 1 or value == 0:
            continue  # True is 1 for Python
        outcome = passes_checks(code, lambda _, value=value: value)
        outcomes.add(outcome)
        assert outcome is passes_here(code, lambda _, value=value: value), value
    assert False in outcomes


def test_true_is_not_one() -> None:
    assert not passes_checks("assert f(0) == 1", lambda _: True)
    assert not passes_checks("assert f(0) == True", lambda _: 1)
    assert passes_checks("assert f(0) == True", lambda _: True)
    assert passes_checks("assert f(0)", lambda _: 1)  # truth is not equality


@each_row(
    ("code", "value", "is_parsed"),
    [
        ("assert abs(f(3) - 10) <= 1", 11, False), ("assert math.isclose(f(3), 1000, rel_tol=0.01)", 1001, False),
        ("assert math.isclose(f(3), 99, rel_tol=0.01)", 100, False), ("assert abs(f(3) - 10.0) <= 1", 11, True),
        ("assert math.isclose(f(3), 1000000000)", 1000000001, False),
        ("assert abs(f(1) - (1+2j)) < 1e-6", 1.0000000001 + 2j, False), ("assert abs(f(1) - True) < 0.1", 1.0, False),
        ("assert abs(f(3) - 10) < 0.5", 10.25, True), ("assert math.isclose(f(3), 10)", 10, True),
    ],
)  # fmt: skip
def test_a_tolerance_holds_for_integers_and_complex_numbers(code: str, value: object, is_parsed: bool) -> None:
    """Code whose tolerance lets one integer pass for another is left to a process, which decides as Python does."""
    assert passes_here(code, lambda _: value)
    assert parsed(code) is is_parsed
    assert not is_parsed or passes_checks(code, lambda _: value)


@pytest.mark.parametrize("form", [HUMAN_EVAL, MBPP])
@pytest.mark.parametrize("aux", [PLAIN, OLD_PLAIN])
def test_loops_of_evalplus_decide_as_they_do(form: str, aux: str, rng: np.random.Generator) -> None:
    outcomes = []
    for _ in range(20):
        inputs = [[float(x), int(n)] for x, n in zip(rng.normal(size=3), rng.integers(0, 9, size=3), strict=True)]
        results = [[x * n, -x] if rng.random() < 0.5 else x + n for x, n in inputs]
        code = form.format(aux=IS_FLOATS + aux, inputs=inputs, results=results, atol=float(rng.choice([0, 1e-4])))
        error = float(rng.choice([0, 1e-9, 1e-5, 1e-3]))
        table = {tuple(one): result for one, result in zip(inputs, results, strict=True)}

        def function(*arguments: float, table: dict[object, object] = table, error: float = error) -> object:
            result = table[arguments]
            return [part + error for part in result] if isinstance(result, list) else result + error  # type: ignore[operator]

        outcomes.append(passes_checks(code, function))
        assert outcomes[-1] is passes_here(code, function)
    assert {True, False} == {*outcomes}


def test_exact_results_of_evalplus() -> None:
    for expected, wrong in (([1, 2], (1, 2)), ("a", "b"), ((1, "x"), [1, "x"]), ({1: 2}, {1: 3}), (None, [])):
        code = HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN, inputs=[[1]], results=[expected], atol=0)
        assert passes_checks(code, lambda _, expected=expected: expected)
        assert passes_here(code, lambda _, expected=expected: expected)
        assert not passes_checks(code, lambda _, wrong=wrong: wrong)
        assert not passes_here(code, lambda _, wrong=wrong: wrong)


def test_a_shape_is_not_broadcast() -> None:
    """numpy would find the number close to each element of the list."""
    code = HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN, inputs=[[1]], results=[[2.0, 2.0]], atol=0)
    assert passes_here(code, lambda _: 2.0)
    assert not passes_checks(code, lambda _: 2.0)


def test_sets_of_mbpp() -> None:
    code = MBPP.format(aux=IS_FLOATS + SETS, inputs=[[1]], results=[(3, 4)], atol=0)
    for value, same in (
        ((4, 3), True),
        ([3, 4, 4], True),
        ({3, 4}, True),
        ([3], False),
        ([3, 4, 5], False),
        (3, False),
    ):
        assert passes_checks(code, lambda _, value=value: value) is same
        assert passes_here(code, lambda _, value=value: value) is same


def test_optional_values_of_mbpp_are_compared() -> None:
    """The function of the dataset computes a comparison and does not assert it."""
    code = MBPP.format(aux=NOT_NONE, inputs=[[1], [2]], results=[True, False], atol=0)
    assert passes_here(code, lambda _: "anything")
    for one, other, same in (
        (True, False, True), ("match", None, True), (True, True, False), (None, None, False), ("match", "match", False),
    ):  # fmt: skip
        assert passes_checks(code, lambda n, one=one, other=other: one if n == 1 else other) is same


@each_row(
    "code",
    [
        "assert f(object()) == 1", "assert f(x) == 1", "assert f(1, key=2) == 1", "assert f(1) + 1 == 2",
        "assert sorted(f(1)) == [1]", "for x in [1]:\n    assert f(x) == x", "x = f(1)\nassert x == 1", "del f",
        "try:\n    f(1)\nexcept ValueError:\n    pass", "assert f(*[1]) == 1", "assert f(1) != 1",
        "assert g(f(1)) == 1",
        "def check(candidate):\n    assert candidate(1) == 1", "assert f(1) == 10 ** 10", "assert f(f(1)) == 1", "",
        "assert f(1) == [x for x in range(3)]", "assert f(1) == 1 == 1", "assert f(1) == ...", "if True:\n    pass",
        "assert (f(1) == 1) is False", "assert f(1) == {**{}}", "def check(c, candidate):\n    pass\ncheck(f)",
        f"assert math.isclose(f(1), {10**400})", f"assert abs(f(1) - 1.5) < {10**400}",
        "while True:\n    f(1)", "assert f(1) == (", "assert " + "(" * 500 + "f(1)" + ")" * 500,
        HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN.replace("assert exact_match", "assert sorted(out) == sorted(exp)"),
                          inputs=[[1]], results=[1], atol=0),
        HUMAN_EVAL.format(aux="def assertion(out, exp, atol): pass", inputs=[[1]], results=[1], atol=0),
        HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN, inputs=[[1], [2]], results=[1], atol=0),
        HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN, inputs=[[1]], results=[1], atol="tolerance"),
    ],
)  # fmt: skip
def test_anything_else_is_left_to_a_process(code: str) -> None:
    assert parse_checks(TestCode("f", f"{code}\n# f")) is None


def test_a_literal_is_what_python_evaluates(rng: np.random.Generator) -> None:
    """Random nested literals, with the signs and calls that `repr` writes."""

    def literal(depth: int) -> str:
        parts = [literal(depth - 1) for _ in range(rng.integers(0, 3))] if depth else []
        listed, tupled = f"[{', '.join(parts)}]", f"({''.join(part + ', ' for part in parts)})"
        forms = [repr(float(rng.normal())), repr(complex(*rng.normal(size=2))), repr(int(rng.integers(-9, 9))), "None",
                 "'x'", "b'y'", "-inf", "set()", listed, tupled]  # fmt: skip
        return str(rng.choice(np.array(forms, dtype=object)))

    for _ in range(200):
        text = literal(3)
        checks = parse_checks(TestCode("f", f"assert f({text}) == {text}"))
        assert checks is not None, text
        value = eval(text, {"inf": math.inf})
        assert repr(checks[0].arguments[0]) == repr(checks[0].expected) == repr(value)


def test_the_code_is_not_executed() -> None:
    code = "import nothing_of_this_name\nassert f(1) == 1"
    assert parsed(code)
    assert isinstance(ast.parse(code), ast.Module)
