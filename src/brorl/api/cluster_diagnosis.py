"""The body of `brorl doctor --cluster`: the machines of a Ray cluster, and the faults that would stop a run on it.

In: the address of a running cluster and the folder of its runs. Out: tables. It leaves no file and no process behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group

from brorl.distributed.examination import ClusterFacts, Fault, NodeFacts, examine_cluster, find_faults
from brorl.errors import UserError
from brorl.format import counted, memory_size
from brorl.table import Table


@dataclass(frozen=True)
class ClusterDiagnosis:
    """What `brorl doctor --cluster` found.

    Attributes:
        facts: The machines and the connections between them.
        faults: What is wrong, each with its fix; none if a run can start.
    """

    facts: ClusterFacts
    faults: tuple[Fault, ...]

    def __rich__(self) -> Group:
        """Return the report."""
        return Group(self._machines(), "", self._faults())

    def _machines(self) -> Table:
        rows = tuple(_row(node) for node in self.facts.nodes)
        columns = ("machine", "brorl", "python", "torch", "ray", "GPUs", "free GPU memory")
        notes = (f"shared folder: {self.facts.folder}", "the first machine is the head")
        return Table("Cluster", columns, rows, notes, frozenset(range(len(columns))))

    def _faults(self) -> Table:
        rows = tuple((fault.problem, fault.fix) for fault in self.faults)
        title = counted(len(rows), "fault") if rows else "No faults"
        notes = () if rows else ("versions, connections, shared folder, GPUs and clocks were checked",)
        return Table(title, ("problem", "fix"), rows, notes, frozenset({0, 1}))


def diagnose_cluster(address: str, folder: Path) -> ClusterDiagnosis:
    """Examine all machines of a running Ray cluster.

    Args:
        address: HOST:PORT of its head, or `auto` for a cluster that runs on this machine.
        folder: The folder that all machines should share, such as that of the runs.

    Raises:
        UserError: If Ray is not installed, no cluster answers, or this machine cannot write into the folder.
    """
    try:
        facts = examine_cluster(address, folder)
    except ModuleNotFoundError as error:
        raise UserError(f"a cluster needs Ray ({error}); run: pip install 'brorl[ray]'") from error
    return ClusterDiagnosis(facts, tuple(find_faults(facts)))


def _row(node: NodeFacts) -> tuple[str, ...]:
    names = {gpu.name for gpu in node.gpus}
    free = min((gpu.free_bytes for gpu in node.gpus), default=None)
    return (
        node.address,
        *(node.versions.get(name, "none") for name in ("brorl", "python", "torch", "ray")),
        f"{len(node.gpus)} x {', '.join(sorted(names))}" if node.gpus else "none",
        "" if free is None else f"{memory_size(free)} or more each",
    )
