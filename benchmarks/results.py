"""Results: cells with their workloads, to and from JSON.

In: cells, or the JSON files of several invocations. Out: the cells of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from measurement import Cell
from workload import Workload


@dataclass(frozen=True)
class Entry:
    """A cell and the workload that was measured."""

    workload: Workload
    cell: Cell


@dataclass(frozen=True)
class Group:
    """The entries of one setting, all with the same number of prompts per step."""

    setting: str
    prompts_per_step: int
    entries: Sequence[Entry]

    @property
    def title(self) -> str:
        """The name in tables."""
        return self.setting if self.prompts_per_step == 1 else f"{self.setting}, {self.prompts_per_step} prompts a step"

    @property
    def workload(self) -> Workload:
        """The workload of the shortest responses, which describes the model."""
        return min((entry.workload for entry in self.entries), key=lambda workload: workload.max_new_tokens)

    def rows(self, quantity: str) -> list[tuple[Workload, int]]:
        """Return the workloads and N of a quantity, by length and N."""
        asked = [e for e in self.entries if e.cell.job.quantity == quantity]
        workloads = {e.workload.max_new_tokens: e.workload for e in asked}
        keys = sorted({(e.workload.max_new_tokens, e.cell.job.num_rollouts) for e in asked})
        return [(workloads[tokens], num_rollouts) for tokens, num_rollouts in keys]

    def cell(self, workload: Workload, quantity: str, peer: str, num_rollouts: int) -> Cell | None:
        """Return a measured cell; None if it is missing or failed."""
        for entry in self.entries:
            job = entry.cell.job
            key = (entry.workload.max_new_tokens, job.quantity, job.peer, job.num_rollouts)
            if key == (workload.max_new_tokens, quantity, peer, num_rollouts) and entry.cell.runs:
                return entry.cell
        return None


@dataclass(frozen=True)
class Results:
    """The cells of all tables.

    Attributes:
        entries: Cells in the order of their measurement.
        matmul_gflops: The core's best rate of square matrix products.
    """

    entries: Sequence[Entry]
    matmul_gflops: float

    @property
    def groups(self) -> list[Group]:
        """The entries by setting and prompts per step, in the order of their first measurement."""
        grouped: dict[tuple[str, int], list[Entry]] = {}
        for entry in self.entries:
            grouped.setdefault((entry.workload.setting, entry.cell.job.prompts_per_step), []).append(entry)
        return [Group(*key, entries) for key, entries in grouped.items()]

    def record(self) -> dict[str, Any]:
        """Return the workloads, every run and the medians, ready for JSON."""
        workloads = {entry.workload.name: asdict(entry.workload) for entry in self.entries}
        return {
            "matmul_gflops": self.matmul_gflops,
            "workloads": workloads,
            "cells": [_cell_record(entry) for entry in self.entries],
        }

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Read the JSON files of invocations on one machine; the peak is the best of all."""
        entries: list[Entry] = []
        peak = 0.0
        for path in paths:
            record = json.loads(path.read_text(encoding="utf-8"))
            workloads = {name: Workload(**fields) for name, fields in record["workloads"].items()}
            peak = max(peak, record["matmul_gflops"])
            for cell in record["cells"]:
                fields = {name: value for name, value in cell.items() if name not in ("workload", "medians")}
                entries.append(Entry(workloads[cell["workload"]], Cell.of(fields)))
        return cls(entries, peak)


def _cell_record(entry: Entry) -> dict[str, Any]:
    cell = entry.cell
    record: dict[str, Any] = {"workload": entry.workload.name} | asdict(cell)
    if not cell.runs:
        return record
    return record | {
        "medians": {
            "seconds": cell.seconds,
            "cpu_seconds": cell.cpu_seconds,
            "rollouts_per_s": cell.rollouts_per_s,
            "unique_fraction": cell.unique_fraction,
            "above_baseline_bytes": cell.above_baseline_bytes,
        }
    }
