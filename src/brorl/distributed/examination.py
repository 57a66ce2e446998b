"""The examination of a Ray cluster: versions, the shared folder, and who reaches whom; one line and one fix a fault.

The first machine, the head, is the standard that the others are compared with. One actor on each machine gathers facts
and connects to the others. It leaves the cluster and the shared folder as they were.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from brorl.errors import UserError

PACKAGES = ("brorl", "torch", "transformers", "numpy", "ray")  # whose versions must be equal on all machines
_CONNECT_TIMEOUT_S = 3.0
_TIMEOUT_S = 120.0
_FIXES = {
    "python": "make its environment with Python {}",
    "CUDA": "install a build of torch for CUDA {} there",
    "NCCL": "install the build of torch with NCCL {} there",
}


@dataclass(frozen=True)
class NodeFacts:
    """A machine of a cluster."""

    address: str  # its IP address
    # version of each installed package, and of `python`, `CUDA` and `NCCL` where there is a GPU
    versions: Mapping[str, str]
    folder_problem: str | None  # why the shared folder cannot be used; None if it can
    # the addresses to which it cannot connect, with the reason
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterFacts:
    """The machines of a cluster, of which the first one is the head, and the folder that all of them should share."""

    nodes: Sequence[NodeFacts]
    folder: Path


@dataclass(frozen=True)
class Fault:
    """A fault of a cluster."""

    problem: str  # what is wrong, and on which machine
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


def find_faults(facts: ClusterFacts) -> list[Fault]:
    """Return the faults of a cluster, in the order in which they should be fixed."""
    head, *others = facts.nodes
    standard = f"the head {head.address}"
    return [
        *(f for node in others for f in version_faults(node.address, node.versions, standard, head.versions)),
        *(
            Fault(
                f"{node.address} cannot connect to {end} ({reason})",
                "open all TCP ports from 1024 on between the machines of the cluster",
            )
            for node in facts.nodes
            for end, reason in node.refused.items()
        ),
        *(
            Fault(
                f"{node.address} cannot use the shared folder {facts.folder}: {node.folder_problem}",
                "mount the same shared storage at the same path on every machine, writable for this user",
            )
            for node in facts.nodes
            if node.folder_problem is not None
        ),
    ]


def version_faults(
    machine: str, versions: Mapping[str, str], standard: str, expected: Mapping[str, str]
) -> Iterator[Fault]:
    """Yield a fault for each version of a machine that differs.

    Args:
        machine: The machine.
        versions: Its versions.
        standard: The machine that it is compared with.
        expected: The versions of that machine.
    """
    for name in sorted(expected):
        if versions.get(name) != expected[name]:
            has = f"{name} {versions[name]}" if name in versions else f"no {name}"
            fix = _FIXES.get(name, f"run there: pip install {name}=={{}}").format(expected[name])
            yield Fault(f"{machine} has {has}, and {standard} has {name} {expected[name]}", fix)


def version_reader() -> Callable[[], dict[str, str]]:
    """Return a function that reads the versions of a machine; Ray sends its code, as brorl may be missing there."""
    packages = PACKAGES

    def read() -> dict[str, str]:
        import platform
        from importlib import metadata

        versions = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return versions

    return read


def gather_facts(address: str, folder: Path, token: str) -> NodeFacts:
    """Gather the facts of this machine; it needs neither Ray nor a GPU.

    Args:
        address: Its address in the cluster.
        folder: The shared folder, which another machine has written `token` into.
        token: Name and content of that file.
    """
    import torch

    versions = version_reader()()
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return NodeFacts(address, versions, _folder_problem(folder, token, address))


def _folder_problem(folder: Path, token: str, address: str) -> str | None:
    try:
        if (folder / token).read_text() != token:
            return "its files have another content"
        own_file(folder, token, address).write_text(address)
    except FileNotFoundError:
        return "it is missing, or it is not the same folder"
    except OSError as error:
        return f"it is not writable ({error.strerror or error})"
    return None


def own_file(folder: Path, token: str, address: str) -> Path:
    """Return the file that a machine writes into the shared folder."""
    return folder / f"{token}.{address}"


def refused_connections(ports: Mapping[str, int]) -> dict[str, str]:
    """Connect to other machines.

    Args:
        ports: For each address a port that accepts connections.

    Returns:
        The addresses that cannot be reached, with the reason.
    """

    def reason(end: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(end, timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return str(error)
        return None

    if not ports:
        return {}
    with ThreadPoolExecutor(len(ports)) as pool:  # all at once: each unreachable address takes the whole timeout
        reasons = pool.map(reason, ports.items())
        return {address: why for address, why in zip(ports, reasons, strict=True) if why is not None}


class _Examiner:
    """Gathers the facts of its machine; Ray makes this class an actor."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: socket.socket | None = None

    def facts(self, folder: Path, token: str) -> NodeFacts:
        return gather_facts(self._address, folder, token)

    def listen(self) -> int:
        self._listener = socket.create_server((self._address, 0), backlog=1024)
        port: int = self._listener.getsockname()[1]
        return port

    def refused(self, ports: Mapping[str, int]) -> dict[str, str]:
        return refused_connections(ports)


def examine_cluster(address: str, folder: Path) -> ClusterFacts:
    """Gather the facts of all machines of a running cluster.

    Args:
        address: HOST:PORT of its head, or `auto` for a cluster that runs on this machine.
        folder: The folder that all machines should share.

    Raises:
        UserError: If there is no cluster at the address, this machine cannot write into the folder, or a machine does
            not answer.
        ModuleNotFoundError: If Ray is not installed.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from brorl.distributed.connection import join_cluster

    def order(node: Mapping[str, Any]) -> tuple[bool, str]:
        return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]

    folder = folder.resolve()
    join_cluster(address)
    try:
        with _token_file(folder) as token:
            nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=order)
            addresses = [str(node["NodeManagerAddress"]) for node in nodes]
            actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Examiner)
            examiners = [
                actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(a)
                for node, a in zip(nodes, addresses, strict=True)
            ]
            facts = _answers([e.facts.remote(folder, token) for e in examiners], addresses)
            ports = dict(zip(addresses, _answers([e.listen.remote() for e in examiners], addresses), strict=True))
            others = [{a: p for a, p in ports.items() if a != own} for own in addresses]
            refused = _answers([e.refused.remote(o) for e, o in zip(examiners, others, strict=True)], addresses)
            for i, node in enumerate(facts):
                problem = node.folder_problem
                if problem is None and not own_file(folder, token, node.address).exists():
                    problem = "it is not the same folder"
                facts[i] = replace(node, folder_problem=problem, refused=refused[i])
            return ClusterFacts(facts, folder)
    finally:
        ray.shutdown()


@contextmanager
def _token_file(folder: Path) -> Iterator[str]:
    """Write a file with a new name into the folder, and remove it and those of the machines at the end."""
    token = f".brorl-doctor-{uuid4().hex}"
    try:
        (folder / token).write_text(token)
    except OSError as error:
        raise UserError(
            f"this machine cannot write into the shared folder {folder} ({error.strerror or error}); pass a folder on "
            "shared storage: --folder DIR"
        ) from error
    try:
        yield token
    finally:
        for file in folder.glob(f"{token}*"):
            file.unlink(missing_ok=True)


def _answers(references: Sequence[Any], addresses: Sequence[str]) -> list[Any]:
    """Return the answers of all machines."""
    import ray

    answers: list[Any] = []
    for reference, address in zip(references, addresses, strict=True):
        try:
            answers.append(ray.get(reference, timeout=_TIMEOUT_S))
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"the machine {address} of the cluster does not answer ({reason}); check there that brorl is "
                "installed in the environment that `ray start` used"
            ) from error
    return answers
