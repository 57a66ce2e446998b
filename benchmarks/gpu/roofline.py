"""The ceilings of a device, and how much of them some work needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from gpu.device import Device
from gpu.models import fixed_workload
from harness import Limits, turns
from measurement import Work
from transformers import PreTrainedModel

from brorl.model.forward import choose_forward


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a device."""

    copy_bytes_per_s: float  # bytes read and written by a large copy
    matmul_flops_per_s: float  # operations of a large bfloat16 product


def measure_ceilings(device: Device, small: bool, limits: Limits) -> Ceilings:
    """Measure both ceilings on random data."""
    numbers, width = (1 << 20, 256) if small else (1 << 31, 8192)  # 4 GiB, many times the cache
    copy_s = _copy_seconds(numbers, device, limits)
    left, right = torch.randn(2, width, width, device=device.name, dtype=torch.bfloat16)
    product_s = _median_seconds(lambda: left @ right, device, limits)
    return Ceilings(4 * numbers / copy_s, 2 * width**3 / product_s)


def _copy_seconds(numbers: int, device: Device, limits: Limits) -> float:
    """Return the median seconds in which bfloat16 numbers are copied; 2 bytes each are read, and 2 written."""
    source = torch.randn(numbers, device=device.name, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return _median_seconds(lambda: target.copy_(source), device, limits)


def _median_seconds(call: Callable[[], object], device: Device, limits: Limits) -> float:
    """Return the median seconds of the counted runs of a call."""
    return median(turn.seconds for turn in turns(call, limits, device.synchronize))


def flops(model: PreTrainedModel, work: Work, passes: int = 1) -> float:
    """Count the operations of the matrix products of so many forward passes over some work."""
    return passes * fixed_workload(model, "", 1).flops(work)


def bytes_read(model: PreTrainedModel, work: Work) -> int:
    """Count the bytes that sampling must read: the weights once per position, keys and values as `Work.cached`."""
    token_bytes = sum(shape.size for shape in choose_forward(model, "tree").kv_shapes) * model.dtype.itemsize
    return work.positions * weight_bytes(model) + work.cached * token_bytes


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
