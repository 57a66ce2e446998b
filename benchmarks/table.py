"""Tables of results: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from floors import floor_rows
from measurement import Cell, Peer, Quantity
from results import Group, Results
from workload import Workload

NAMES: dict[Peer, str] = {
    "ours": "ours",
    "transformers": "transformers",
    "vllm": "vLLM",
    "trl": "TRL",
    "trl-checkpointing": "TRL with checkpointing",
}
SAMPLERS: tuple[Peer, ...] = ("ours", "transformers", "vllm")
ABSENT = "-"
LEGEND = (
    "N: rollouts per prompt. Seconds: median wall time. times X: seconds of X over ours. nats/token: mean of minus the "
    "log-prob of the tokens that ours sampled. distinct: distinct prefixes over sampled tokens. % of peak: operations "
    "of the matrix products per second, over the peak; ours counts distinct prefixes once, peers count every sampled "
    "token, and learning counts three forward passes. MB: peak memory above the loaded model. -: not measured."
)


def markdown(results: Results, num_runs: int) -> str:
    """Return all tables.

    Args:
        results: The results.
        num_runs: Runs per complete cell; cells with fewer runs are listed below their table.
    """
    parts = [f"Matmul peak of one core, float32: {results.matmul_gflops:.0f} GFLOP/s.", LEGEND]
    floors = floor_rows(results)
    if floors:
        parts += ["### Floors", _table(["what", "wanted", "measured", "met"], floors)]
    for group in results.groups:
        parts += [f"### {group.title}", _description(group.workload)]
        for quantity, table in (("generation", _generation_table), ("step", _step_table)):
            rows = table(results, group)
            if rows:
                parts += [rows, _notes(group, quantity, num_runs)]
    errors = [
        f"- {e.workload.name} {e.cell.job.quantity} {e.cell.job.peer} N={e.cell.job.num_rollouts}: {e.cell.error}"
        for e in results.entries
        if e.cell.error
    ]
    if errors:
        parts += ["### Failed", "\n".join(errors)]
    return "\n\n".join(part for part in parts if part)


def _description(workload: Workload) -> str:
    parameters = (workload.layer_parameters + workload.head_parameters) / 1e6
    return (
        f"{parameters:.2g}M weights in matrix products, {workload.num_layers} layers, prompts of "
        f"{len(workload.prompts[0]['token_ids'])} tokens, {workload.entropy_nats:.3g} nats/token."
    )


def _generation_table(results: Results, group: Group) -> str:
    """Seconds to sample N responses of each prompt, arithmetic as a fraction of the matmul peak, and memory."""
    header = ["tokens", "N", "sampling: ours, s"]
    header += [f"{NAMES[peer]}, s" for peer in SAMPLERS[1:]] + [f"times {NAMES[peer]}" for peer in SAMPLERS[1:]]
    header += ["nats/token", "distinct", "% of peak: ours", *(NAMES[peer] for peer in SAMPLERS[1:])]
    header += ["MB: ours", "transformers"]
    rows = []
    for workload, n in group.rows("generation"):
        ours, *peers = (group.cell(workload, "generation", peer, n) for peer in SAMPLERS)
        row = [*_key(workload, n), *(_seconds(cell) for cell in (ours, *peers))]
        row += [_ratio(peer, ours) for peer in peers]
        row += [
            _nats(ours),
            _fraction(ours),
            *(_of_peak(results, workload, cell, "generation") for cell in (ours, *peers)),
        ]
        row += [_megabytes(ours), _megabytes(peers[0])]
        rows.append(row)
    return _table(header, rows)


def _step_table(results: Results, group: Group) -> str:
    """Seconds of a whole training step and of its parts, arithmetic as a fraction of the matmul peak, and memory."""
    header = ["tokens", "N", "step: ours, s", "TRL, s", "times TRL", "sampling, s", "verifying, s", "learning, s"]
    header += ["distinct", "% of peak: sampling", "learning", "MB: ours", "TRL"]
    rows = []
    for workload, n in group.rows("step"):
        ours, trl = (group.cell(workload, "step", peer, n) for peer in ("ours", "trl"))
        row = [*_key(workload, n), _seconds(ours), _seconds(trl), _ratio(trl, ours)]
        row += [_part(ours, name) for name in ("generation", "verification", "training")]
        row += [_fraction(ours), *(_of_peak(results, workload, ours, part) for part in ("generation", "training"))]
        row += [_megabytes(ours), _megabytes(trl)]
        rows.append(row)
    return _table(header, rows)


def _notes(group: Group, quantity: Quantity, num_runs: int) -> str:
    """Return the lines below a table."""
    cells = [e for e in group.entries if e.cell.job.quantity == quantity and e.cell.runs]
    lines = []
    few = [f"{_label(e.workload, e.cell)}: {len(e.cell.runs)}" for e in cells if len(e.cell.runs) < num_runs]
    if few:
        lines.append(f"Fewer than {num_runs} runs: {'; '.join(few)}.")
    fractions = [
        f"{_label(e.workload, e.cell)}: {e.cell.unique_fraction:.3f}"
        for e in cells
        if e.cell.job.peer != "ours" and e.cell.unique_fraction is not None
    ]
    if fractions:
        lines.append(f"Distinct fraction of what the others sampled: {'; '.join(fractions)}.")
    saving = [
        f"{_label(e.workload, e.cell)}: {e.cell.seconds:.3g} s, {_megabytes(e.cell)} MB"
        for e in cells
        if e.cell.job.peer == "trl-checkpointing"
    ]
    if saving:
        lines.append(f"{'; '.join(saving)}.")
    shared = [_label(e.workload, e.cell) for e in cells if e.cell.cpu_seconds < 0.95 * e.cell.seconds]
    if shared:
        lines.append(f"The core was not idle (less than 95% of the time is ours): {'; '.join(shared)}.")
    return "\n".join(f"- {line}" for line in lines)


def _label(workload: Workload, cell: Cell) -> str:
    tokens = f", {workload.max_new_tokens} tokens" if workload.fixed_length else ""
    return f"{NAMES[cell.job.peer]} N={cell.job.num_rollouts}{tokens}"


def _key(workload: Workload, num_rollouts: int) -> list[str]:
    return [str(workload.max_new_tokens) if workload.fixed_length else ABSENT, str(num_rollouts)]


def _ratio(slower: Cell | None, faster: Cell | None) -> str:
    return f"{slower.seconds / faster.seconds:.2f}" if slower and faster else ABSENT


def _seconds(cell: Cell | None) -> str:
    return f"{cell.seconds:.3g}" if cell else ABSENT


def _part(cell: Cell | None, name: str) -> str:
    seconds = cell.part(name) if cell else None
    return ABSENT if seconds is None else f"{seconds:.3g}"


def _fraction(cell: Cell | None) -> str:
    fraction = cell.unique_fraction if cell else None
    return ABSENT if fraction is None else f"{fraction:.3f}"


def _nats(cell: Cell | None) -> str:
    nats = cell.fact("nats_per_token") if cell else None
    return ABSENT if nats is None else f"{nats:.3f}"


def _megabytes(cell: Cell | None) -> str:
    return f"{cell.above_baseline_bytes / 1e6:.0f}" if cell else ABSENT


def _of_peak(results: Results, workload: Workload, cell: Cell | None, part: Literal["generation", "training"]) -> str:
    rate = cell.gflops_per_s(workload, part) if cell else None
    return ABSENT if rate is None else f"{100 * rate / results.matmul_gflops:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without its empty columns."""
    if not rows:
        return ""
    kept = [i for i in range(len(header)) if any(row[i] != ABSENT for row in rows)]
    lines = [[line[i] for i in kept] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(kept))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
