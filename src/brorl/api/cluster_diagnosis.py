"""`brorl doctor --cluster`: the machines of a Ray cluster, and the faults that would make a run fail there."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult

from brorl.errors import UserError
from brorl.format import memory_size
from brorl.table import Table

if TYPE_CHECKING:
    from brorl.distributed.machines import MachineFacts


@dataclass(frozen=True)
class ClusterDiagnosis:
    """The machines of a cluster and their faults.

    Attributes:
        table: The machines.
        faults: One line for each fault, with its fix.
    """

    table: Table
    faults: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table and the faults."""
        yield self.table
        yield "\n".join(self.faults) or "no fault found"


def diagnose_cluster(address: str, folder: str | None = None) -> ClusterDiagnosis:
    """Examine every machine of a cluster: versions, shared folder, ports, GPUs, NCCL, clock.

    Args:
        address: Address of the cluster, HOST:PORT or auto.
        folder: A folder that the machines should share, such as the parent of the run directories; None for no check.

    Raises:
        UserError: If Ray is not installed, there is no cluster at the address, or the folder does not exist.
    """
    if find_spec("ray") is None:
        raise UserError(
            "brorl doctor --cluster needs the package ray, which is not installed: pip install 'brorl[ray]'"
        )
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--folder: {folder} is not a folder of this machine; create it, or name another one")
    from brorl.distributed.cluster import Cluster, ClusterShape
    from brorl.distributed.machines import examine_machines, faults

    with closing(Cluster(ClusterShape(address=address))) as cluster:
        cluster.connect()
        machines = examine_machines(None if folder is None else Path(folder))
        return ClusterDiagnosis(_table(machines), tuple(faults(machines)))


def _table(machines: list[MachineFacts]) -> Table:
    rows = [
        (
            one.name,
            str(one.cpus),
            ", ".join(f"{name}, {memory_size(total)}" for name, _, total in one.gpus) or "none",
            "unknown" if one.problem else f"brorl {one.versions.get('brorl')}, torch {one.versions.get('torch')}",
        )
        for one in machines
    ]
    return Table("Cluster", ("machine", "CPUs", "GPUs", "versions"), tuple(rows), words=frozenset({0, 2, 3}))
