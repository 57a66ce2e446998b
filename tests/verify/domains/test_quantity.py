"""Numbers with units and words in text, by hand."""

from fractions import Fraction

from brorl.verification.domains.quantity import comparable_words, read_quantity, sides_of_quantity
from brorl.verification.domains.units import parse_unit
from each_row import each_row


@each_row(
    ("text", "number", "unit"),
    [
        (r"3.0 \times 10^8\ \text{m/s}", "3e8", "m/s"),
        ("36 km/h", "36", "km/h"),
        ("-2.5e-3 J", "-1/400", "J"),
        ("1,000 kg", "1000", "kg"),
        (r"\frac{1}{2} m", "1/2", "m"),
        ("10^{-3} mol", "1/1000", "mol"),
        ("6.02E+23", "6.02e23", None),
        ("about 5 m", "5", "m"),
        (r"\approx 2.3 eV", "2.3", "eV"),
        ("3.0 \N{MULTIPLICATION SIGN} 10⁸ m/s", "3e8", "m/s"),
        ("\N{MINUS SIGN}3 m", "-3", "m"),
        ("5 N in the direction of motion", "5", "N"),
        ("4 1/2 hours", "9/2", "h"),
        (r"4\frac{1}{2} h", "9/2", "h"),
        ("3 million years", "3e6", "yr"),
        ("1 000 km", "1000", "km"),
        (r"50\%", "50", "%"),
        ("3 m/s downward", "3", "m/s"),
        ("5 m/s, east", "5", "m/s"),
        ("12 u", "12", "u"),
        ("12 m, since it", "12", "m"),
        ("1/3", "1/3", None),
        (r"90^\circ", "90", "°"),
        ("5", "5", None),
        ("  7. ", "7", None),
    ],
)
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
