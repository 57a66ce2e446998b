"""Arrays of the host as tensors of a device, without a wait of the host; and tensors of a device on the host.

A copy from ordinary memory lets the host wait until the GPU has done everything before it. A copy from pinned memory
does not: kernels that the host starts afterwards see the copied numbers.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor of a device; on the CPU it shares the array's memory.

    An Apple GPU gets float32 instead of float64, which it does not have.
    """
    tensor = torch.from_numpy(array)
    match device.type:
        case "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        case "mps" if tensor.dtype == torch.float64:
            return tensor.float().to(device)
        case _:
            return tensor.to(device)


def to_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor on the host, without a gradient; floats are cast on the device."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)  # one call of `to` with a device and a format casts on the host
    return tensor.cpu().contiguous()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a dtype of 16 bits, and any other dtype."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64; on the host if it is on an Apple GPU, which has no float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def bytes_in_use(device: torch.device) -> int | None:
    """Return the memory in use, after free memory was returned to the system."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # only GNU's C library has it
        ctypes.CDLL(None).malloc_trim(0)
    return _of_process("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the maximum memory in use since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _of_process("VmHWM")


def _of_process(entry: str) -> int | None:
    try:
        entry_line = re.search(rf"^{entry}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(entry_line[1]) * 1024 if entry_line else None
