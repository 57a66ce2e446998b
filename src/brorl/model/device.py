"""Arrays of the host as tensors of a device, without a wait of the host; and tensors of a device on the host.

A copy from ordinary memory lets the host wait until the GPU has done everything before it. A copy from pinned memory
does not: kernels that the host starts afterwards see the copied numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor of a device; on the CPU it shares the array's memory.

    Args:
        array: The array.
        device: The device.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor on the host, without a gradient; it is cast on its device, so fewer bytes are copied.

    Args:
        tensor: The tensor.
        dtype: Number format of floats; None for their own.
    """
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)  # one call of `to` with a device and a format casts on the host
    return tensor.cpu().contiguous()
