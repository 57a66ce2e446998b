"""The memory that this process may still take on a device, by its driver or by the kernel and its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that a process may still take on a device; None if unknown.

    On a CPU under Linux it is the available memory of the kernel, or the rest of the limits of its control groups (of
    containers and job schedulers, versions 1 and 2) if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return available_to_process(Path("/"))


def available_to_process(root: Path) -> int | None:
    """Return the memory that this process may still take, from the kernel's files below `root`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
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
    """Yield the rest of each limit from a control group up to the root; a file cache counts as free."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        allowed, used = _read(folder / limit).strip(), _read(folder / usage).strip()
        if allowed.isdigit() and used.isdigit():
            cache = re.search(rf"^{reclaimable} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(allowed) - int(used) + (int(cache[1]) if cache else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
