"""Moves arrays to a device without waiting, moves tensors to the host, and measures device speed and memory.

A copy from ordinary memory waits until the GPU has finished all earlier work. A copy from pinned memory does not.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}  # by the setting `dtype`


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. On the CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_to(tensor: Tensor, array: NDArray[Any]) -> None:
    """Copy an array into a tensor of the same shape."""
    source = torch.from_numpy(array)
    tensor.copy_(source.pin_memory() if tensor.device.type == "cuda" else source, non_blocking=True)


def to_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor on the host, without a gradient. Floats are cast on the device."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)  # a single `to` call with a device and a dtype casts on the host
    return tensor.cpu().contiguous()


def free_unused(shares_gpu: bool) -> None:
    """Release the GPU memory that this process holds but does not use, if another process shares the GPU."""
    if shares_gpu:
        torch.cuda.empty_cache()


def return_freed_memory() -> None:
    """Return to the system the freed memory that the C library still holds. Only glibc holds and returns any."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a 16-bit dtype, and any other dtype unchanged."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def bfloat16_slowdown() -> float:
    """Return the CPU time of the sampler's matrix product in bfloat16, divided by its time in float32.

    On a processor without bfloat16 instructions, it can be 50.
    """
    return _product_seconds(torch.bfloat16) / _product_seconds(torch.float32)


def _product_seconds(dtype: torch.dtype) -> float:
    rows, weight = torch.ones(64, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype).T  # like LlamaPass's copies
    seconds = []
    for _ in range(5):  # the first call allocates memory, and other processes can slow calls down
        start = time.process_time()
        torch.nn.functional.linear(rows, weight)
        seconds.append(time.process_time() - start)
    return min(seconds)


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that this process can still use on a device; None if unknown.

    On a CPU under Linux, the kernel reports the available memory. If the process's control groups (versions 1 and 2)
    leave less, their limits apply.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_to_process(Path("/"))


def available_to_process(root: Path) -> int | None:
    """Return the memory that this process can still use, from the kernel's files under `root`."""
    free = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(free[1]) * 1024] if free else []
    groups = dict(re.findall(r"^\d+:([^:]*):(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE))
    mount = root / "sys/fs/cgroup"
    if "" in groups:
        limits += _left_in_groups(mount, groups[""], "memory.max", "memory.current", "inactive_file")
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _left_in_groups(mount / "memory", path, *names)
    return max(0, min(limits)) if limits else None


def _left_in_groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterable[int]:
    """Yield the bytes left under each limit, from a control group up to the root. File caches count as free."""
    groups = [group for group in path.split("/") if group not in ("", "..")]
    for depth in range(len(groups) + 1):
        folder = mount.joinpath(*groups[:depth])
        allowed, used = _read(folder / limit).strip(), _read(folder / usage).strip()
        if allowed.isdigit() and used.isdigit():
            cache = re.search(rf"^{reclaimable} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(allowed) - int(used) + (int(cache[1]) if cache else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
