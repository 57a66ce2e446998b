"""Tables of the comparison with peers: a record of parts in, Markdown out.

A group is all cells of one setting with the same number of prompts per step. A column is a heading and a function from
the cells of a row, by peer, to a number or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from harness import ABSENT, Record, table
from measurement import Cell, Peer, Quantity, Workload

NAMES: dict[Peer, str] = {
    "ours": "ours",
    "transformers": "transformers",
    "vllm": "vLLM",
    "trl": "TRL",
    "trl-checkpointing": "TRL with checkpointing",
}
LEGEND = (
    "N: rollouts per prompt. Seconds: median wall time. times X: seconds of X over ours. nats/token: mean of minus the "
    "log-prob of the tokens that ours sampled. distinct: distinct prefixes over sampled tokens. % of peak: operations "
    "of the matrix products per second, over the peak; ours counts distinct prefixes once, peers count every sampled "
    "token, and learning counts three forward passes. times the least: seconds over those of the "
    "work of ours at the highest rates of products and of memory. MB: peak memory above the loaded model. -: not "
    "measured."
)


class Rates(NamedTuple):
    """The highest rates of a core."""

    gflops: float  # of float32 products
    gbytes: float  # of reading memory


class Floor(NamedTuple):
    """The smallest ratio of a peer's seconds to ours that is wanted."""

    group: str  # the title of a group
    quantity: Quantity
    peer: Peer
    least: float
    num_rollouts: int | None = 512  # None for every N that was measured
    tokens: int | None = None  # length of the responses; None for the shortest


FLOORS = (
    Floor("full", "generation", "transformers", 4.0),
    Floor("full", "generation", "transformers", 1.2, num_rollouts=16),
    Floor("low", "generation", "transformers", 10.0),
    Floor("low", "generation", "transformers", 1.2, num_rollouts=16),
    Floor("big-full", "generation", "transformers", 4.0),
    *(Floor("low", "generation", "vllm", 1.0, num_rollouts=None, tokens=tokens) for tokens in (512, 2048)),
    Floor("full", "step", "trl", 3.0),
    Floor("low", "step", "trl", 9.0),
    Floor("trained", "step", "trl", 20.0),
    Floor("trained, 16 prompts a step", "step", "trl", 100.0),
)
PEAK_PERCENT = {"big-full": 60.0}  # of sampling at the largest N
LARGE, SMALL = 512, 16  # rollouts per prompt
MEMORY_FRACTION = {"full": 0.45}  # of a step, of TRL's
OTHER_MEMORY_FRACTION = 0.5
STEP_GROWTH = {"trained, 16 prompts a step": 1.9}  # of a step of ours, from the small N to the large one

Cells = dict[Peer, Cell]
Column = tuple[str, Callable[[Cells], float | None], str]  # heading, value, format


@dataclass(frozen=True)
class Group:
    """The measured cells of one setting, by quantity, response length and N, then by peer."""

    title: str
    setting: str
    workloads: dict[int, Workload]  # by response length
    rows: dict[tuple[Quantity, int, int], Cells]

    @property
    def workload(self) -> Workload:
        """The workload of the shortest responses, which describes the model."""
        return self.workloads[min(self.workloads)]

    def at(self, quantity: Quantity, num_rollouts: int) -> Cells:
        """Return the cells of a quantity and an N for the shortest responses."""
        return self.rows.get((quantity, self.workload.max_new_tokens, num_rollouts), {})


def groups_of(record: Record) -> tuple[list[Group], list[str]]:
    """Return the groups in the order of their first measurement, and a line for each failed cell."""
    groups: dict[tuple[str, int], Group] = {}
    errors = []
    for entry in record.parts.values():
        facts = entry.get("facts") or {"cells": []}
        for fields in facts["cells"]:
            cell, workload = Cell.of(fields), Workload(**facts["workload"])
            prompts, quantity = cell.job.prompts_per_step, cell.job.quantity
            if cell.error:
                errors.append(f"- {workload.name} {quantity} {cell.job.peer} N={cell.job.num_rollouts}: {cell.error}")
            title = workload.setting + (f", {prompts} prompts a step" if prompts > 1 else "")
            group = groups.setdefault((workload.setting, prompts), Group(title, workload.setting, {}, {}))
            group.workloads.setdefault(workload.max_new_tokens, workload)
            row = group.rows.setdefault((quantity, workload.max_new_tokens, cell.job.num_rollouts), {})
            if cell.runs:
                row[cell.job.peer] = cell
    return list(groups.values()), errors


def markdown(record: Record, num_runs: int) -> str:
    """Return all tables; cells with fewer than `num_runs` runs are listed below their table."""
    groups, errors = groups_of(record)
    facts = [entry["facts"] for entry in record.parts.values() if entry.get("facts")]
    rates = Rates(*(max((fact[name] for fact in facts), default=0.0) for name in ("matmul_gflops", "memory_gbytes")))
    parts = [f"One core: float32 products {rates.gflops:.0f} GFLOP/s, memory {rates.gbytes:.0f} GB/s.", LEGEND]
    rows = [row for group in groups for row in floor_rows(group, rates.gflops)]
    if floors := table(["what", "wanted", "measured", "met"], rows):
        parts += ["### Floors", floors]
    for group in groups:
        parts += [f"### {group.title}", _description(group.workload)]
        for quantity in ("generation", "step"):
            parts += [_table(group, quantity, rates), _notes(group, quantity, num_runs)]
    if errors:
        parts += ["### Failed", "\n".join(errors)]
    return "\n\n".join(part for part in parts if part)


def _description(workload: Workload) -> str:
    parameters = (workload.layer_parameters + workload.head_parameters) / 1e6
    return (
        f"{parameters:.2g}M weights in matrix products, {workload.num_layers} layers, prompts of "
        f"{len(workload.prompts[0]['token_ids'])} tokens, {workload.entropy_nats:.3g} nats/token."
    )


def _columns(quantity: Quantity, workload: Workload, rates: Rates) -> list[Column]:
    """Return the columns of the seconds to sample, or of those of a whole training step."""

    def of_peak(peer: Peer, part: str) -> Callable[[Cells], float | None]:
        def percent(cell: Cell) -> float | None:
            rate = cell.gflops_per_s(workload, part)
            return None if rate is None else 100 * rate / rates.gflops

        return _of(peer, percent)

    def times_least(peer: Peer) -> Callable[[Cells], float | None]:
        def multiple(cells: Cells) -> float | None:
            work = cells["ours"].runs[0].work if "ours" in cells else None
            if work is None or peer not in cells:
                return None
            return cells[peer].seconds / workload.least_seconds(work, quantity, rates.gflops, rates.gbytes)

        return multiple

    if quantity == "generation":
        peers: tuple[Peer, ...] = ("transformers", "vllm")
        return [
            ("sampling: ours, s", _seconds("ours"), ".3g"),
            *((f"{NAMES[peer]}, s", _seconds(peer), ".3g") for peer in peers),
            *((f"times {NAMES[peer]}", _ratio(peer), ".2f") for peer in peers),
            ("nats/token", _of("ours", lambda cell: cell.fact("nats_per_token")), ".3f"),
            ("distinct", _of("ours", lambda cell: cell.unique_fraction), ".3f"),
            ("% of peak: ours", of_peak("ours", "generation"), ".1f"),
            *((NAMES[peer], of_peak(peer, "generation"), ".1f") for peer in peers),
            ("times the least: ours", times_least("ours"), ".1f"),
            *((NAMES[peer], times_least(peer), ".1f") for peer in peers),
            ("MB: ours", _megabytes("ours"), ".0f"),
            ("transformers", _megabytes("transformers"), ".0f"),
        ]
    phases = {"sampling": "generation", "verifying": "verification", "learning": "training"}
    return [
        ("step: ours, s", _seconds("ours"), ".3g"),
        ("TRL, s", _seconds("trl"), ".3g"),
        ("times TRL", _ratio("trl"), ".2f"),
        *((f"{name}, s", _of("ours", lambda cell, part=part: cell.part(part)), ".3g") for name, part in phases.items()),
        ("distinct", _of("ours", lambda cell: cell.unique_fraction), ".3f"),
        ("% of peak: sampling", of_peak("ours", "generation"), ".1f"),
        ("learning", of_peak("ours", "training"), ".1f"),
        ("times the least: ours", times_least("ours"), ".1f"),
        ("TRL", times_least("trl"), ".1f"),
        ("MB: ours", _megabytes("ours"), ".0f"),
        ("TRL", _megabytes("trl"), ".0f"),
    ]


def _table(group: Group, quantity: Quantity, rates: Rates) -> str:
    rows, columns = [], []
    for (measured, tokens, num_rollouts), cells in sorted(group.rows.items()):
        if measured != quantity:
            continue
        workload = group.workloads[tokens]
        columns = _columns(quantity, workload, rates)
        values = ((value(cells), form) for _, value, form in columns)
        key = [tokens if workload.fixed_length else ABSENT, num_rollouts]
        rows.append([*key, *(ABSENT if value is None else f"{value:{form}}" for value, form in values)])
    return table(["tokens", "N", *(column[0] for column in columns)], rows)


def _notes(group: Group, quantity: Quantity, num_runs: int) -> str:
    """Return the lines below a table."""
    cells = [
        (f"{NAMES[peer]} N={n}" + (f", {tokens} tokens" if group.workloads[tokens].fixed_length else ""), peer, cell)
        for (measured, tokens, n), row in sorted(group.rows.items())
        for peer, cell in row.items()
        if measured == quantity
    ]
    notes = {
        f"Fewer than {num_runs} runs: ": [f"{name}: {len(c.runs)}" for name, _, c in cells if len(c.runs) < num_runs],
        "Distinct fraction of what the others sampled: ": [
            f"{name}: {c.unique_fraction:.3f}" for name, peer, c in cells if peer != "ours" and c.unique_fraction
        ],
        "": [
            f"{name}: {c.seconds:.3g} s, {c.above_baseline_bytes / 1e6:.0f} MB"
            for name, peer, c in cells
            if peer == "trl-checkpointing"
        ],
        "The core was not idle (less than 95% of the time is ours): ": [
            name for name, _, c in cells if c.cpu_seconds < 0.95 * c.seconds
        ],
    }
    return "\n".join(f"- {head}{'; '.join(listed)}." for head, listed in notes.items() if listed)


def floor_rows(group: Group, peak: float) -> list[list[str]]:
    """Return a row per floor with measured cells: what, wanted, measured, met; `peak` is in GFLOP/s."""
    rows = []

    def add(what: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        met = value <= most if most is not None else value >= (least or 0.0)
        wanted = f"at most {most:g}" if most is not None else f"at least {least:g}"
        rows.append([f"{group.title}: {what}", wanted, f"{value:.2f}", "yes" if met else "NO"])

    for floor in FLOORS:
        if floor.group != group.title:
            continue
        tokens = floor.tokens or group.workload.max_new_tokens
        for (quantity, length, num_rollouts), cells in sorted(group.rows.items()):
            wanted = floor.num_rollouts in (None, num_rollouts) and (quantity, length) == (floor.quantity, tokens)
            ratio = _ratio(floor.peer)(cells)
            if wanted and ratio is not None:
                what = f"{quantity}, N = {num_rollouts}, {length} tokens, times {NAMES[floor.peer]}"
                add(what, ratio, least=floor.least)
    large, small = group.at("step", LARGE), group.at("step", SMALL)
    if "ours" in large and "trl" in large:
        fraction = large["ours"].above_baseline_bytes / max(1, large["trl"].above_baseline_bytes)
        most = MEMORY_FRACTION.get(group.title, OTHER_MEMORY_FRACTION)
        add("step memory above the model, fraction of TRL's", fraction, most=most)
    if "ours" in large and "ours" in small and group.title in STEP_GROWTH:
        growth = large["ours"].seconds / small["ours"].seconds
        add(f"step of ours, N = {LARGE} over N = {SMALL}", growth, most=STEP_GROWTH[group.title])
    rate = None
    if "ours" in (sampling := group.at("generation", LARGE)):
        rate = sampling["ours"].gflops_per_s(group.workload, "generation")
    if rate is not None and group.title in PEAK_PERCENT:
        add("sampling, % of the peak", 100 * rate / peak, least=PEAK_PERCENT[group.title])
    return rows


def _of(peer: Peer, value: Callable[[Cell], float | None]) -> Callable[[Cells], float | None]:
    return lambda cells: value(cells[peer]) if peer in cells else None


def _seconds(peer: Peer) -> Callable[[Cells], float | None]:
    return _of(peer, lambda cell: cell.seconds)


def _megabytes(peer: Peer) -> Callable[[Cells], float | None]:
    return _of(peer, lambda cell: cell.above_baseline_bytes / 1e6)


def _ratio(peer: Peer) -> Callable[[Cells], float | None]:
    """Return a peer's seconds over ours."""
    return lambda cells: cells[peer].seconds / cells["ours"].seconds if {peer, "ours"} <= cells.keys() else None
