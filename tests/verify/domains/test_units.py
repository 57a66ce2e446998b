"""Units: against the SI brochure by hand, against products of their parts, and against pint if it is installed."""

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest

from brorl.verification.domains.units import parse_unit, read_quantity

EQUAL = [
    ("N", "kg m s^-2"), ("J", "N m"), ("W", "J/s"), ("Pa", "N/m^2"), ("V", "W/A"), ("ohm", "V/A"), ("F", "C/V"), ("T",
    "Wb/m²"),
    ("H", "V s / A"), ("kWh", "kW h"), ("L", "dm^3"), ("mM", "mmol/L"), ("Hz", "1/s"), ("km/h", "km per hour"), ("min",
    "60s"),
    ("J/(mol K)", "J/mol/K"), ("J/mol K", "J mol^{-1} K^{-1}"), (r"\mathrm{m\,s^{-2}}", "m/s^2"), (r"\mu\text{m}",
    "μm"),
    (r"\Omega", "Ω"), (r"^\circ\text{C}", "°C"), ("degrees Celsius", "°C"), ("meters per second", "m/s"), ("cm⁻¹",
    "1/cm"),
    ("kilograms", "kg"), ("g·cm⁻³", "g/cm**3"), ("m s-1", "m/s"), ("Å", r"\AA"),
    ("meters per second squared", "m/s^2"), ("square centimeters", "cm^2"), (r"\text{ cubic centimeters}", "cm^3"),
    ("sq ft", "ft^2"), ("sq. ft", "ft^2"), ("kg per cubic meter", "kg/m^3"), (r"\text{meters} squared", "m^2"),
    ("inches cubed", "in^3"), ("square meters per second squared", "m^2/s^2"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [pair for pair in EQUAL if pair[1] != "60s"])
def test_equal_units(one: str, other: str) -> None:
    assert parse_unit(one) is not None
    assert parse_unit(one) == parse_unit(other)


@pytest.mark.parametrize(
    ("unit", "base", "factor"),
    [("km", "m", 1000), ("h", "s", 3600), ("km/h", "m/s", Fraction(5, 18)), ("eV", "J", Fraction("1.602176634e-19")),
     ("atm", "Pa", 101_325), ("in", "cm", Fraction("2.54")), ("g/cm^3", "kg/m^3", 1000), ("mi", "ft", 5280), ("cal",
     "J", Fraction("4.184")),
     ("L", "cm^3", 1000), ("mg", "kg", Fraction(1, 1_000_000)), ("kW h", "MJ", Fraction("3.6")), ("nm", "Å", 10)],
)  # fmt: skip
def test_factors(unit: str, base: str, factor: Fraction) -> None:
    one, other = parse_unit(unit), parse_unit(base)
    assert one is not None
    assert other is not None
    assert one.dimension == other.dimension
    assert one.factor / other.factor == factor


@pytest.mark.parametrize(
    "text",
    ["", "x", "apples", "m v^2", "m/apples", "m^99", "/", "m//s", "5", "m" * 100, "kk", "m^", "\ud800", "square",
     "squared", "square apples", "cubic m^2"],
)  # fmt: skip
def test_other_text_is_no_unit(text: str) -> None:
    assert parse_unit(text) is None


@pytest.mark.skipif(find_spec("pint") is None, reason="needs pint")
def test_pint_agrees(rng: np.random.Generator) -> None:
    import pint

    registry = pint.UnitRegistry()
    symbols = [
        "m",
        "g",
        "s",
        "A",
        "K",
        "mol",
        "Hz",
        "N",
        "Pa",
        "J",
        "W",
        "C",
        "V",
        "F",
        "T",
        "L",
        "eV",
        "bar",
        "min",
        "hour",
        "day",
    ]
    for _ in range(300):
        parts = [
            (str(rng.choice(["", "k", "m", "n"])), str(rng.choice(symbols)), int(rng.choice([-2, -1, 1, 2])))
            for _ in range(3)
        ]
        parts = [("" if symbol in ("min", "hour", "day") else prefix, symbol, power) for prefix, symbol, power in parts]
        ours = parse_unit(" ".join(f"{prefix}{symbol}^{{{power}}}" for prefix, symbol, power in parts))
        theirs = registry(" * ".join(f"{prefix}{symbol}**{power}" for prefix, symbol, power in parts)).to_base_units()
        assert ours is not None
        assert float(ours.factor) == pytest.approx(theirs.magnitude, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [(r"3.0 \times 10^8\ \text{m/s}", "3e8", "m/s"), ("v = 36 km/h", "36", "km/h"), ("-2.5e-3 J", "-1/400", "J"),
    ("1,000 kg", "1000", "kg"),
     (r"\frac{1}{2} m", "1/2", "m"), ("10^{-3} mol", "1/1000", "mol"), ("6.02E+23", "6.02e23", None), ("about 5 m",
     "5", "m"),
     (r"x \approx 2.3 eV", "2.3", "eV"), ("3.0 \N{MULTIPLICATION SIGN} 10⁸ m/s", "3e8", "m/s"), ("\N{MINUS SIGN}3 m",
     "-3", "m"),
     ("5 N in the direction of x", "5", "N"),
     ("12 m, since it", "12", "m"), ("1/3", "1/3", None), (r"90^\circ", "90", "°"), ("5", "5", None), ("  7. ", "7",
     None)],
)  # fmt: skip
def test_quantities(text: str, number: str, unit: str | None) -> None:
    found = read_quantity(text)
    assert found.number == Fraction(number)
    assert found.unit == (None if unit is None else parse_unit(unit))


@pytest.mark.parametrize("text", [r"\frac{1}{2} m v^2", "3x+2", r"2\pi r", r"50\%", "(1, 2)", "3 + 2", "2, 3",
"1e999999", "7" * 500,
                                  "5 m or 6 m", "3 m/s downward", "", "x", r"\frac{1}{0}", "1/0"])  # fmt: skip
def test_what_is_left_to_math_verify(text: str) -> None:
    assert read_quantity(text).number is None


def test_words_after_a_number_are_no_unit() -> None:
    assert read_quantity("5 apples").unknown == "apples"
    assert read_quantity(r"5 \text{ light bulbs}").unknown is not None
