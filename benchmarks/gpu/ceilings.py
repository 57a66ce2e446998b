"""The two ceilings of a device: bytes per second of a large copy, operations per second of a large bfloat16 product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from child import Limits
from gpu.timing import Device, median_seconds


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a device.

    Attributes:
        copy_bytes_per_s: Bytes read and written by a large copy.
        matmul_flops_per_s: Operations of a large bfloat16 product.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_ceilings(device: Device, small: bool, limits: Limits) -> Ceilings:
    """Measure both ceilings on random data.

    Args:
        device: The device.
        small: Use small tensors, to see that it runs.
        limits: Limits of the runs of each.
    """
    numbers, width = (1 << 20, 256) if small else (1 << 31, 8192)  # 4 GiB, many times the cache
    copy_s = _copy_seconds(numbers, device, limits)
    left, right = torch.randn(2, width, width, device=device.name, dtype=torch.bfloat16)
    product_s = median_seconds(lambda: left @ right, device, limits)
    return Ceilings(4 * numbers / copy_s, 2 * width**3 / product_s)


def _copy_seconds(numbers: int, device: Device, limits: Limits) -> float:
    """Return the median seconds in which bfloat16 numbers are copied; 2 bytes each are read, and 2 written."""
    source = torch.randn(numbers, device=device.name, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return median_seconds(lambda: target.copy_(source), device, limits)
