"""Test code that expects exceptions of the answer, in real sandboxed processes."""

from collections.abc import Iterator

import pytest
from code_answers import verify

from brorl.prompts.code_tests import CallCases, TestCode
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.sandbox.pool import ProgramPool
from case_tables import table

pytestmark = pytest.mark.linux

RAISES = """\
def check(candidate):
    for k in range(3):
        assert candidate(k) == k * k
    try:
        candidate(-1)
        assert False, "no exception"
    except ValueError as error:
        assert "negative" in str(error)
    assert candidate(4) == 4 * 4

check(candidate)
"""
ANY = "assert f(2) == 2 + 2\ntry:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError\n"
KEYS = """try:
    f(-1)
except KeyError as error:
    assert error.args == ("x",)
"""
BARE = KEYS.replace("KeyError", "ValueError").replace('("x",)', "()")
MAPPED = "for value, expected in zip(map(f, range(5)), [k * k for k in range(5)]):\n    assert value == expected\n"
GUARDED = "try:\n    import decimal\n    assert f(3) == decimal.Decimal(9)\nexcept ImportError:\n    pass\n"
UNCAUGHT = "assert f(2) == 2 * 2\nassert f(-1) == 1 * 1\n"


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with ProgramPool(2) as pool:
        yield CodeVerifier(pool, timeout_s=10.0)


def squares(otherwise: str) -> str:
    """Return a function of squares that does something else with negative numbers."""
    return f"def f(x):\n    if x < 0:\n        {otherwise}\n    return x * x"


@pytest.mark.parametrize(
    ("test", "otherwise", "reason"),
    [
        (RAISES, "raise ValueError(f'{x} is negative')", "correct"),
        (RAISES, "raise ValueError('no')", "wrong answer"),  # of the assertion on the message
        (RAISES, "raise TypeError('negative')", "raised TypeError"),  # not caught
        (RAISES, "pass", "wrong answer"),
        (RAISES, "raise SystemExit('negative')", "exited"),
        (RAISES, "raise type('ValueError', (Exception,), {})('negative')", "raised ValueError"),
        (RAISES, "raise ValueError('negative\\nSystemExit: 0')", "correct"),
        (KEYS, "raise KeyError('x')", "correct"),
        (KEYS, "raise KeyError(x)", "wrong answer"),
        (BARE, "raise ValueError", "correct"),
        (BARE, "raise ValueError('x')", "wrong answer"),
        (ANY, "assert x > 0, x", "correct"),
        (ANY, "return {}[x]", "correct"),
        (ANY, "return 1 // (x + 1)", "correct"),
        (ANY, "return f(x)", "raised RecursionError"),
        (UNCAUGHT, "raise ValueError", "raised ValueError"),
        (UNCAUGHT, "raise AssertionError", "raised AssertionError"),
    ],
)
def test_an_exception_reaches_the_test_code(verifier: CodeVerifier, test: str, otherwise: str, reason: str) -> None:
    verdict = verify(verifier, TestCode("f", test), squares(otherwise))
    assert verdict.reason == reason
    assert verdict.correct is (reason == "correct")


@pytest.mark.parametrize(*table(__file__, "no_exception_ends_the_test_code_as_passed"))
def test_no_exception_ends_the_test_code_as_passed(verifier: CodeVerifier, code: str) -> None:
    """A StopIteration would end the loop over `map`, and an ImportError would skip the guarded assertion."""
    for test in (MAPPED, GUARDED):
        verdict = verify(verifier, TestCode("f", test), code)
        assert not verdict.correct, verdict
        assert not verdict.unverified, verdict
    assert verify(verifier, TestCode("f", MAPPED), squares("pass")).correct
    assert verify(verifier, TestCode("f", GUARDED), squares("pass")).correct


@pytest.mark.slow
def test_calls_without_end_after_caught_exceptions_time_out() -> None:
    code = "while True:\n    try:\n        assert f(1) == 1 + 0\n        break\n    except ValueError:\n        pass\n"
    with ProgramPool(1) as pool:
        verdict = verify(CodeVerifier(pool, 0.2), TestCode("f", code), "def f(x):\n    raise ValueError")
    assert verdict.reason == "timeout"


@pytest.mark.slow
def test_a_breach_of_the_protocol_costs_its_case_alone() -> None:
    """With partial credit: the cases after it run in a new process."""
    number = 6
    cases = CallCases("f", tuple((k,) for k in range(number)), tuple(range(number)))
    code = "import os\ndef f(x):\n    if x == 2:\n        os.write(63, b'x' * 9 + bytes(4))\n    return x"
    with ProgramPool(1) as pool:
        verdict = verify(CodeVerifier(pool, 10.0, partial_credit=True), cases, code)
    assert verdict.reason == "broke the sandbox protocol"
    assert verdict.score == (number - 1) / number
