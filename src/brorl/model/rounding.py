"""Compares two computations of the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def agrees(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None, floor: float = 1.0) -> bool:
    """Return whether two computations of the same finite numbers agree up to the rounding of a dtype.

    Errors are relative to the expected number, plus `floor` times the largest one. `dtype` is the dtype of the
    computation; None for that of `expected`.
    """
    error = 0.1 if (dtype or expected.dtype) in (torch.bfloat16, torch.float16) else 1e-3
    return torch.allclose(got, expected, rtol=error, atol=floor * error * float(expected.abs().max()))
