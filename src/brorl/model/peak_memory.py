"""Peak memory of a piece of work: of the device if it is a GPU, of the process if it is a CPU under Linux.

In: a device. Out: bytes in use, and bytes at the peak since the last reset; None where the machine does not tell.
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
    """Return the memory in use, after what is free has been given back to the system."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # only the C library of GNU has it
        ctypes.CDLL(None).malloc_trim(0)
    return _of_process("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Let the peak be what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that was in use since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _of_process("VmHWM")


def _of_process(entry: str) -> int | None:
    try:
        found = re.search(rf"^{entry}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
