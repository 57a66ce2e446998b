"""Written mathematics: values against Python's integers, fractions and decimals, sets against their members."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import comb, factorial

import numpy as np
import pytest

from brorl.verification.domains.formula.agreement import agree, is_readable
from brorl.verification.domains.formula.comparison import FormComparison
from brorl.verification.domains.formula.expressions import Form, Symbol, Text
from brorl.verification.domains.formula.normal import normal
from brorl.verification.domains.formula.numerals import spelled_number
from case_tables import table
from each_row import each_row


def agrees(reference: str, answer: str) -> bool:
    """Whether the values agree, even if the answer isn't evaluated."""
    return agree(reference, answer) in ("correct", "not evaluated")


def random_value(rng: np.random.Generator, depth: int) -> tuple[str, Fraction]:
    """An expression without variables, and its value."""
    if depth == 0:
        whole = int(rng.integers(1, 12))
        return str(whole), Fraction(whole)
    (one, a), (other, b) = (random_value(rng, depth - 1) for _ in range(2))
    match int(rng.integers(6)):
        case 0:
            return rf"\left({one}+{other}\right)", a + b
        case 1:
            return f"({one} - {other})", a - b
        case 2:
            return rf"{{{one}}} \cdot {{{other}}}", a * b
        case 3:
            return (rf"\frac{{{one}}}{{{other}}}", a / b) if b else (one, a)
        case 4:
            return f"({one})^{{2}}", a**2
        case _:
            return rf"\sqrt{{({one})^2}}", abs(a)


def test_numbers_are_equal_if_their_fractions_are(rng: np.random.Generator) -> None:
    equal = 0
    for _ in range(300):
        text, value = random_value(rng, int(rng.integers(1, 4)))
        other = value if rng.random() < 0.5 else value + Fraction(1, int(rng.integers(1, 10**9)))
        written = f"{other.numerator}/{other.denominator}" if rng.random() < 0.5 else f"x = {other}"
        assert agrees(text, written) == (value == other), (text, written)
        equal += value == other
    assert 100 < equal < 220


def test_a_number_with_an_operation_left_is_not_evaluated(rng: np.random.Generator) -> None:
    """A fraction of whole numbers and a power of ten are evaluated. So is a chain that ends in the number."""
    reasons = set()
    for _ in range(100):
        text, value = random_value(rng, int(rng.integers(0, 3)))
        is_fraction = re.fullmatch(r"\\frac\{\d+\}\{\d+\}", text) and value.denominator > 1
        is_evaluated = is_fraction or text.isdigit() or text == "(10)^{2}"
        reasons.add(agree(str(value), text))
        assert agree(str(value), text) == ("correct" if is_evaluated else "not evaluated"), text
        assert agree(str(value), f"{text} = {value}") == "correct"
        assert agree(str(value + 1), text) == "wrong answer"
    assert reasons == {"correct", "not evaluated"}


@each_row(*table(__file__, "numbers_are_evaluated"))
def test_numbers_are_evaluated(reference: str, answer: str, reason: str) -> None:
    assert agree(reference, answer) == reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"2^{100}\cdot 3^{-60}", Fraction(2**100, 3**60)),
        (r"\frac{1}{200!}", Fraction(1, factorial(200))),
        (r"1-\frac{365!}{342!\cdot 365^{23}}", 1 - Fraction(factorial(365), factorial(342) * 365**23)),
        (r"\binom{300}{150}", Fraction(comb(300, 150))),
        (r"\frac{2^{100}-1}{2^{100}}", 1 - Fraction(1, 2**100)),
    ],
)
def test_large_and_small_numbers_are_exact(text: str, value: Fraction) -> None:
    """The least change of the numerator is another number."""
    for change in (-1, 0, 1):
        answer = rf"\frac{{{value.numerator + change}}}{{{value.denominator}}}"
        assert agrees(text, answer) == (change == 0)
        assert agrees(answer, text) == (change == 0)


@each_row(*table(__file__, "numbers_beyond_floats_are_compared"))
def test_numbers_beyond_floats_are_compared(one: str, other: str, equal: bool) -> None:
    assert agrees(one, other) == equal


def test_polynomials_are_equal_to_their_expansions(rng: np.random.Generator) -> None:
    """The coefficients are those of numpy's polynomials; one more in one of them is another polynomial."""
    for _ in range(30):
        roots = rng.integers(-6, 7, size=int(rng.integers(2, 5)))
        coefficients = np.polynomial.polynomial.polyfromroots(roots).round().astype(int)
        factors = "".join(f"(x {-root:+d})" for root in roots)
        for change in (0, 1):
            coefficients[int(rng.integers(len(coefficients)))] += change
            expanded = "".join(f"{c:+d}x^{{{power}}}" for power, c in enumerate(coefficients))
            assert agrees(factors, expanded) == (change == 0), (factors, expanded)


@each_row(*table(__file__, "formulas_agree_beyond_their_breaks"))
def test_formulas_agree_beyond_their_breaks(reference: str, answer: str, equal: bool) -> None:
    assert agrees(reference, answer) == equal


@each_row(*table(__file__, "notation_is_read"))
def test_notation_is_read(reference: str, answer: str, equal: bool) -> None:
    assert agrees(reference, answer) == equal


@each_row(*table(__file__, "commas_and_digits"))
def test_commas_and_digits(reference: str, answer: str, equal: bool) -> None:
    assert agrees(reference, answer) == equal


def test_sums_of_absolute_values_are_equal_if_they_are_on_a_grid(rng: np.random.Generator) -> None:
    """Their breaks lie anywhere below 1,000; an answer may be right on one side of some of them only."""
    grid = np.arange(-1_200.0, 1_200.0, 0.5)
    equal = 0
    for _ in range(16):
        breaks = rng.integers(-1_000, 1_000, size=3)
        first, other = rng.integers(-2, 3, size=(2, 3))
        other = first if rng.random() < 0.4 else other
        texts, values = [], []
        for weights in (first, other):
            texts.append("".join(f"{w:+d}|x {-b:+d}|" for w, b in zip(weights, breaks, strict=True)))
            values.append(sum(w * abs(grid - b) for w, b in zip(weights, breaks, strict=True)))
        at = int(np.searchsorted(grid, breaks.min())) - 2  # the line to the left of all breaks
        slope = (values[0][at] - values[0][at - 1]) / 0.5
        texts.append(f"{slope:.0f}x + {values[0][at] - slope * grid[at]:.0f}")
        values.append(values[0][at] + slope * (grid - grid[at]))
        for text, value in zip(texts[1:], values[1:], strict=True):
            same = bool(np.allclose(values[0], value))
            assert agrees(texts[0], text) == same, (texts[0], text)
            equal += same
    assert 3 < equal < 20


@each_row("sign", [", ", " or "])
def test_long_lists_of_two_signs_take_few_comparisons(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of a list of 99 numbers are not compared each with each."""
    calls = 0
    original = FormComparison.same

    def counting(self: FormComparison, right: Form, given: Form) -> bool:
        nonlocal calls
        calls += 1
        return original(self, right, given)

    monkeypatch.setattr(FormComparison, "same", counting)
    several = sign.join(rf"\pm {k}" for k in range(50))
    assert agrees(several, ", ".join(map(str, range(-49, 50))))
    assert not agrees(several, ", ".join(map(str, range(-49, 51))))
    assert calls < 1_000


def random_union(rng: np.random.Generator) -> list[tuple[int, bool, int, bool]]:
    """Intervals between whole numbers: low, closed, high, closed."""
    ends = sorted(rng.choice(np.arange(-9, 10), size=2 * int(rng.integers(1, 4)), replace=False).tolist())
    return [(low, rng.random() < 0.5, high, rng.random() < 0.5) for low, high in list(pairwise(ends))[::2]]


def contains(union: list[tuple[int, bool, int, bool]], x: float) -> bool:
    return any(low < x < high or (x == low and a) or (x == high and b) for low, a, high, b in union)


def test_unions_are_equal_if_they_have_the_same_members(rng: np.random.Generator) -> None:
    equal = 0
    for _ in range(200):
        one = random_union(rng)
        other = one if rng.random() < 0.5 else random_union(rng)
        brackets = [f"{'[' if a else '('}{low},{high}{']' if b else ')'}" for low, a, high, b in one]
        rng.shuffle(brackets)
        signs = ("<", r"\le")
        orders = [f"{low} {signs[a]} x {signs[b]} {high}" for low, a, high, b in other]
        same = all(contains(one, x) == contains(other, x) for x in np.arange(-10, 10.5, 0.5).tolist())
        assert agrees(r" \cup ".join(brackets), r" \text{ or } ".join(orders)) == same, (brackets, orders)
        equal += same
    assert 80 < equal < 160


def test_a_decimal_has_six_places_or_is_wrong(rng: np.random.Generator) -> None:
    """By Python's decimals: the nearest one with six places is right, the next ones are not."""
    for _ in range(50):
        value = Fraction(int(rng.integers(1, 10**6)), int(rng.integers(7, 10**4)) * 10 + 7)
        places = Decimal(round(value * 10**6)) / 10**6
        if value < Fraction(1, 100) or value.denominator == 1:
            continue
        for change in (-1, 0, 1):
            answer = f"{places + Decimal(change) / 10**6:f}"
            assert agrees(rf"\frac{{{value.numerator}}}{{{value.denominator}}}", answer) == (change == 0)


TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
ONES = [*f"zero one two three four five six seven eight nine {TEENS}".split()]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spelled(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    for size, name in ((10**6, "million"), (1_000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {spelled(number % size)}" if number % size else ""
            return f"{spelled(number // size)} {name}{rest}"
    raise AssertionError


def test_spelled_numbers(rng: np.random.Generator) -> None:
    for number in [*range(130), *rng.integers(100, 10**8, size=200).tolist()]:
        assert spelled_number(spelled(number)) == number
    for words in ("", "one two", "twenty thirty", "hundred", "ten one", "and", "one and two", "thousand million"):
        assert spelled_number(words) is None


def test_words_are_no_units() -> None:
    """Beside a number, nouns and units belong to it; operators, numerals, times and hedges change it."""
    right = "apples|people|km/h|square units|dollars|different ways|cm^2|years old|nd|in total"
    wrong = "minus one|squared|thousand|k|AM|May|or so|if lucky|tenths|percent off|factorial|maybe|not|hexadecimal"
    for words in right.split("|"):
        assert agrees("42", rf"42\text{{ {words}}}".replace(" nd", "nd")), words
    for words in wrong.split("|"):
        assert not agrees("42", rf"42\text{{ {words}}}"), words


@each_row(
    "junk",
    [
        r"12\%print(input())", "1 1e-99999999/7", "3.5e-10**10**104", "35" + "%" * 400, r"\pi/4" * 200, "gcd()", "((((",
        r"\pm(2:3)", r"-\text{one and a half}", r"\{1exit(),23\}", "\\", "^^", "'", "a_", r"\frac", "9" * 1_999,
        "2" + "/2" * 900, "2" + "^2" * 900, r"\sqrt" * 300 + "x", "1" + "," * 1_900,
        r"1\frac{" * 30 + "x" + "}{x}" * 30,
    ],
)  # fmt: skip
def test_junk_is_no_answer_and_raises_nothing(junk: str) -> None:
    for reference in ("42", r"\frac{3}{2}", "x+1", r"\{1,2\}", "x = 3", junk):
        assert junk == reference or not agrees(reference, junk)
    is_readable(junk)


@pytest.mark.parametrize("first", [Symbol("k"), Text("k")])
def test_words_and_a_symbol_of_one_name_stay_apart(first: Form) -> None:
    """Results are cached, so one must not be found under the key of the other."""
    normal.cache_clear()
    forms = (first, Text("k"), Symbol("k"))
    assert [type(normal(form)) for form in forms] == [type(form) for form in forms]
