"""A GPU without a GPU: tensors of type `cuda` in the memory of the host, and the CPU's kernels.

For tests, on a build of PyTorch without CUDA. `install` must be called before `torch.cuda` is used
first, so each test starts a process with `run`. As on a GPU, these raise errors:

- an operator with tensors of two devices, with the exceptions that CUDA makes (copies, indices, scalars);
- `numpy()` of a tensor of the device, and a CPU generator for one;
- more memory in use than the device has.

`counts` returns the kernels, the copies and the waits of the host. A wait is a copy or an operator after which the host
needs a result of the device. Kernels are operators of PyTorch: a GPU may start more than one for some of them. Streams
and compiled kernels are not simulated.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import torch

HERE = Path(__file__).parent
COMPILER = which(os.environ.get("CXX", "g++"))
_SOURCE = HERE / "device.cpp"
_GIB = 1 << 30


def build(cache: Path) -> Path:
    """Compile the device, once for each version of it and of PyTorch; return the library."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = cache / f"simulated_cuda-{key}.so"
    if not library.exists():
        assert COMPILER
        root = Path(torch.__file__).parent
        includes = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        own = library.with_suffix(f".{os.getpid()}")  # another process may compile it too
        flags = ["-shared", "-fPIC", "-std=c++17", "-O1", "-w", abi, *includes]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([COMPILER, *flags, str(_SOURCE), "-o", str(own), *libraries], check=True)
        own.rename(library)
    return library


def run(library: Path, program: str, *arguments: str | Path, devices: int = 1, gib: float = 8.0) -> str:
    """Run a Python program in a process with simulated devices; return its output.

    Raises:
        AssertionError: If it fails, with its errors.
    """
    start = f"import simulated_device\nsimulated_device.install({str(library)!r}, {devices}, {gib})\n"
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", start + program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def install(library: str, devices: int, gib: float) -> None:
    """Let `torch.cuda` of this process find simulated devices with so much memory each."""
    sys.modules["triton"] = None  # an installed Triton compiles no kernel for such a device
    torch.ops.load_library(library)
    torch.ops.simulated_device.setup(devices, int(gib * _GIB))
    for name, value in _functions(devices).items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state_all = torch.cuda.get_rng_state_all
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # which bitsandbytes, and so peft, reads on import


def counts() -> dict[str, int]:
    """Return how often the device did what since `reset`; names begin with `kernel:`, `copy:` or `wait:`."""
    entries = (entry.rsplit("=", 1) for entry in torch.ops.simulated_device.counts())
    return {name: int(times) for name, times in entries}


def reset() -> None:
    """Forget the counts."""
    torch.ops.simulated_device.reset()


def _functions(devices: int) -> dict[str, Any]:
    """Return functions instead of those of `torch.cuda`."""
    ops = torch.ops.simulated_device

    def returning(value: object) -> Callable[..., object]:
        return lambda *_, **__: value  # one function for each name: torch.compile does not accept another name

    def index(device: Any = None) -> int:
        found = device if device is None or isinstance(device, int) else torch.device(device).index
        return -1 if found is None else found

    def current() -> int:
        return int(ops.exchange_device(-1))

    def at(device: Any) -> int:
        return current() if index(device) < 0 else index(device)

    class Within:
        def __init__(self, device: Any = None) -> None:
            self._device = index(device)

        def __enter__(self) -> None:
            self._before = ops.exchange_device(self._device)

        def __exit__(self, *_: object) -> None:
            ops.exchange_device(self._before)

    def free_and_total(device: Any = None) -> tuple[int, int]:
        in_use, _, total = ops.memory(index(device))
        return total - in_use, total

    generators = [torch.Generator(f"cuda:{i}") for i in range(devices)]

    def set_states(states: list[torch.Tensor]) -> None:
        for i, state in enumerate(states):
            generators[i].set_state(state)

    return {
        **{name: returning(None) for name in ("_lazy_init", "init", "empty_cache", "synchronize")},
        **{name: returning(None) for name in ("manual_seed", "manual_seed_all")},
        **{name: returning(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: returning(False) for name in ("_is_in_bad_fork", "is_current_stream_capturing")},
        "get_device_name": returning("simulated CUDA device"),
        "get_device_capability": returning((9, 0)),
        "memory_allocated": lambda device=None: ops.memory(index(device))[0],
        "memory_reserved": lambda device=None: ops.memory(index(device))[0],
        "max_memory_allocated": lambda device=None: ops.memory(index(device))[1],
        "reset_peak_memory_stats": lambda device=None: ops.reset_peak(index(device)),
        "mem_get_info": free_and_total,
        "device": Within,
        "device_count": lambda: devices,
        "current_device": current,
        "set_device": lambda device: ops.exchange_device(index(device)),
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": generators[at(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[at(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_states,
    }
