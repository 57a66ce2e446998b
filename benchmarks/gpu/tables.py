"""Tables of the speed parts in Markdown."""

from __future__ import annotations

from typing import Any

from gpu.parts import Record

_GIB = 2**30


def markdown(record: Record) -> str:
    """Return the tables of sampling and of learning; empty if nothing was timed."""
    sampling, learning = [], []
    for name, entry in record.parts.items():
        facts = entry.get("facts") or {}
        if "rollouts_per_s" in facts:
            sampling.append(_sampling_row(name, facts))
        if "step_s" in facts:
            learning.append(_learning_row(name, facts))
    heads = (
        "part | tokens | N | nats/token | distinct | rollouts/s | runs | bandwidth | matmul | peak / predicted, GiB",
        "part | tokens | responses | nodes | step, s | runs | nodes/s | matmul | peak / predicted, GiB",
    )
    return "\n".join(_table(head, rows) for head, rows in zip(heads, (sampling, learning), strict=True) if rows)


def _sampling_row(name: str, facts: dict[str, Any]) -> list[str]:
    distinct, nats = facts["unique_fraction"], facts["nats_per_token"]
    return [
        name,
        _of(facts, "tokens"),
        _of(facts, "rollouts"),
        "" if nats is None else f"{nats:.2f}",
        "" if distinct is None else f"{distinct:.3f}",
        f"{facts['rollouts_per_s']:.4g}",
        str(len(facts["seconds"])),
        f"{100 * facts['bandwidth_fraction']:.2g}%",
        f"{100 * facts['matmul_fraction']:.2g}%",
        _memory(facts),
    ]


def _learning_row(name: str, facts: dict[str, Any]) -> list[str]:
    return [
        name,
        str(facts["tokens"]),
        _of(facts, "responses"),
        f"{facts['nodes']:,}",
        f"{facts['step_s']:.3g}",
        str(len(facts["seconds"])),
        f"{facts['nodes_per_s']:,.0f}",
        f"{100 * facts['matmul_fraction']:.2g}%",
        _memory(facts),
    ]


def _of(facts: dict[str, Any], key: str) -> str:
    """Return a size, and the wanted one if it was reduced."""
    value, wanted = facts[key], facts[f"{key}_wanted"]
    return str(value) if value == wanted else f"{value} of {wanted}"


def _memory(facts: dict[str, Any]) -> str:
    sizes = [facts.get(key) for key in ("peak_bytes", "predicted_bytes")]
    return " / ".join("-" if size is None else f"{size / _GIB:.2f}" for size in sizes)


def _table(head: str, rows: list[list[str]]) -> str:
    rule = "|".join([" --- "] * len(head.split(" | ")))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""])
