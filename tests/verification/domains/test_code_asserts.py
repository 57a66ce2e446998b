"""Test code with asserted literals as checks, and the loops of evalplus: against the same code executed here."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from code_answers import verify
from evalplus_sources import IS_FLOATS, PLAIN

from brorl.prompts.code_tests import TestCode
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.domains.code_calls import parse_calls
from brorl.verification.sandbox.pool import ProgramPool
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


def passes_here(code: str, function: Callable[..., object]) -> bool:
    """Whether the code passes, by executing it."""
    try:
        exec(code, {"f": function, "candidate": function, "math": math})
    except (AssertionError, TypeError):
        return False
    return True


def passes_checks(code: str, function: Callable[..., object]) -> bool:
    checks = parse_calls(TestCode("f", code))
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


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with ProgramPool(1) as pool:
        yield CodeVerifier(pool, timeout_s=10.0)


FLOATS = {"inputs": [[1.5], [2.0]], "results": [1.0, [0.5, -2.0]], "atol": 0}
EXACT = {"inputs": [[1], [2]], "results": [(1, "x"), {1: 2}], "atol": 0}
SET = {"inputs": [[1]], "results": [(3, 4)], "atol": 0}


@pytest.mark.linux
@pytest.mark.parametrize("form", [HUMAN_EVAL, MBPP], ids=["HumanEval+", "MBPP+"])
@pytest.mark.parametrize(
    ("aux", "data", "values"),
    [
        (PLAIN, FLOATS, ("1.0, [0.5, -2.0]", "1 + 1e-8, (0.5, -2 - 1e-8)", "1 + 1e-4, [0.5, -2.0]", "1.0, 0.5")),
        (OLD_PLAIN, FLOATS, ("1.0, [0.5, -2.0]", "1.0, [0.5001, -2.0]")),
        (PLAIN, EXACT, ("(1, 'x'), {1: 2}", "[1, 'x'], {1: 2}", "(1, 'x'), {1: 3}", "(1, 'x'), None")),
        (SETS, SET, ("(4, 3), 0", "[3, 4, 4], 0", "{3, 4}, 0", "[3], 0", "[3, 4, 5], 0", "3, 0")),
    ],
    ids=["floats", "numpy.testing", "exact", "sets"],
)
def test_loops_of_evalplus_decide_as_they_do(
    verifier: CodeVerifier, form: str, aux: str, data: dict[str, object], values: tuple[str, ...]
) -> None:
    """In a process without the answer; but a shape is not broadcast, as numpy would."""
    code = form.format(aux=IS_FLOATS + aux, **data)
    assert parse_calls(TestCode("f", code)) is None
    outcomes = []
    for value in values:
        answer = f"def f(x):\n    return ({value})[x == 2]"
        names: dict[str, Callable[..., object]] = {}
        exec(answer, names)
        outcomes.append(verify(verifier, TestCode("f", code), answer).reason == "correct")
        assert outcomes[-1] is passes_here(code, names["f"]), value
    assert {*outcomes} == {True, False}


@pytest.mark.linux
def test_optional_values_of_mbpp_are_compared(verifier: CodeVerifier) -> None:
    """The function of the dataset computes a comparison and does not assert it."""
    code = MBPP.format(aux=NOT_NONE, inputs=[["a"], ["b"]], results=[True, False], atol=0)
    assert passes_here(code, lambda _: "anything")
    for one, other, same in (
        ("True", "False", True), ("'match'", "None", True), ("True", "True", False), ("None", "None", False),
        ("'match'", "'match'", False), ("__import__('re').match('a', x)", "None", True),
        ("__import__('re').match('a', x)", "__import__('re').match('b', x)", False),
    ):  # fmt: skip
        verdict = verify(verifier, TestCode("f", code), f"def f(x):\n    return {one} if x == 'a' else {other}")
        assert verdict.reason == ("correct" if same else "wrong answer"), (one, other)


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
        "assert math.isclose(f(1), 1.5)", "assert f(1) == [...]",
        "while True:\n    f(1)", "assert f(1) == (", "assert " + "(" * 500 + "f(1)" + ")" * 500,
        HUMAN_EVAL.format(aux=IS_FLOATS + PLAIN, inputs=[[1]], results=[1], atol=0), "assert f(1)", "assert not f(1)",
        "assert set(f(1)) == set((1, 2))", "assert abs(f(1) - 0.5) < 1e-6", "x = [1]\nassert f(1) == x",
    ],
)  # fmt: skip
def test_anything_else_is_left_to_a_process(code: str) -> None:
    assert parse_calls(TestCode("f", f"{code}\n# f")) is None


@pytest.mark.slow
def test_a_literal_is_what_python_evaluates(rng: np.random.Generator) -> None:
    """Random nested literals, with the signs and calls that `repr` writes."""

    def literal(depth: int) -> str:
        parts = [literal(depth - 1) for _ in range(rng.integers(0, 3))] if depth else []
        listed, tupled = f"[{', '.join(parts)}]", f"({''.join(part + ', ' for part in parts)})"
        forms = [repr(float(rng.normal())), repr(complex(*rng.normal(size=2))), repr(int(rng.integers(-9, 9))), "None",
                 "'x'", "b'y'", "set()", listed, tupled]  # fmt: skip
        return str(rng.choice(np.array(forms, dtype=object)))

    for _ in range(200):
        text = literal(3)
        checks = parse_calls(TestCode("f", f"assert f({text}) == {text}"))
        assert checks is not None, text
        value = eval(text)
        assert repr(checks[0].arguments[0]) == repr(checks[0].expected) == repr(value)
