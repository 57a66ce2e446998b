"""The calculator: against exact fractions on random expressions, and on expressions that are hostile or wrong."""

import time
from fractions import Fraction

import numpy as np
import pytest

from brorl.tools.calculator import calculator


def expression(rng: np.random.Generator, depth: int) -> tuple[str, Fraction]:
    """Return a random expression of integers and its value."""
    if depth == 0 or rng.random() < 0.2:
        number = int(rng.integers(10**9)) ** int(rng.integers(1, 4))
        return str(number), Fraction(number)
    (left, a), (right, b) = expression(rng, depth - 1), expression(rng, depth - 1)
    sign = str(rng.choice(["+", "-", "*", "//", "%", "/", "**"]))
    if sign in ("//", "%") and b:
        return f"(({left}) {sign} ({right}))", Fraction(a // b) if sign == "//" else a % b
    if sign == "/":  # exact, because the other factor is divided out
        return f"(({left})*({right or 1}))/({right})" if b else left, a
    if sign == "**":
        return f"-({left})**2", -(a**2)
    value = {"+": a + b, "-": a - b}.get(sign, a * b)
    return f"(({left}){sign if sign in '+-' else '*'}({right}))", value


def test_integer_arithmetic_is_exact(rng: np.random.Generator) -> None:
    largest = 0
    for _ in range(300):
        text, value = expression(rng, 3)
        if len(text) > 1000 or abs(value) > 10**600:
            continue
        found = calculator(text)
        assert type(found) is int, text
        assert found == value, text
        largest = max(largest, abs(found))
    assert largest > 2**64


def test_other_numbers_are_those_of_python(rng: np.random.Generator) -> None:
    for a, b in rng.normal(size=(100, 2)) * 100:
        for sign in ("+", "-", "*", "/", "//", "%"):
            assert calculator(f"{a} {sign} -{abs(b)}") == eval(f"{a} {sign} -{abs(b)}")
    assert calculator("7 / 2") == 3.5
    assert calculator(" 2**-2 ") == 0.25
    assert calculator("(-1)**(10**300)") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9**9**9", "too large"), ("9**9**9**9 - 9**9**9**9", "too large"), ("(" + "9" * 400 + ")**4*10", "too large"),
        ("9**1000 * 9**1000", "too large"), ("1e308*10", "too large"), ("2.0**99999", "too large"),
        ("10**400/3", "too large for a float"), ("1/0", "division by zero"), ("5 % 0", "by zero"),
        ("(-8)**0.5", "not a real number"), ("2^3", "as **, not ^"), ("1,000 + 2", "without commas"),
        ("__import__('os').getpid()", "only arithmetic"), ("x + 1", "only arithmetic"), ("True + 1", "only arithmetic"),
        ("'a' * 9", "only arithmetic"), ("[1] * 9", "only arithmetic"), ("1 if 1 else 2", "only arithmetic"),
        ("1j", "only arithmetic"), ("1 << 9", "only arithmetic"), ("(x := 3)", "only arithmetic"),
        ("", "not an arithmetic expression"), ("2 +", "not an arithmetic expression"), ("\0", "not an arithmetic"),
        ("\ud800", "not an arithmetic"), ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("1" * 1001, "more than 1,000 characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_at_once(text: str, said: str) -> None:
    start = time.process_time()
    with pytest.raises((ValueError, ArithmeticError)) as error:
        calculator(text)
    assert said in str(error.value)
    assert time.process_time() - start < 1
