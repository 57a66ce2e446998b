"""Write the tables and the figure of docs/explanation/scaling.md.

In: the capacity model and the simulation, with the recipe `brorl`. Out: the blocks of the page between its markers, and
docs/figures/scaling.png. Nothing is measured: the numbers follow from published and assumed unit costs.

    python scripts/make_scaling_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from brorl.api.recipe import resolve_config
from brorl.assemble.cluster_job import build_job
from brorl.model.model_shape import PUBLISHED
from brorl.planning.cluster.cluster_plan import ClusterPlan, QueueSettings, make_cluster_plan
from brorl.planning.cluster.cluster_report import (
    cost_text,
    draw_cluster_plan,
    phase_table,
    saving_table,
    scaling_table,
)
from brorl.planning.cluster.hardware import GPUS, Cluster, Engine
from brorl.planning.cluster.phases import Job
from brorl.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "scaling.md"
FIGURE = ROOT / "docs" / "figures" / "scaling.png"
SIZES = (1, 8, 64, 512)
GPU = GPUS["H100"]
SHORT = {"sampling.max_new_tokens": 2048, "prompts_per_step": 32}


def job(engine: Engine, **changes: Any) -> Job:
    """Return the job of the recipe `brorl` with some settings changed."""
    config = resolve_config("brorl", changes)
    return build_job(config, GPU, PUBLISHED[config.model], engine=engine)


def capacity_tables() -> Iterator[tuple[str, str]]:
    """Yield the tables without a simulation: name of the block, Markdown."""
    for engine in ("vllm", "native"):
        yield f"phases {engine}", _phases(job(engine))
    yield "savings", _untitled(saving_table(_plan(job("vllm"), 64)))
    costs = ((c.name, cost_text(c), c.origin, c.source) for c in job("vllm").costs.all)
    columns = ("unit cost", "best to worst", "origin", "source")
    yield "costs", Table("", columns, tuple(costs), words=frozenset({0, 2, 3})).markdown()


def simulated_tables() -> Iterator[tuple[str, str]]:
    """Yield the tables of the simulation, and draw the figure."""
    split, whole = QueueSettings(parts=8), QueueSettings()
    jobs = (
        ("vllm", job("vllm"), whole),
        ("split", job("vllm"), split),
        ("native", job("native"), whole),
        ("short", job("vllm", **SHORT), whole),
    )
    for name, wanted, settings in jobs:
        plan = make_cluster_plan("the paper's step", wanted, Cluster(64, GPU), settings)
        if name == "vllm":
            draw_cluster_plan(plan, FIGURE)
        yield f"scaling {name}", _untitled(scaling_table(plan))


def _phases(wanted: Job) -> str:
    """Return the phases of the fastest ways on each number of GPUs."""
    columns: tuple[str, ...] = ()
    rows = []
    for size in SIZES:
        table = phase_table(_plan(wanted, size))
        columns = ("GPUs", "placement, mode", *table.columns[1:])
        rows += [(f"{size:,}", *row) for row in table.rows]
    return Table("", columns, tuple(rows), words=frozenset({1})).markdown()


def _plan(wanted: Job, size: int) -> ClusterPlan:
    """Return a plan without a simulation."""
    return make_cluster_plan("", wanted, Cluster(size, GPU), QueueSettings(), sizes=())


def _untitled(table: Table) -> str:
    return replace(table, title="", strong=frozenset(), notes=()).markdown()


def with_blocks(page: str, blocks: Iterator[tuple[str, str]]) -> str:
    """Return a page with the content of some blocks replaced."""
    for name, content in blocks:
        pattern = rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end -->)"
        page, found = re.subn(pattern, lambda m, c=content: f"{m[1]}\n{c}\n{m[2]}", page, flags=re.DOTALL)
        assert found == 1, f"{PAGE} has {found} blocks {name!r}; it needs one"
    return page


if __name__ == "__main__":
    text = with_blocks(PAGE.read_text("utf-8"), capacity_tables())
    PAGE.write_text(with_blocks(text, simulated_tables()), "utf-8")
