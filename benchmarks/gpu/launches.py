"""What a call starts on a device: kernels with their times, and the calls and waits of the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.device import Device
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
_NOTHING = ("aten::resolve_conj", "aten::resolve_neg")  # in every product on a CPU
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Profile:
    """The counts and times of a call. On a CPU a kernel is an operator of PyTorch that calls no other."""

    count: Counter[str]  # starts of each kernel and copy on the device
    seconds: dict[str, float]  # their times on the device
    launches: int  # calls of the host that start work; a replayed graph is one
    waits: int  # calls with which the host waits for the device

    @property
    def kernels(self) -> int:
        """The number of kernels and copies."""
        return self.count.total()

    def top(self, number: int = 8) -> list[tuple[str, int, float]]:
        """Return name, starts and seconds of the kernels that take the longest."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])[:number]
        return [(name[:70], self.count[name], self.seconds[name]) for name in names]


def profiled(call: Callable[[], object], device: Device) -> Profile:
    """Profile a call to its end."""
    device.synchronize()
    # Without the operators of the host, whose events take seconds to read.
    with profile(activities=[ProfilerActivity.CPU if device.is_cpu else ProfilerActivity.CUDA]) as run:
        call()
        device.synchronize()
    count: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    host: Counter[str] = Counter()
    for event in run.events() or ():
        on_device = event.device_type != DeviceType.CPU
        if not on_device:
            host[event.name] += 1
        if on_device or (device.is_cpu and _computes(event) and not any(map(_computes, event.cpu_children))):
            count[event.name] += 1
            seconds[event.name] += (event.time_range.elapsed_us() if on_device else event.self_cpu_time_total) / 1e6
    launches, waits = (sum(n for name, n in host.items() if name.startswith(names)) for names in (_LAUNCHES, _WAITS))
    return Profile(count, dict(seconds), count.total() if device.is_cpu else launches, waits)


def _computes(event: Any) -> bool:
    """Return whether an event of the host is an operator of PyTorch."""
    return event.name.startswith("aten::") and event.name not in _NOTHING
