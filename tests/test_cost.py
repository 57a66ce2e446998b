"""Amounts of cost as text."""

import re

import numpy as np

from brorl.cost import Unit, amount, short_amount
from brorl.format import short, short_time
from each_row import each_row


@each_row(
("value", "unit", "text"),
[(40, "seconds", "40 seconds"), (1, "seconds", "1 second"), (47.25, "seconds", "47.2 seconds"),
 (750, "seconds", "12.5 minutes"), (7200, "seconds", "2 hours"), (1, "steps", "1 step"),
 (150, "steps", "150 steps"), (1.2e6, "unique_tokens", "1,200,000 unique tokens")],
)  # fmt: skip
def test_amount(value: float, unit: Unit, text: str) -> None:
    assert amount(value, unit) == text


@each_row(
    ("value", "unit", "text"),
    [(40, "seconds", "40 s"), (12.5, "seconds", "12.5 s"), (750, "seconds", "12.5 min"), (1500, "steps", "1,500"),
     (2.5e6, "unique_tokens", "2.5M"), (120_000, "samples", "120k"), (100, "samples", "100")],
)  # fmt: skip
def test_short_amount(value: float, unit: Unit, text: str) -> None:
    assert short_amount(value, unit) == text


def test_a_short_amount_is_the_short_number_without_zeros_at_its_end(rng: np.random.Generator) -> None:
    for value in (10 ** rng.uniform(-1, 10, 300)).tolist():
        for unit, whole in (("seconds", short_time(value)), ("samples", short(value))):
            number, end = re.fullmatch(r"([\d.,]+)(\D*)", whole).groups()
            told = re.fullmatch(r"([\d.,]+)(\D*)", short_amount(value, unit))
            assert told[2] == end
            assert float(told[1].replace(",", "")) == float(number.replace(",", ""))
            assert "." not in told[1] or not told[1].endswith(("0", "."))
