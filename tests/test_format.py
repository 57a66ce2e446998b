"""Numbers as text, against the decimal digits of the values."""

import re
from decimal import Decimal
from math import inf

import numpy as np
import pytest

from brorl.format import exact, plain


@pytest.mark.parametrize(
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
