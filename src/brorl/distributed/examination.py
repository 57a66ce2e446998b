"""The examination of a Ray cluster: one actor on each machine gathers facts and connects to the others.

In: the address of a running cluster and a folder that its machines should share. Out: `ClusterFacts`. It leaves the
cluster and the folder as they were.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from brorl.distributed.cluster_faults import ClusterFacts
from brorl.distributed.node_facts import NodeFacts, gather_facts, own_file, refused_connections
from brorl.errors import UserError, first_line

_CLOCK_READINGS = 5
_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 5.0


@ray.remote(num_cpus=0, max_restarts=0)
class _Examiner:
    """Gathers the facts of its machine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: socket.socket | None = None

    def now(self) -> float:
        return time.time()

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
    """
    with _joined(address), _token_file(folder) as token:
        nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (not _is_head(n), n["NodeManagerAddress"]))
        addresses = [str(node["NodeManagerAddress"]) for node in nodes]
        examiners = [_on(node["NodeID"]).remote(address) for node, address in zip(nodes, addresses, strict=True)]
        facts = _answers([e.facts.remote(folder.resolve(), token) for e in examiners], addresses)
        offsets = {a: _offset(e) for a, e in zip(addresses[1:], examiners[1:], strict=True)}
        head_offset = _offset(examiners[0])
        ports = dict(zip(addresses, _answers([e.listen.remote() for e in examiners], addresses), strict=True))
        others = [{a: p for a, p in ports.items() if a != own} for own in addresses]
        refused = _answers([e.refused.remote(o) for e, o in zip(examiners, others, strict=True)], addresses)
        missing = [a for f, a in zip(facts, addresses, strict=True)
                   if f.folder_problem is None and not (folder / own_file(token, a)).exists()]  # fmt: skip
        return ClusterFacts(
            nodes=facts,
            folder=folder.resolve(),
            missing_files=missing,
            offset_s={a: _difference(offset, head_offset) for a, offset in offsets.items()},
            refused={(a, b): why for a, r in zip(addresses, refused, strict=True) for b, why in r.items()},
        )


@contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        check_answers(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({first_line(error)}); start one with `ray start --head`, and pass "
            "the HOST:PORT that it prints"
        ) from error
    try:
        yield
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


def check_answers(address: str) -> None:
    """Check that a program accepts connections at an address; Ray itself would try for minutes.

    Args:
        address: HOST:PORT, or `auto`, which is not checked.

    Raises:
        OSError: If it does not.
        ValueError: If it is not HOST:PORT.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"expected HOST:PORT, not {address!r}")
    socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _is_head(node: Mapping[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def _on(node_id: str) -> Any:
    return _Examiner.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))  # type: ignore[attr-defined]


def _answers(references: Sequence[Any], addresses: Sequence[str]) -> list[Any]:
    """Return the answers of all machines."""
    found: list[Any] = []
    for reference, address in zip(references, addresses, strict=True):
        try:
            found.append(ray.get(reference, timeout=_TIMEOUT_S))
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"the machine {address} of the cluster does not answer ({reason}); check there that brorl is "
                "installed in the environment that `ray start` used"
            ) from error
    return found


def _offset(examiner: Any) -> tuple[float, float]:
    """Return the least and the greatest possible difference of a machine's clock from this one's, in seconds."""
    low, high = float("-inf"), float("inf")
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        there = ray.get(examiner.now.remote(), timeout=_TIMEOUT_S)
        low, high = max(low, there - time.time()), min(high, there - before)
    return low, high


def _difference(offset: tuple[float, float], head: tuple[float, float]) -> float:
    """Return how far a clock is certainly ahead of the head's (negative: behind); 0 if either is possible."""
    low, high = offset[0] - head[1], offset[1] - head[0]
    return low if low > 0 else min(high, 0.0)
