"""Equal values and outputs: against tables by hand, Python's own equality, numpy, and exact fractions."""

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from brorl.prompts.code_tests import StdinCases
from brorl.verification.domains.code_calls import ExpectedCall, ValueRule
from brorl.verification.domains.code_judges import same_output
from brorl.verification.sandbox.values import decode, encode, size_of
from each_row import each_row

JSON = ValueRule(sequences_alike=True)


@each_row(
    ("expected", "value", "same"),
    [
        (1, 1, True), (1, 1.0, True), (2.0, 2, True), (1, True, False), (True, 1, False), (0, False, False),
        (True, True, True), (False, None, False), (None, None, True), (None, 0, False), ("1", 1, False),
        (1, "1", False), ("a", "a", True), ("a", b"a", False), (b"a", b"a", True), (1 + 0j, 1, True),
        (math.inf, math.inf, True), (math.inf, -math.inf, False), (math.nan, math.nan, True), (1.0, math.nan, False),
        (10**30, 1e30, False), (10**400, 1e308, False), (0.1 + 0.2, 0.3, False), ([1], (1,), False), ((1,), [1], False),
        ([1, [True]], [1, [1]], False), ([], [], True), ([1, 2], [1], False), ("ab", ["a", "b"], False),
        ({1, 2}, {2, 1.0}, True), ({1, 2}, frozenset({1, 2}), True), ({1}, {True}, False), ({1}, [1], False),
        ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"a": True}, False), ({1: "x"}, {True: "x"}, False),
        ({"a": 1}, {"b": 1}, False), ({"a": 1}, {"a": 1, "b": 2}, False), ({(1, 2): 3}, {(1, 2): 3}, True),
    ],
)  # fmt: skip
def test_types_and_values_count(expected: object, value: object, same: bool) -> None:
    assert ValueRule().same(expected, value) is same


@each_row(
    ("expected", "value", "same"),
    [
        ([1, [2, 3]], (1, (2, 3)), True), ([1, [2]], [1, (2,)], True), ([1], {1}, False), ([1], "1", False),
        ({"a": [1]}, {"a": (1,)}, True), ([True], (1,), False),
    ],
)  # fmt: skip
def test_json_has_no_tuples(expected: object, value: object, same: bool) -> None:
    assert JSON.same(expected, value) is same


def random_value(rng: np.random.Generator, depth: int = 3) -> object:
    kinds = [
        lambda: int(rng.integers(-2, 3)), lambda: float(rng.integers(-2, 3)), lambda: str(rng.choice(["", "a", "1"])),
        lambda: None, lambda: bytes(rng.integers(0, 2, size=1).tolist()),
    ]  # fmt: skip
    if depth:
        many = [random_value(rng, depth - 1) for _ in range(rng.integers(0, 3))]
        kinds += [lambda: many, lambda: tuple(many), lambda: dict(enumerate(many))]
    return kinds[rng.integers(len(kinds))]()


def test_without_bools_it_is_the_equality_of_python(rng: np.random.Generator) -> None:
    values = [random_value(rng) for _ in range(120)]
    num_equal = 0
    for one, other in itertools.product(values, repeat=2):
        num_equal += one == other
        assert ValueRule().same(one, other) is (one == other), (one, other)
    assert num_equal > 120


def test_order_can_be_left_out(rng: np.random.Generator) -> None:
    rule = ValueRule(sequences_alike=True, any_order=True)
    for _ in range(200):
        one = rng.integers(0, 3, size=rng.integers(0, 5)).tolist()
        other = rng.integers(0, 3, size=len(one) if rng.random() < 0.9 else 2).tolist()
        assert rule.same(one, other) is (sorted(one) == sorted(other))
    assert rule.same([[1, 2], [3]], ([3], (1, 2)))
    assert not rule.same([[1, 2]], [[2, 1]])  # an inner list keeps its order
    assert not rule.same([1, 1, 2], [1, 2, 2])
    assert not rule.same([True], [1])


@pytest.mark.slow
def test_elements_of_one_hash_do_not_slow_a_comparison() -> None:
    """Integers that are equal modulo 2**61 - 1 share their hash; a set of them takes quadratic time."""
    equal_hashes = [k * (2**61 - 1) for k in range(300_000)]
    expected = list(range(300_000))
    assert not ValueRule(any_order=True).same(expected, equal_hashes)


def test_tolerances_are_those_of_numpy(rng: np.random.Generator) -> None:
    for _ in range(300):
        absolute, relative = (10.0 ** rng.uniform(-9, -1, size=2)).tolist()
        expected = float(rng.normal() * 10 ** rng.uniform(-3, 3))
        value = expected + float(rng.normal()) * (absolute + relative * abs(expected))
        close = bool(np.isclose(value, expected, rtol=relative, atol=absolute))
        assert ValueRule(absolute, relative).same(expected, value) is close
    rule = ValueRule(0.5, 0.5)
    assert not rule.same(2, 3)  # integers have no tolerance
    assert not rule.same(10**400, 1.0)
    assert not rule.same(1.0, math.nan)
    assert not rule.same(1.0, math.inf)
    assert not rule.same(math.inf, 1.0)


def test_a_value_nested_far_deeper_than_expected_is_not_the_expected_one() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert not ValueRule().same([[1]], deep)
    assert not ValueRule(any_order=True).same([[1]], deep)


def rule(compare: str = "tokens", tolerance: float | None = None, ignore_case: bool = False) -> StdinCases:
    return StdinCases(("",), ("",), compare, tolerance, ignore_case)  # type: ignore[arg-type]


@each_row(
    ("cases", "expected", "output", "same"),
    [
        (rule(), "1 2\n3\n", "1 2 3", True), (rule(), "1 2\n", "1  2 \r\n\n", True), (rule(), "12", "1 2", False),
        (rule(), "", "\n", True), (rule(), "3", "3.0", False), (rule(), "YES", "yes", False), (rule(), "1", "", False),
        (rule(ignore_case=True), "YES", "yes\n", True), (rule("lines"), "1 2\n3", "1 2 \n3\n\n", True),
        (rule("lines"), "1 2\n3", "1 2 3", False), (rule("lines"), "1 2", "1  2", False),
        (rule("lines", 0.0), "1 2", "1.0  2", True), (rule("lines", 0.0), "1 2\n3", "1\n2 3", False),
        (rule("exact"), "1 2\n", "1 2", True), (rule("exact"), "1 2\n", "1 2 \n", False),
        (rule("exact"), "1\n", "1\r\n", True), (rule("exact"), "1\n", "1\n\n", False),
        (rule(tolerance=0.0), "3", "3.0", True), (rule(tolerance=0.0), "0.1", "1e-1", True),
        (rule(tolerance=0.0), "0.1", "0.10000001", False), (rule(tolerance=0.0), "1e5", "100000", True),
        (rule(tolerance=0.0), "9007199254740993", "9007199254740992", False),
        (rule(tolerance=1e-6), "0.3333333", "0.33333333", True), (rule(tolerance=1e-6), "0.333", "0.334", False),
        (rule(tolerance=1e-6), "1000000.0", "1000000.5", True), (rule(tolerance=1e-6), "1000000", "1000000.5", False),
        (rule(tolerance=1e-5), "1000000000000000000", "1e18", True),
        (rule(tolerance=1e-5), "1000000000000000001", "1e18", False), (rule(tolerance=1e-5), "3", "3.0000001", True),
        (rule(tolerance=1e-5), "3", "nan", False), (rule(tolerance=1e-5), "3.5", "inf", False),
        (rule(tolerance=1e-5), "nan", "nan", True), (rule(tolerance=0.9), "a", "b", False),
        (rule(tolerance=1e-5), "3", "\u0663", False), (rule(tolerance=1e-5), "1", "1_0", False),
        (rule(tolerance=1e-5), "1.0", "1e999999999", False), (rule(tolerance=1e-5), "1.5", "1" * 100_000, False),
    ],
)  # fmt: skip
def test_each_rule_of_outputs(cases: StdinCases, expected: str, output: str, same: bool) -> None:
    assert same_output(expected, output, cases) is same


def test_numbers_in_outputs_are_compared_exactly(rng: np.random.Generator) -> None:
    """Against fractions: decimals of random lengths around the allowed error."""
    tolerance = 2.0**-20
    for _ in range(300):
        expected = f"{rng.normal() * 10 ** rng.uniform(-2, 6):.{rng.integers(1, 12)}f}"
        output = repr(float(expected) + float(rng.normal()) * tolerance * max(1, abs(float(expected))))
        error = abs(Fraction(output) - Fraction(expected))
        close = error <= Fraction(tolerance) * max(1, abs(Fraction(expected)))
        assert same_output(expected, output, rule(tolerance=tolerance)) is close


def plain_value(random: Random, depth: int = 3) -> object:
    """Return an expected value of any plain type."""
    numbers = [random.randint(-9, 9), random.uniform(-9, 9), 10 ** random.randint(0, 40), 1.7e308, -5e-324, 1e300,
               random.choice([math.inf, -math.inf, math.nan, -0.0, 0]), complex(random.uniform(-1, 1), 1e-300),
               2**63 - 1, -(2**64), 0.1 * random.randint(-99, 99)]  # fmt: skip
    leaves = [*numbers, True, None, random.choice(["", 'a\n"\\', "\u00e9\U0001f600", "\0" * 9]), bytes(range(9))]
    if not depth or random.random() < 0.3:
        return random.choice(leaves)
    many = [plain_value(random, depth - 1) for _ in range(random.randint(0, 4))]
    hashable = [random.choice(leaves) for _ in range(random.randint(0, 4))]
    return random.choice(
        [many, tuple(many), set(hashable), frozenset(hashable), dict(zip(hashable, many, strict=False))]
    )


def other_form(value: object, random: Random, rule: ValueRule) -> object:
    """Return a value in another form that a comparison may accept, mostly."""
    if isinstance(value, list | tuple):
        items = [other_form(item, random, rule) for item in value]
        return tuple(items) if isinstance(value, tuple) != (random.random() < 0.5) else items
    if isinstance(value, set | frozenset):
        return random.choice([set, frozenset])(other_form(item, random, rule) for item in value)
    if isinstance(value, dict):
        return {other_form(key, random, rule): other_form(item, random, rule) for key, item in value.items()}
    if not isinstance(value, int | float | complex) or isinstance(value, bool):
        return value
    near = value
    if not isinstance(value, complex) and math.isfinite(value):
        scale = rule.absolute + rule.relative * abs(value)
        near = random.choice([value, float(value) + random.uniform(-0.9, 0.9) * float(scale)])
        forms = [near, float(near), int(near), round(near), complex(near), complex(near, -0.0)]
        return random.choice([*forms, complex(near, scale / 3)])
    return random.choice([near, complex(near)])


@pytest.mark.slow
def test_no_accepted_value_exceeds_the_size_that_is_read(rng: np.random.Generator) -> None:
    random = Random(int(rng.integers(2**32)))
    num_accepted = num_longer = num_more = 0
    for _ in range(4_000):
        rule = ValueRule(*random.choice([(0.0, 0.0), (1e-9, 1e-9), (0.01, 0.01)]), random.random() < 0.7)
        if random.random() < 0.3:
            rule = ValueRule(0.0, 0.0, rule.sequences_alike, any_order=True)
        expected = plain_value(random)
        check = ExpectedCall((), expected, rule, unwrap=random.random() < 0.3)
        value = other_form(expected, random, rule)
        if check.unwrap and isinstance(value, list | tuple) and len(value) == 1 and random.random() < 0.5:
            value = value[0]
        text = encode(value)
        if check.accepts(decode(text)):
            num_accepted += 1
            size, same = size_of(text.encode()), size_of(encode(expected).encode())
            num_longer += size.num_bytes > same.num_bytes
            num_more += size.num_parts > same.num_parts
            assert size.num_bytes <= check.max_size.num_bytes, (expected, value)
            assert size.num_parts <= check.max_size.num_parts, (expected, value)
    assert num_accepted > 1_000
    assert min(num_longer, num_more) > 100


def test_few_bytes_are_read_where_a_short_value_is_expected(rng: np.random.Generator) -> None:
    """The bound is some 64 bytes for a number, as a complex one takes, and the length of the text for other values."""
    for expected in (7, -0.5, True, None, "a" * 50, b"abc"):
        assert ExpectedCall((), expected).max_size.num_bytes <= 64
    numbers = rng.integers(-1000, 1000, size=1000).tolist()
    size = ExpectedCall((), numbers).max_size
    assert len(encode(numbers)) < size.num_bytes <= 66_000
    assert 1_000 <= size.num_parts <= 3_001
    assert ExpectedCall((), 1e300).max_size.num_bytes < 300
