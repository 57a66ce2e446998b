"""Wall time and peak memory of calls on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from child import Limits

from brorl.model.peak_memory import bytes_in_use, peak_bytes, reset_peak


@dataclass(frozen=True)
class Device:
    """The measured device.

    Attributes:
        name: Its name in PyTorch, such as `cuda` or `cpu`.
    """

    name: str

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


class Turn(NamedTuple):
    """The wall time and the processor time of one call."""

    seconds: float
    cpu_seconds: float


def timed(call: Callable[[], object], device: Device) -> Turn:
    """Run a call to its end on the device."""
    device.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    device.synchronize()
    return Turn(time.perf_counter() - start, time.process_time() - cpu_start)


def turns(call: Callable[[], object], device: Device, limits: Limits) -> list[Turn]:
    """Repeat a call within limits; return its counted runs."""
    done: list[Turn] = []
    while not limits.reached([turn.seconds for turn in done]):
        done.append(timed(call, device))
    return done[limits.warmups([turn.seconds for turn in done]) :]


def median_seconds(call: Callable[[], object], device: Device, limits: Limits) -> float:
    """Return the median seconds of the counted runs of a call."""
    return median(turn.seconds for turn in turns(call, device, limits))
