"""A stand-in for the few parts of numpy that test code of public datasets uses. Sandboxed processes have no numpy.

A process executes this file and calls `install` before test code.
"""

import math
import sys
import types
from typing import Any


def allclose(actual: Any, desired: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether two numbers, or two sequences of numbers of the same lengths, are close; shapes are not broadcast."""
    if isinstance(desired, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(desired)
            and all(allclose(a, d, rtol, atol, equal_nan) for a, d in zip(actual, desired))  # noqa: B905
        )
    if not isinstance(actual, (int, float, complex)) or not isinstance(desired, (int, float, complex)):
        raise TypeError(f"not numbers: {type(actual).__name__} and {type(desired).__name__}")
    if actual == desired:
        return True
    if actual != actual and desired != desired:
        return equal_nan
    return bool(abs(actual - desired) <= atol + rtol * abs(desired) < math.inf)


def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-07, atol: float = 0.0, equal_nan: bool = True) -> None:
    """Raise an AssertionError if the values are not close."""
    if not allclose(actual, desired, rtol, atol, equal_nan):
        raise AssertionError(f"not close: {actual} and {desired}")


def install() -> None:
    """Make `import numpy` return the stand-in."""
    numpy, testing = types.ModuleType("numpy"), types.ModuleType("numpy.testing")
    numpy.__dict__.update(allclose=allclose, testing=testing, inf=math.inf, nan=math.nan)
    numpy.__dict__.update({name: type(name, (), {}) for name in ("ndarray", "float64", "float32")})
    testing.__dict__.update(assert_allclose=assert_allclose)
    sys.modules.update({"numpy": numpy, "numpy.testing": testing})
