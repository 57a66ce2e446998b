"""The faults of a cluster, from the facts of its machines: one line and one fix for each.

In: `NodeFacts`, clock offsets, refused connections. Out: `Fault` values. The first machine is the standard that the
others are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from brorl.distributed.node_facts import NodeFacts
from brorl.format import counted, memory_size

LARGEST_OFFSET_S = 1.0
LEAST_FREE_FRACTION = 0.9
_LIBRARIES = {"CUDA": "a build of torch for CUDA {}", "NCCL": "the build of torch with NCCL {}"}


@dataclass(frozen=True)
class Fault:
    """A fault of a cluster.

    Attributes:
        problem: What is wrong, and on which machine.
        fix: What to do.
    """

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


@dataclass(frozen=True)
class ClusterFacts:
    """The machines of a cluster and what lies between them.

    Attributes:
        nodes: The machines; the first one is the head.
        folder: The folder that all of them should share.
        missing_files: Machines that wrote into the folder without the head seeing it.
        offset_s: For each address how far its clock is certainly ahead of the head's (negative: behind), in seconds.
        refused: Pairs (from, to) of addresses without a connection, with the reason.
    """

    nodes: Sequence[NodeFacts]
    folder: Path
    missing_files: Sequence[str]
    offset_s: Mapping[str, float]
    refused: Mapping[tuple[str, str], str]


def find_faults(facts: ClusterFacts) -> list[Fault]:
    """Return the faults of a cluster, in the order in which they should be fixed."""
    return [
        *_of_versions(facts),
        *_of_connections(facts),
        *_of_the_folder(facts),
        *_of_gpus(facts),
        *_of_clocks(facts),
    ]


def _of_versions(facts: ClusterFacts) -> Iterator[Fault]:
    head, *others = facts.nodes
    for node in others:
        for name in sorted(head.versions.keys() | node.versions.keys()):
            expected, found = head.versions.get(name, "not available"), node.versions.get(name, "not available")
            if expected == found:
                continue
            if name == "python":
                fix = f"make its environment with Python {expected}"
            elif name in _LIBRARIES:
                fix = f"install {_LIBRARIES[name].format(expected)} there"
            else:
                fix = f"run there: pip install {name}=={expected}"
            yield Fault(f"{node.address} has {name} {found}, and the head {head.address} has {expected}", fix)


def _of_connections(facts: ClusterFacts) -> Iterator[Fault]:
    for (start, end), reason in facts.refused.items():
        yield Fault(
            f"{start} cannot connect to {end} ({reason})",
            "open all TCP ports from 1024 on between the machines of the cluster",
        )


def _of_the_folder(facts: ClusterFacts) -> Iterator[Fault]:
    for node in facts.nodes:
        problem = node.folder_problem
        if problem is None and node.address in facts.missing_files:
            problem = "it is not the same folder"
        if problem is not None:
            yield Fault(
                f"{node.address} cannot use the shared folder {facts.folder}: {problem}",
                "mount the same shared storage at the same path on every machine, writable for this user",
            )


def _of_gpus(facts: ClusterFacts) -> Iterator[Fault]:
    head, *others = facts.nodes
    for node in others:
        if len(node.gpus) != len(head.gpus):
            yield Fault(
                f"{node.address} has {counted(len(node.gpus), 'GPU')}, and the head {head.address} has "
                f"{len(head.gpus)}",
                "use machines with the same number of GPUs, or start Ray with --num-gpus on each of them",
            )
    kinds = {gpu.name for node in facts.nodes for gpu in node.gpus}
    if len(kinds) > 1:
        yield Fault(f"the GPUs differ: {', '.join(sorted(kinds))}", "use GPUs of one kind: the slowest sets the pace")
    for node in facts.nodes:
        for number, gpu in enumerate(node.gpus):
            if gpu.free_bytes < LEAST_FREE_FRACTION * gpu.total_bytes:
                yield Fault(
                    f"GPU {number} of {node.address} has {memory_size(gpu.free_bytes)} of "
                    f"{memory_size(gpu.total_bytes)} free",
                    "end the processes that use it (nvidia-smi lists them)",
                )
        if node.gpus and node.versions.get("NCCL") == "not available":
            yield Fault(f"torch on {node.address} has no NCCL", "install a build of torch for CUDA there")


def _of_clocks(facts: ClusterFacts) -> Iterator[Fault]:
    for address, offset in facts.offset_s.items():
        if abs(offset) > LARGEST_OFFSET_S:
            side = "ahead of" if offset > 0 else "behind"
            yield Fault(
                f"the clock of {address} is {abs(offset):.1f} s {side} that of the head",
                "synchronize the clocks with NTP (timedatectl set-ntp true)",
            )
