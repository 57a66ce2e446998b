"""Storage of AdamW's two moments: as numbers, or in 8 bits with a scale for each block of 256 numbers in a row.

Source: 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), with two changes. A block ends with its row, so
the codes do not depend on the number of ranks. Unsigned codes never round a positive number to zero, because updates
are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from brorl.model.settings import States
from brorl.model.sharding import local_tensor, with_rows_of

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # the scales of `exp_avg` in 8 bits are named `exp_avg_scale`
NUMBERS_PER_SCALE = 256
MIN_NUMBERS = 4096  # smaller tensors and one-dimensional tensors are not quantized
_DECADES = 7


def is_quantized(shape: Sequence[int], states: States) -> bool:
    """Return whether the moments of a parameter of this shape are stored in 8 bits."""
    return states == "8bit" and len(shape) > 1 and prod(shape) >= MIN_NUMBERS


def moment_bytes(shapes: Iterable[Sequence[int]], states: States, number_bytes: int, device: str) -> int:
    """Return the bytes of both moments of the trained parameters on a device, such as `cuda`, between updates."""
    if states == "host" and device != "cpu":
        return 0
    total = 0
    for shape in shapes:
        numbers, scales = prod(shape), prod(shape[:-1]) * _blocks(shape[-1])
        total += numbers + scales * number_bytes if is_quantized(shape, states) else numbers * number_bytes
    return len(MOMENTS) * total


def zero_codes(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return zeros as codes (uint8) and scales [..., blocks per row], in the shape and layout of a parameter."""
    shard = local_tensor(parameter)
    codes = torch.zeros(shard.shape, dtype=torch.uint8, device=shard.device)
    scales = torch.zeros(*shard.shape[:-1], _blocks(shard.shape[-1]), dtype=shard.dtype, device=shard.device)
    return with_rows_of(parameter, codes), with_rows_of(parameter, scales)


def quantize(number_RC: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest code of each number, [R, C], and the scale of each block, its largest magnitude, [R, blocks].

    Unsigned numbers are at least 0, and small ones round up to the smallest code above zero.
    """
    columns = number_RC.shape[1]
    padded = F.pad(number_RC, (0, -columns % NUMBERS_PER_SCALE)).unflatten(1, (-1, NUMBERS_PER_SCALE))
    scale = padded.abs().amax(-1)
    scaled = padded / scale.clamp_min(torch.finfo(scale.dtype).tiny).unsqueeze(-1)
    _, boundaries = _codebook(signed, scaled.dtype, scaled.device)
    codes = torch.bucketize(scaled, boundaries, out_int32=True).to(torch.uint8)
    return codes.flatten(1)[:, :columns], scale


def dequantize(code_RC: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Return the numbers, shape [R, C], from codes and the scales of their blocks, shape [R, blocks]."""
    values, _ = _codebook(signed, scale.dtype, scale.device)
    return values[code_RC.int()].mul_(scale.repeat_interleave(NUMBERS_PER_SCALE, 1)[:, : code_RC.shape[1]])


def _blocks(columns: int) -> int:
    return -(-columns // NUMBERS_PER_SCALE)


@cache
def _codebook(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 numbers that codes stand for, -1 to 1 or 0 to 1, ascending, and the 255 boundaries between them.

    Each decade from 1e-7 to 1 has twice as many numbers as the decade below it, at the midpoints of equal steps.
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(_DECADES):
        steps = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1, dtype=torch.float64)
        middles = (steps[:-1] + steps[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        numbers += [middles, -middles] if signed else [middles]
    values = torch.cat(numbers).sort().values
    boundaries = (values[:-1] + values[1:]) / 2
    if not signed:
        boundaries[0] = 0
    return values.to(device, dtype), boundaries.to(device, dtype)
