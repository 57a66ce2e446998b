"""Hostile answers to programming questions: none is correct, none escapes its verdict as unverified."""

import secrets

import numpy as np
import pytest
from attacks.attack import Attack, read_attacks
from attacks.catalog import CATEGORIES
from domains.code_answers import KINDS, fenced, question_of, verify

from brorl.prompts.code_tests import CallCases, StdinCases, TestCode
from brorl.verdict import Verdict
from brorl.verification.domains.code import CodeVerifier
from brorl.verification.sandbox.pool import ProgramPool

pytestmark = pytest.mark.linux

NUMBER = 40  # attacks per kind of tests, drawn anew in every run
FORGERS = tuple(
    attack
    for category in ("exits", "patches of the runner", "messages of the runner", "returned values")
    for attack in CATEGORIES[category]
)
DEFINED = "BREACH = 'breach'\n"


def verdicts(attacks: list[Attack], tests: CallCases | StdinCases | TestCode) -> dict[str, Verdict]:
    """Verify the sources of attacks as answers to one question."""
    items = [(question_of(tests), fenced(f"{DEFINED}{attack.source}")) for attack in attacks]
    with ProgramPool(num_workers=2) as pool:
        judged = CodeVerifier(pool, timeout_s=0.4).verify_all(items)
    return dict(zip((attack.name for attack in attacks), judged, strict=True))


def assert_wrong(verdicts: dict[str, Verdict]) -> None:
    assert {name: verdict for name, verdict in verdicts.items() if verdict.correct or verdict.score} == {}
    assert {name: verdict for name, verdict in verdicts.items() if verdict.unverified} == {}


def drawn(rng: np.random.Generator, calls: bool) -> list[Attack]:
    """Draw attacks that need no canaries."""
    fitting = [a for a in FORGERS if (a.function is not None) is calls and "syscall(" not in a.source]
    order = rng.permutation(len(fitting))[:NUMBER]
    return [fitting[i] for i in order]


def test_no_attack_forges_the_value_of_a_call(rng: np.random.Generator) -> None:
    expected = tuple(secrets.token_hex(8) for _ in range(2))  # nothing but the right values can be guessed
    assert_wrong(verdicts(drawn(rng, calls=True), CallCases("f", ((3,), (4,)), expected)))


@pytest.mark.slow
def test_no_attack_forges_the_output_of_a_program(rng: np.random.Generator) -> None:
    attacks = drawn(rng, calls=False)
    assert_wrong(verdicts(attacks, StdinCases(("3\n", "4\n"), (secrets.token_hex(8), secrets.token_hex(8)))))


@pytest.mark.slow
def test_no_attack_passes_assertions(rng: np.random.Generator) -> None:
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    asserts = f"    assert candidate(3) == {first!r}\n    assert candidate(4) == {second!r}\n"
    code = f"def check(candidate):\n{asserts}check(f)\n"
    assert_wrong(verdicts(drawn(rng, calls=True), TestCode("f", code)))


@pytest.mark.slow
def test_failures_cannot_name_themselves_unverified() -> None:
    attacks = [a for a in FORGERS if "unverified" in a.source]
    calls = [a for a in attacks if a.function is not None]
    programs = [a for a in attacks if a.function is None]
    assert min(len(calls), len(programs)) > 0
    assert_wrong(verdicts(calls, CallCases("f", ((3,),), ("x",))))
    assert_wrong(verdicts(programs, StdinCases(("3\n",), ("x",))))


RANDOM_TESTS = """
import random
for _ in range(3):
    numbers = list(range(50))
    random.shuffle(numbers)
    place = numbers.index(7)
    assert f(50) == place
assert f(0) == random.randrange(10**9)
"""
PREDICTION = """
import random
def f(n):
    if not n:
        return random.randrange(10**9)
    numbers = list(range(n))
    random.shuffle(numbers)
    return numbers.index(7)
"""


@pytest.mark.slow
def test_no_answer_draws_the_random_numbers_of_its_tests() -> None:
    """All programs start in one state of `random`; that of the test code is another one."""
    question = question_of(TestCode("f", RANDOM_TESTS))
    guesses = ["", *(f"import random\nrandom.seed({seed})\n" for seed in ("0", "None", "''", "'f'"))]
    with ProgramPool(num_workers=2) as pool:
        items = [(question, fenced(f"{guess}{PREDICTION}")) for guess in guesses]
        verdicts = CodeVerifier(pool, timeout_s=10.0).verify_all(items)
    assert [verdict.reason for verdict in verdicts] == ["wrong answer"] * len(guesses)


ATTACKS = {attack.name: attack.source for attack in read_attacks("answers")}


@pytest.mark.parametrize(
    "kind", ["stdin", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("calls", "parsed", "outside"))]
)
def test_no_answer_that_attacks_its_tests_passes(kind: str) -> None:
    question = question_of(KINDS[kind])
    right = "print(sum(map(int, input().split())))" if kind == "stdin" else "def add(a, b):\n    return a + b"
    with ProgramPool(num_workers=2) as pool:
        verdicts = CodeVerifier(pool, timeout_s=2.0).verify_all([(question, fenced(code)) for code in ATTACKS.values()])
        assert_wrong(dict(zip(ATTACKS, verdicts, strict=True)))
        assert verify(CodeVerifier(pool, timeout_s=10.0), question, right).correct
