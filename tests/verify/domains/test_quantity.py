"""Numbers with units and words in text, by hand."""

from fractions import Fraction

from brorl.verification.domains.quantity import comparable_words, read_quantity, sides_of_quantity
from brorl.verification.domains.units import parse_unit
from case_tables import table
from each_row import each_row


@each_row(*table(__file__, "quantities"))
def test_quantities(text: str, number: str, unit: str | None) -> None:
    found = read_quantity(text)
    assert found.number == Fraction(number)
    assert found.unit == (None if unit is None else parse_unit(unit))


@each_row("text", [r"\frac{1}{2} m v^2", "3x+2", r"2\pi r", "(1, 2)", "3 + 2", "2, 3",
"1e999999", "7" * 500,
                                  "", "x", r"\frac{1}{0}", "1/0"])  # fmt: skip
def test_what_is_left_to_math_verify(text: str) -> None:
    assert read_quantity(text).number is None


@each_row(
    ("text", "unit", "words"),
    [("5 apples", None, "apple"), (r"5 \text{ light bulbs}", None, "light bulb"), ("5 m/s east", "m/s", "east"),
     ("5 m/s to the east", "m/s", "east"), ("40 g of NaOH", "g", "naoh"), ("3 half-lives", None, "half-live"),
     ("5 blorps", None, "blorp"), ("5 psi", "psi", None), ("5 m", "m", None)],
)  # fmt: skip
def test_words_after_a_number(text: str, unit: str | None, words: str | None) -> None:
    found = read_quantity(text)
    assert (found.number is not None, found.unit, found.words) == (True, unit and parse_unit(unit), words)


def test_words_of_formulas_are_none() -> None:
    assert [comparable_words(text) for text in ("mv^2", "x", "pi", "2 m", "a=b", "")] == [None] * 6


def test_sides() -> None:
    assert sides_of_quantity("v = 36 km/h = 10 m/s") == ["36 km/h", "10 m/s"]
    assert sides_of_quantity(r"F = ma \approx 3 N") == ["3 N"]
    assert sides_of_quantity("5 m") == ["5 m"]
    assert sides_of_quantity("x") == ["x"]
