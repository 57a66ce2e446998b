"""Arrays of the host as tensors of a device, without a wait of the host.

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
