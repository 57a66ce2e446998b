"""Numbers as text, against the decimal digits of the values."""

import re
from decimal import Decimal
from math import inf

import numpy as np
import pytest

from brorl.format import (
    Estimate,
    counted,
    duration,
    exact,
    in_seconds,
    interval,
    memory_size,
    p_value,
    plain,
    probability,
    short,
    short_time,
    signed,
)
from each_row import each_row


@each_row(
    ("value", "text"),
    [(1120, "1,120"), (1234.5, "1,234"), (40.0, "40"), (12.5, "12.5"), (0.3512, "0.351"), (9.996, "10"), (2.0, "2"),
     (0, "0"), (-1e6, "-1,000,000"), (1.23e-5, "0.0000123"), (inf, "inf")],
)  # fmt: skip
def test_plain(value: float, text: str) -> None:
    assert plain(value) == text


def test_plain_has_no_exponent_and_three_digits(rng: np.random.Generator) -> None:
    for value in (10 ** rng.uniform(-8, 12, 300)).tolist():
        text = plain(value)
        assert re.fullmatch(r"\d{1,3}(,\d{3})*(\.\d*[1-9])?", text), text
        whole = Decimal(repr(value)).quantize(1) if value >= 100 else None
        told = Decimal(text.replace(",", ""))
        assert told == whole if whole is not None else abs(told - Decimal(value)) <= Decimal(value) * Decimal("0.0051")


def test_exact_is_read_as_the_same_number(rng: np.random.Generator) -> None:
    assert [exact(value) for value in (2e6, 1e22, 2.5, 1e-7, 8)] == [
        "2000000", "10000000000000000000000", "2.5", "0.0000001", "8"
    ]  # fmt: skip
    for value in [*rng.normal(0, 1, 100).tolist(), *(10 ** rng.uniform(-20, 20, 100)).tolist()]:
        assert float(exact(value)) == value
        assert "e" not in exact(value)


@each_row(
    ("value", "text"),
    [(0, "0"), (7, "7"), (870, "870"), (999.4, "999"), (999.6, "1.00k"), (1234, "1.23k"), (99_960, "100k"),
     (8.882, "8.88"), (12_345, "12.3k"), (999_400, "999k"), (1_234_567, "1.23M"), (2.5e9, "2.50G")],
)  # fmt: skip
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_short_is_right_to_half_a_percent(rng: np.random.Generator) -> None:
    for value in 10 ** rng.uniform(0, 12, 300):
        text = short(value)
        size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
        assert float(text.rstrip("kMG").replace(",", "")) * size == pytest.approx(value, rel=5.1e-3)


@each_row(
    ("value", "text"),
    [(61.94, "61.9 s"), (99.96, "100 s"), (320, "320 s"), (600, "10.0 min"), (7196, "119.9 min"), (7200, "2.0 h"),
     (393.9 * 3600, "393.9 h")],
)  # fmt: skip
def test_short_time(value: float, text: str) -> None:
    assert short_time(value) == text


@each_row(("p", "text"), [(0.0421, "0.042"), (0.5, "0.500"), (6.5e-7, "6.5e-7"), (0.0, "below 1e-99"), (1.0, "1.000")])
def test_p_value(p: float, text: str) -> None:
    assert p_value(p) == text


@each_row(
    ("value", "text"),
    [(1.0, "1"), (0.5, "0.5"), (0.0123, "0.012"), (1e-4, "0.0001"), (5.5e-30, "5.5e-30"), (0.0, "< 1e-99")],
)
def test_probability(value: float, text: str) -> None:
    assert probability(value) == text


@each_row(
    ("text", "seconds"),
    [("90", 90), (90, 90), (0.5, 0.5), (1e-5, 1e-5), (1e6, 1e6), ("90s", 90), ("5m", 300), (" 1.5h ", 5400),
     ("soon", None), ("-5", None), (float("inf"), None), ("5 days", None)],
)  # fmt: skip
def test_in_seconds(text: str | float, seconds: float | None) -> None:
    assert in_seconds(text) == seconds


@each_row(
    ("seconds", "text"),
    [(0.4, "0s"), (45, "45s"), (59.6, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (7620, "2h07m"), (90000, "25h00m")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_intervals() -> None:
    assert interval(Estimate(0.3084, 0.2811, 0.335)) == "0.308 [0.281, 0.335]"
    assert signed(Estimate(-0.066, -0.09, 0.04)) == "-0.066 [-0.090, +0.040]"
    assert interval(Estimate(0.5, float("nan"), float("nan"))) == "0.500"
    assert interval(Estimate(float("nan"), 0.0, 1.0)) == "-"
    assert interval(Estimate(0.5, 0.456, 0.544), end_digits=2) == "0.500 [0.46, 0.54]"


def test_counts_and_sizes() -> None:
    assert [counted(number, "run") for number in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert [memory_size(2**20 * n) for n in (1, 1024, 1536 * 1024)] == ["1 MiB", "1.0 GiB", "1,536.0 GiB"]
