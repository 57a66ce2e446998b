"""The facts of one machine that a cluster depends on: versions, GPUs, shared folder, connections.

In: a folder and the addresses of other machines. Out: plain values, gathered on the machine that runs this code. It
needs neither Ray nor a GPU.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("brorl", "torch", "transformers", "numpy", "ray")  # whose versions must be equal on all machines
_CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class GPU:
    """A GPU and its memory in bytes."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """A machine of a cluster.

    Attributes:
        address: Its IP address.
        versions: Version of each package, and of `python`, `CUDA` and `NCCL` where there is a GPU.
        gpus: Its GPUs.
        folder_problem: Why the shared folder cannot be used; None if it can.
    """

    address: str
    versions: Mapping[str, str]
    gpus: tuple[GPU, ...]
    folder_problem: str | None


def gather_facts(address: str, folder: Path, token: str) -> NodeFacts:
    """Gather the facts of this machine.

    Args:
        address: Its address in the cluster.
        folder: The shared folder, which another machine has written `token` into.
        token: Name and content of that file.
    """
    problem = _folder_problem(folder, token, address)
    return NodeFacts(address, _versions(), _gpus(), problem)


def own_file(token: str, address: str) -> str:
    """Return the name of the file that a machine writes into the shared folder."""
    return f"{token}.{address}"


def refused_connections(ports: Mapping[str, int]) -> dict[str, str]:
    """Connect to other machines.

    Args:
        ports: For each address a port that accepts connections.

    Returns:
        The addresses that cannot be reached, with the reason.
    """
    refused: dict[str, str] = {}
    for address, port in ports.items():
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            refused[address] = str(error)
    return refused


def _folder_problem(folder: Path, token: str, address: str) -> str | None:
    try:
        if (folder / token).read_text() != token:
            return "its files have another content"
        (folder / own_file(token, address)).write_text(address)
    except FileNotFoundError:
        return "it is missing, or it is not the same folder"
    except OSError as error:
        return f"it is not writable ({error.strerror or error})"
    return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions | _cuda_versions()


def _cuda_versions() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    nccl: Sequence[int] = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl)) or "not available"}


def _gpus() -> tuple[GPU, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    devices = range(torch.cuda.device_count())
    return tuple(GPU(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)) for i in devices)
