"""Tables of what was measured: cells in, markdown out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measurement import Cell, Peer, Quantity, Workload

# What the project wants on one core at N = 512: (workload, quantity) -> ours is this much faster.
# Floors, not aims.
FLOORS: dict[tuple[str, Quantity], float] = {
    ("full", "generation"): 3.0,
    ("low", "generation"): 8.0,
    ("full", "step"): 3.0,
    ("low", "step"): 6.0,
    ("trained", "step"): 50.0,
}
FLOOR_PEERS: dict[Quantity, tuple[Peer, ...]] = {
    "generation": ("transformers",),
    "step": ("trl", "trl-checkpointing"),
}
FLOOR_ROLLOUTS = 512
MEMORY_FLOOR = 0.5
STEP_GROWTH_FLOOR = 3.0


@dataclass(frozen=True)
class Results:
    """Everything of one invocation that a table needs."""

    workloads: Sequence[Workload]
    cells: Sequence[tuple[str, Cell]]
    matmul_gflops: float

    def cell(self, workload: str, quantity: str, peer: str, num_rollouts: int) -> Cell | None:
        """Return the cell that was measured, None if it was not or failed."""
        for name, cell in self.cells:
            job = cell.job
            key = (name, job.quantity, job.peer, job.num_rollouts)
            if key == (workload, quantity, peer, num_rollouts) and cell.runs:
                return cell
        return None

    def rollouts(self, workload: str, quantity: str) -> list[int]:
        """Return the N that were asked for, ascending."""
        jobs = [cell.job for name, cell in self.cells if name == workload]
        return sorted({job.num_rollouts for job in jobs if job.quantity == quantity})


def markdown(results: Results) -> str:
    """Return all tables."""
    parts = [f"Matmul peak of one core, fp32: {results.matmul_gflops:.0f} GFLOP/s.\n"]
    for workload in results.workloads:
        title = f"### {workload.name}: {workload.entropy_nats:.3f} nats/token"
        parts += [title, _generation_table(results, workload), _step_table(results, workload)]
    floors = _floor_table(results)
    if floors:
        parts += ["### Floors", floors]
    errors = [
        f"- {name} {cell.job.quantity} {cell.job.peer} N={cell.job.num_rollouts}: {cell.error}"
        for name, cell in results.cells
        if cell.error
    ]
    if errors:
        parts += ["### Not measured", "\n".join(errors)]
    return "\n\n".join(part for part in parts if part)


def _generation_table(results: Results, workload: Workload) -> str:
    """Rollouts per second; arithmetic as a share of the matmul peak, counted in both ways."""
    header = [
        "N",
        "ours, rollouts/s",
        "transformers, rollouts/s",
        "ratio (of CPU time)",
        "unique/sampled",
        "ours, % of peak (distinct tokens)",
        "ours, % of peak (sampled tokens)",
        "transformers, % of peak (sampled tokens)",
        "ours, MB above model (peak)",
        "transformers, MB above model (peak)",
    ]
    rows = []
    for n in results.rollouts(workload.name, "generation"):
        ours = results.cell(workload.name, "generation", "ours", n)
        peer = results.cell(workload.name, "generation", "transformers", n)
        rows.append(
            [
                str(n),
                f"{ours.rollouts_per_s:.4g}" if ours else "-",
                f"{peer.rollouts_per_s:.4g}" if peer else "-",
                _ratio(peer, ours),
                _share(ours.unique_fraction if ours else None),
                _of_peak(results, workload, ours, distinct=True),
                _of_peak(results, workload, ours, distinct=False),
                _of_peak(results, workload, peer, distinct=False),
                _memory(ours),
                _memory(peer),
            ]
        )
    return _table(header, rows)


def _step_table(results: Results, workload: Workload) -> str:
    """Seconds a whole training step takes, and memory."""
    header = [
        "N",
        "ours, s",
        "TRL, s",
        "ratio (of CPU time)",
        "TRL with checkpointing, s",
        "ratio (of CPU time)",
        "unique/sampled",
        "ours: generation / verification / training, s",
        "TRL: generation, s",
    ]
    header += [f"{who}, MB above model (peak)" for who in ("ours", "TRL", "TRL with checkpointing")]
    rows = []
    for n in results.rollouts(workload.name, "step"):
        ours = results.cell(workload.name, "step", "ours", n)
        trl = results.cell(workload.name, "step", "trl", n)
        saving = results.cell(workload.name, "step", "trl-checkpointing", n)
        rows.append(
            [
                str(n),
                _seconds(ours),
                _seconds(trl),
                _ratio(trl, ours),
                _seconds(saving),
                _ratio(saving, ours),
                _share(ours.unique_fraction if ours else None),
                _parts(ours, ("generation", "verification", "training")),
                _parts(trl, ("generation",)),
                _memory(ours),
                _memory(trl),
                _memory(saving),
            ]
        )
    return _table(header, rows)


def _floor_table(results: Results) -> str:
    rows: list[list[str]] = []
    for (name, quantity), floor in FLOORS.items():
        ours = results.cell(name, quantity, "ours", FLOOR_ROLLOUTS)
        for peer in FLOOR_PEERS[quantity]:
            other = results.cell(name, quantity, peer, FLOOR_ROLLOUTS)
            if ours and other:
                met = _verdict(other.seconds / ours.seconds >= floor)
                what = f"{name}: {quantity}, times {peer} (of CPU time)"
                rows.append([what, f"at least {floor:g}", _ratio(other, ours), met])
    for workload in results.workloads:
        rows += _memory_floor(results, workload.name)
    small = results.cell("trained", "step", "ours", 16)
    large = results.cell("trained", "step", "ours", FLOOR_ROLLOUTS)
    if small and large:
        growth = large.seconds / small.seconds
        what = f"trained: step of ours, N={FLOOR_ROLLOUTS} over N=16 (of CPU time)"
        met = _verdict(growth <= STEP_GROWTH_FLOOR)
        rows.append([what, f"at most {STEP_GROWTH_FLOOR:g}", _ratio(large, small), met])
    return _table([f"at N={FLOOR_ROLLOUTS}", "wanted", "measured", "met"], rows)


def _memory_floor(results: Results, workload: str) -> list[list[str]]:
    """Ours against both of TRL's ways, above the loaded model."""
    rows = []
    ours = results.cell(workload, "step", "ours", FLOOR_ROLLOUTS)
    for peer in FLOOR_PEERS["step"]:
        other = results.cell(workload, "step", peer, FLOOR_ROLLOUTS)
        if ours and other:
            share = ours.above_baseline_bytes / max(1, other.above_baseline_bytes)
            what = f"{workload}: step memory above model, share of {peer}'s"
            met = _verdict(share <= MEMORY_FLOOR)
            rows.append([what, f"at most {MEMORY_FLOOR:g}", f"{share:.2f}", met])
    return rows


def _verdict(met: bool) -> str:
    return "yes" if met else "NO"


def _ratio(slower: Cell | None, faster: Cell | None) -> str:
    if not (slower and faster):
        return "-"
    cpu_ratio = slower.cpu_seconds / faster.cpu_seconds
    return f"{slower.seconds / faster.seconds:.2f} ({cpu_ratio:.2f})"


def _seconds(cell: Cell | None) -> str:
    return f"{cell.seconds:.4g}" if cell else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _memory(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.above_baseline_bytes / 1e6:.0f} ({cell.peak_bytes / 1e6:.0f})"


def _of_peak(results: Results, workload: Workload, cell: Cell | None, distinct: bool) -> str:
    if cell is None:
        return "-"
    return f"{100 * cell.gflops_per_s(workload, distinct) / results.matmul_gflops:.1f}"


def _parts(cell: Cell | None, names: Sequence[str]) -> str:
    return " / ".join(f"{cell.part(name):.3g}" for name in names) if cell else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
