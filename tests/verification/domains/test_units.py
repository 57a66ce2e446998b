"""Units: against definitions by hand, against products of their parts, and against pint if it is installed."""

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest

from brorl.verification.domains.formula.agreement import agree
from brorl.verification.domains.science import as_measured
from brorl.verification.domains.units import conversions, leading_unit, parse_unit, parse_units
from case_tables import table
from each_row import each_row


@each_row(*table(__file__, "equal_units"))
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
     "squared", "square apples", "cubic m^2", "mass", "gas", "east", "seat", "mace", "act", "sand", "ms ms ms x",
     "lamps", "hands", "dozen"],
)  # fmt: skip
def test_other_text_is_no_unit(text: str) -> None:
    assert parse_unit(text) is None


@each_row(*table(__file__, "units_after_a_box"))
def test_units_after_a_box(after: str, unit: str | None) -> None:
    leading = leading_unit(after)
    assert (leading and leading[0]) == unit


@each_row(*table(__file__, "quantities_are_equal"))
def test_quantities_are_equal(reference: str, answer: str, equal: bool) -> None:
    assert (agree(reference, answer, 0.01) == "correct") == equal


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


@each_row(*table(__file__, "conversions"))
def test_conversions(given: str, wanted: str, number: str, expected: str | None) -> None:
    """Against definitions: NIST Special Publication 811, appendix B.8."""
    assert parse_unit(given)
    assert parse_unit(wanted)
    values = [
        c.of(Fraction(number))
        for one in parse_units(given)
        for other in parse_units(wanted)
        for c in conversions(one, other)
    ]
    if expected is None:
        assert values == []
    else:
        assert any(abs(value - Fraction(expected)) <= abs(Fraction(expected)) * Fraction(1, 10**8) for value in values)


@each_row(*table(__file__, "units_without_space"))
def test_units_without_space(glued: str, apart: str) -> None:
    wanted = parse_unit(apart)
    assert wanted is not None
    assert wanted in parse_units(glued)


@each_row(*table(__file__, "quantities"))
def test_quantities(text: str, number: str, unit: str) -> None:
    for change in (1, Fraction(1_001, 1_000)):
        value = Fraction(number) * change
        assert (agree(f"{value} {unit}", as_measured(text), 0.0) == "correct") == (change == 1)
