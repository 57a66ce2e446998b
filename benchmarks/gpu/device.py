"""The measured device: its memory, and waiting for its work."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """The measured device."""

    name: str  # in PyTorch, such as `cuda` or `cpu`

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.name == "cpu"

    @property
    def torch(self) -> torch.device:
        """The device of PyTorch."""
        return torch.device(self.name)

    def describe(self) -> str:
        """Return the name of the hardware."""
        return "cpu" if self.is_cpu else torch.cuda.get_device_name()

    def driver(self) -> str:
        """Return the version of NVIDIA's driver; empty for a CPU."""
        if self.is_cpu:
            return ""
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(FileNotFoundError):
            return subprocess.run(query, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        return ""

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if not self.is_cpu:
            torch.cuda.synchronize()

    def is_lost(self) -> bool:
        """Return whether the device cannot be used any more, as after an illegal access."""
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def free_bytes(self) -> int | None:
        """Return the free memory of a GPU; None for a CPU."""
        return None if self.is_cpu else torch.cuda.mem_get_info()[0]

    def bytes_in_use(self) -> int:
        """Return the memory in use, after unused objects and the allocator's reserve were freed."""
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()
        return bytes_in_use(self.torch) or 0

    def reset_peak(self) -> None:
        """Set the peak to the memory in use now."""
        reset_peak(self.torch)

    def peak_bytes(self) -> int:
        """Return the maximum memory in use since the last reset."""
        return peak_bytes(self.torch) or 0


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def bytes_in_use(device: torch.device) -> int | None:
    """Return the memory in use, after free memory is returned to the system; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # only GNU's C library has malloc_trim
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
    """Return the maximum memory in use since the last reset; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _of_process("VmHWM")


def _of_process(entry: str) -> int | None:
    try:
        entry_line = re.search(rf"^{entry}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(entry_line[1]) * 1024 if entry_line else None
