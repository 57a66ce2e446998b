"""Units: against definitions by hand, against products of their parts, and against pint if it is installed."""

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest

from brorl.verification.domains.units import conversions, parse_unit, parse_units
from each_row import each_row

EQUAL = [
    ("N", "kg m s^-2"), ("J", "N m"), ("W", "J/s"), ("Pa", "N/m^2"), ("V", "W/A"), ("ohm", "V/A"), ("F", "C/V"), ("T",
    "Wb/m²"),
    ("H", "V s / A"), ("kWh", "kW h"), ("L", "dm^3"), ("mM", "mmol/L"), ("Hz", "rev/s"), ("km/h", "km per hour"),
    ("J/(mol K)", "J/mol/K"), ("J/mol K", "J mol^{-1} K^{-1}"), (r"\mathrm{m\,s^{-2}}", "m/s^2"), (r"\mu\text{m}",
    "μm"),
    (r"\Omega", "Ω"), (r"^\circ\text{C}", "°C"), ("degrees Celsius", "°C"), ("meters per second", "m/s"), ("cm⁻¹",
    "1/cm"),
    ("kilograms", "kg"), ("g·cm⁻³", "g/cm**3"), ("m s-1", "m/s"), ("Å", r"\AA"),
    ("meters per second squared", "m/s^2"), ("square centimeters", "cm^2"), (r"\text{ cubic centimeters}", "cm^3"),
    ("sq ft", "ft^2"), ("sq. ft", "ft^2"), ("kg per cubic meter", "kg/m^3"), (r"\text{meters} squared", "m^2"),
    ("inches cubed", "in^3"), ("square meters per second squared", "m^2/s^2"),
]  # fmt: skip


@each_row(("one", "other"), EQUAL)
def test_equal_units(one: str, other: str) -> None:
    assert parse_unit(one) is not None
    assert parse_unit(one) == parse_unit(other)


@each_row(
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


@each_row(
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
    symbols = [*"mgsAKNJWCVFTL", "mol", "Hz", "Pa", "eV", "bar", "min", "hour", "day"]
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


@each_row(
    ("given", "wanted", "number", "expected"),
    [
        ("°C", "K", "25", "298.15"),
        ("°F", "°C", "77", "25"),
        ("°F", "K", "32", "273.15"),
        ("°C", "°F", "-40", "-40"),
        ("gal", "L", "1", "3.785411784"),
        ("qt", "gal", "4", "1"),
        ("pt", "qt", "2", "1"),
        ("cup", "pt", "2", "1"),
        ("kn", "km/h", "10", "18.52"),
        ("nautical miles", "m", "1", "1852"),
        ("acres", "ft^2", "1", "43560"),
        ("hp", "ft lbf/s", "1", "550"),
        ("kWh", "MJ", "1", "3.6"),
        ("Cal", "cal", "1", "1000"),
        ("kcal", "Cal", "1", "1"),
        ("mm Hg", "mmHg", "1", "1"),
        ("cP", "mPa s", "1", "1"),
        ("years", "months", "2", "24"),
        ("weeks", "days", "2", "14"),
        ("rpm", "Hz", "300", "5"),
        ("mol/kg", "molal", "1", "1"),
        ("MB", "bits", "1", "8000000"),
        ("ppm", "%", "10000", "1"),
        ("mEq/L", "eq/m^3", "1", "1"),
        ("Mpc", "pc", "1", "1000000"),
        ("dozen", "m", "1", None),
        ("psi", "atm", "1", "0.0680459639"),
        ("lb/in^2", "psi", "1", "1"),
        ("tons", "kg", "1", "907.18474"),
        ("years", "days", "1", "365.25"),
    ],
)
def test_conversions(given: str, wanted: str, number: str, expected: str | None) -> None:
    """Against definitions: NIST Special Publication 811, appendix B.8."""
    found = [
        c.of(Fraction(number))
        for one in parse_units(given)
        for other in parse_units(wanted)
        for c in conversions(one, other)
    ]
    if expected is None:
        assert found == []
    else:
        assert any(abs(value - Fraction(expected)) <= abs(Fraction(expected)) * Fraction(1, 10**8) for value in found)


@each_row(
    ("one", "other"),
    [
        ("psi", "m"),
        ("year", "m"),
        ("rpm", "km/h"),
        ("dB", "Hz"),
        ("Sv", "Gy"),
        ("Bq", "Hz"),
        ("rad/s", "m/s"),
        ("mol", "g"),
        ("M", "molal"),
        ("eq/L", "mol/L"),
        ("bit", "s"),
        ("dollars", "kg"),
        ("°", "°C"),
        ("K", "J"),
        ("month", "m"),
    ],
)
def test_no_conversions(one: str, other: str) -> None:
    assert parse_unit(one) is not None
    assert parse_unit(other) is not None
    assert [c for a in parse_units(one) for b in parse_units(other) for c in conversions(a, b)] == []


@each_row(
    ("glued", "apart"),
    [
        ("Nm", "N m"),
        ("kgm/s", "kg m/s"),
        ("ms^{-2}", "m s^-2"),
        ("gcm^{-3}", "g cm^-3"),
        ("Jkg^{-1}K^{-1}", "J/(kg K)"),
        ("molL^{-1}", "mol/L"),
        ("Pas", "Pa s"),
        ("Kg", "kg"),
        ("KJ", "kJ"),
        ("hrs", "h"),
        ("N-m", "N m"),
        ("kg.m", "kg m"),
        ("kilowatt-hours", "kWh"),
        ("J/(kg\\cdot\\text{K})", "J/kg/K"),
        ("\\frac{\\text{m}}{\\text{s}^2}", "m/s^2"),
        ("(m/s)^2", "m^2/s^2"),
    ],
)
def test_units_without_space(glued: str, apart: str) -> None:
    wanted = parse_unit(apart)
    assert wanted is not None
    assert wanted in parse_units(glued)


@each_row("word", ["mass", "gas", "east", "seat", "mace", "act", "sand", "ms ms ms x", "lamps", "hands"])
def test_words_are_no_products_of_units(word: str) -> None:
    assert parse_units(word) == ()
