"""`brorl doctor`: report on this machine and the sandbox levels that hold on it.

It runs the attacks in `verification.sandbox.level` and leaves no files or processes behind.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import brorl
from brorl.activity import Stage
from brorl.console.screen import Screen
from brorl.errors import UserError
from brorl.format import memory_size
from brorl.table import Result, Table
from brorl.verification.sandbox.inside.confinement import LANDLOCK, SECCOMP
from brorl.verification.sandbox.level import AUTO, Level, choose_level, probe_level

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_FIXES = {
    LANDLOCK: "Linux 5.13 or later with Landlock; if `landlock` is missing in /sys/kernel/security/lsm, add it to "
    "the kernel option lsm=",
    SECCOMP: "a kernel with seccomp filters on x86-64 or 64-bit ARM; they fail in a container that replaces the kernel "
    "(gVisor) or whose seccomp profile denies `seccomp` and `prctl`: start such a container with --security-opt "
    "seccomp=unconfined",
}


@dataclass(frozen=True)
class Diagnosis(Result):
    """The findings of `brorl doctor`."""

    level: str | None  # the sandbox level that `verification.sandbox: auto` chooses; None if no level holds
    tables: tuple[Table, ...]  # the report

    def parts(self) -> list[Table | str]:
        """Return the tables, separated by blank lines."""
        return [part for table in self.tables for part in (table, "")][:-1]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 without a sandbox."""
        return int(self.level is None)


def doctor() -> Diagnosis:
    """Examine this machine: device, memory, sandbox."""
    with Screen() as screen:  # shown while torch is imported
        screen.observe(Stage("examining", "this machine"))
        levels = tuple(probe_level(name) for name in (LANDLOCK, SECCOMP)) if sys.platform == "linux" else ()
        try:
            active, problem = choose_level(AUTO).name, None
        except UserError as error:
            active, problem = None, str(error)
        return Diagnosis(active, (_machine(), _sandbox(levels, active, problem)))


def _machine() -> Table:
    import torch

    from brorl.model.device import available_bytes
    from brorl.model.fused_ops import fastest_product
    from brorl.model.kernels import describe_kernels

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = available_bytes(torch.device("cpu"))
    uid = os.getuid() if hasattr(os, "getuid") else None
    user = "unknown" if uid is None else "root" if uid == 0 else f"ordinary (uid {uid})"
    rows = [
        ("brorl", brorl.__version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("user", user),
        ("PyTorch", torch.__version__),
        ("device", _device()),
        ("cores", f"{cores} of {os.cpu_count()}"),
        ("matrix products", f"{fastest_product()} (float32 on the CPU, measured)"),
        ("kernels", f"{describe_kernels()} (float32 on the CPU)"),
        ("memory", "unknown" if memory is None else f"{memory_size(memory)} available"),
    ]
    unused = None if torch.cuda.is_available() else _unused_card()
    return Table("Machine", ("", ""), tuple(rows), (unused,) if unused else (), frozenset({0, 1}))


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)} x {names[0]} (CUDA {torch.version.cuda})"
    return "cpu (torch finds no CUDA device)"


def _unused_card() -> str | None:
    """Return why torch cannot use this machine's NVIDIA card, and the fix; None without a driver."""
    import torch

    try:
        version = re.search(r"\b(\d{3,})(\.\d+)+\b", _NVIDIA_DRIVER.read_text())
    except OSError:
        return None
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return (
        f"this machine has an NVIDIA card (driver {version[0] if version else 'of unknown version'}), but torch "
        f"{torch.__version__}, built {build}, cannot use it; install a torch build for this driver "
        "(https://pytorch.org/get-started/locally), or start a container with --gpus all, and check that nvidia-smi "
        f"runs and that CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) names a card"
    )


def _sandbox(levels: tuple[Level, ...], active: str | None, problem: str | None) -> Table:
    """Return a table with one row per attack and one column per sandbox level; `problem` says why no level holds."""
    if not levels:
        return Table("Sandbox of untrusted code", ("",), ((problem or "",),))
    attacks = list(dict.fromkeys(attack.name for level in levels for attack in level.attacks))
    outcome_of = {(level.name, a.name): "contained" if a.contained else f"not contained: {a.detail}"
                  for level in levels for a in level.attacks}  # fmt: skip
    rows = [("result", *("holds" if level.problem is None else "does not hold" for level in levels))]
    rows += [(name, *(outcome_of.get((level.name, name), "not tried") for level in levels)) for name in attacks]
    notes = [f"{level.name}: {level.problem}" for level in levels if level.problem]
    notes.append(f"active: {active}, the strongest level that holds" if active else "active: none")
    notes += [] if active else [f"for {level.name}: {_FIXES[level.name]}" for level in levels]
    columns = ("attack", *(f"{level.name}*" if level.name == active else level.name for level in levels))
    words = frozenset(range(len(columns)))
    return Table("Sandbox of untrusted code", columns, tuple(rows), tuple(notes), words, frozenset({0}))
