"""Memory in use and at the peak: of the device if it is a GPU, of the process if it is a CPU under Linux.

In: a device. Out: bytes in use, and bytes at the peak since the last reset; None if the system does not report them.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

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
    """Set the peak to the memory in use now."""
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
