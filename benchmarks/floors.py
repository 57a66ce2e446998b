"""Minimum ratios on one core at N = 512: results in, rows of a table out."""

from __future__ import annotations

from measurement import Cell, Peer, Quantity
from results import Group, Results
from workload import Workload

# (setting, quantity) -> minimum of the peer's seconds divided by ours.
FLOORS: dict[tuple[str, Quantity], float] = {
    ("full", "generation"): 3.0,
    ("low", "generation"): 8.0,
    ("full", "step"): 3.0,
    ("low", "step"): 6.0,
    ("trained", "step"): 50.0,
}
PEERS: dict[Quantity, tuple[Peer, ...]] = {"generation": ("transformers",), "step": ("trl", "trl-checkpointing")}
NUM_ROLLOUTS = 512
MEMORY_FRACTION = 0.5
STEP_GROWTH = 3.0


def floor_rows(results: Results) -> list[list[str]]:
    """Return a row per floor with measured cells: what, wanted, measured, met."""
    rows: list[list[str]] = []
    for group in results.groups:
        workload = group.workload
        for (setting, quantity), floor in FLOORS.items():
            if setting == group.setting:
                rows += _speed(group, workload, quantity, floor)
        rows += _memory(group, workload)
        small, large = (group.cell(workload, "step", "ours", n) for n in (16, NUM_ROLLOUTS))
        if group.setting == "trained" and small and large:
            growth = large.seconds / small.seconds
            what = f"{group.title}: step of ours, N = {NUM_ROLLOUTS} over N = 16"
            rows.append([what, f"at most {STEP_GROWTH:g}", f"{growth:.2f}", _verdict(growth <= STEP_GROWTH)])
    return rows


def _speed(group: Group, workload: Workload, quantity: Quantity, floor: float) -> list[list[str]]:
    rows = []
    for peer, ours, other in _pairs(group, workload, quantity):
        ratio = other.seconds / ours.seconds
        what = f"{group.title}: {quantity}, times {peer}"
        rows.append([what, f"at least {floor:g}", f"{ratio:.2f}", _verdict(ratio >= floor)])
    return rows


def _memory(group: Group, workload: Workload) -> list[list[str]]:
    """Compare the memory above the loaded model with TRL, without and with gradient checkpointing."""
    rows = []
    for peer, ours, other in _pairs(group, workload, "step"):
        fraction = ours.above_baseline_bytes / max(1, other.above_baseline_bytes)
        what = f"{group.title}: step memory above the model, fraction of {peer}'s"
        rows.append([what, f"at most {MEMORY_FRACTION:g}", f"{fraction:.2f}", _verdict(fraction <= MEMORY_FRACTION)])
    return rows


def _pairs(group: Group, workload: Workload, quantity: Quantity) -> list[tuple[Peer, Cell, Cell]]:
    ours = group.cell(workload, quantity, "ours", NUM_ROLLOUTS)
    cells = [(peer, group.cell(workload, quantity, peer, NUM_ROLLOUTS)) for peer in PEERS[quantity]]
    return [(peer, ours, other) for peer, other in cells if ours and other]


def _verdict(met: bool) -> str:
    return "yes" if met else "NO"
