"""The facts of each machine of a cluster, and their faults, each with its fix.

In: a Ray cluster that this process has joined, and a folder that the machines should share. Out: the facts of each
machine as it reports them, and lines about what would make a run fail there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brorl.distributed.cluster import PACKAGES, first_difference, versions
from brorl.errors import first_line
from brorl.format import listed, memory_size

_CLOCK_S = 5.0  # a difference that makes the times of files and logs misleading
_CONNECT_S = 5.0


class MachineFacts(NamedTuple):
    """The facts of one machine.

    Attributes:
        name: Host name and address.
        cpus: CPUs that Ray has there.
        versions: Versions of Python and of the packages.
        gpus: Name, free bytes and total bytes of each GPU.
        has_nccl: Whether torch has NCCL.
        clock_s: Its clock minus the clock of this machine, in seconds.
        folder_problem: Why it cannot use the shared folder; None if it can.
        unreachable: Addresses of other machines that it cannot connect to.
        problem: Why nothing else is known of it.
    """

    name: str
    cpus: int = 0
    versions: dict[str, str] = {}  # noqa: RUF012 (never changed)
    gpus: tuple[tuple[str, int, int], ...] = ()
    has_nccl: bool = True
    clock_s: float = 0.0
    folder_problem: str | None = None
    unreachable: tuple[str, ...] = ()
    problem: str | None = None


def examine_machines(folder: Path | None) -> list[MachineFacts]:
    """Run a check on every machine of the cluster.

    Args:
        folder: A folder that the machines should share; None for no check.
    """
    machines = [one for one in ray.nodes() if one["Alive"]]
    ports = {one["NodeManagerAddress"]: one["NodeManagerPort"] for one in machines}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".brorl-doctor-") if folder else _NoFolder() as shared:
        return [_examine(one, ports, shared and str(Path(shared).resolve())) for one in machines]


def faults(machines: Sequence[MachineFacts]) -> list[str]:
    """Return a line for each fault, with its fix.

    Args:
        machines: The facts of the machines, as `examine_machines` returns them.
    """
    found = []
    for one in machines:
        if one.problem:
            found.append(f"machine {one.name} does not work: {one.problem}; install brorl there and restart Ray on it")
            continue
        if difference := first_difference({one.name: one.versions}, versions()):
            found.append(difference)
        if one.folder_problem:
            found.append(
                f"machine {one.name} cannot use the folder ({one.folder_problem}); mount it there at the same path, "
                "with write permission"
            )
        if one.unreachable:
            found.append(
                f"machine {one.name} cannot connect to {listed(one.unreachable)}; open all ports between the machines"
            )
        if abs(one.clock_s) > _CLOCK_S:
            found.append(f"the clock of machine {one.name} is {one.clock_s:+.0f} s off; synchronize it with NTP")
        if one.gpus and not one.has_nccl:
            found.append(f"torch on machine {one.name} has GPUs and no NCCL; install a CUDA build of torch there")
        found += [
            f"GPU {number} of machine {one.name} has {memory_size(free)} free of {memory_size(total)}; end the other "
            "programs on it"
            for number, (_, free, total) in enumerate(one.gpus)
            if free < total / 2
        ]
    return found


def _examine(machine: dict[str, Any], ports: dict[str, int], folder: str | None) -> MachineFacts:
    """Return the facts of one machine."""
    name = f"{machine['NodeManagerHostname']} ({machine['NodeManagerAddress']})"
    others = [(host, port) for host, port in ports.items() if host != machine["NodeManagerAddress"]]
    place = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
    probe = ray.remote(_probe()).options(num_cpus=0, num_gpus=0, max_retries=0, scheduling_strategy=place)
    before = time()
    try:
        there = ray.get(probe.remote(PACKAGES, others, folder))
    except RayError as error:
        return MachineFacts(name, problem=first_line(error))
    after = time()
    clock_s = max(0.0, there["time"] - after) + min(0.0, there["time"] - before)
    return MachineFacts(
        name,
        int(machine["Resources"].get("CPU", 0)),
        there["versions"],
        tuple(there["gpus"]),
        there["has_nccl"],
        clock_s,
        there["folder_problem"],
        tuple(there["unreachable"]),
    )


def _probe() -> Any:
    """Return the function that runs on each machine; its code is sent, as brorl may be missing there."""
    connect_s = _CONNECT_S

    def probe(packages: Sequence[str], others: Sequence[tuple[str, int]], folder: str | None) -> dict[str, Any]:
        import shutil
        import socket
        import subprocess
        import sys
        import tempfile
        import time
        from importlib.metadata import PackageNotFoundError, version

        found: dict[str, Any] = {"time": time.time(), "gpus": [], "has_nccl": True, "folder_problem": None}
        found["versions"] = {"python": sys.version.split()[0]}
        for name in packages:
            try:
                found["versions"][name] = version(name)
            except PackageNotFoundError:
                continue
        found["unreachable"] = []
        for address in others:
            try:
                socket.create_connection(address, connect_s).close()
            except OSError:
                found["unreachable"].append(address[0])
        if folder is not None:
            try:
                with tempfile.NamedTemporaryFile(dir=folder):
                    pass
            except OSError as error:
                found["folder_problem"] = str(error)
        if "torch" in found["versions"]:
            import torch

            found["has_nccl"] = torch.distributed.is_nccl_available()
        query = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
        if shutil.which(query[0]):  # Ray hides the GPUs from torch here
            for line in subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines():
                name, free, total = line.rsplit(", ", 2)
                found["gpus"].append((name, int(free) << 20, int(total) << 20))
        return found

    return probe


class _NoFolder:
    """A context without a folder."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...
