"""Cells through JSON, and the tables made of them, against numbers worked out here."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Record
from measurement import Cell, Job, Run, Work, Workload
from tables import markdown

WORKLOAD = Workload(
    setting="low",
    folder="",
    domain="parity",
    prompts=[{"id": "0", "text": "", "token_ids": [1, 2, 3], "reference": ""}],
    max_new_tokens=64,
    eos_token_id=9,
    fixed_length=True,
    entropy_nats=0.14,
    head_scale=1.0,
    num_layers=2,
    query_width=8,
    cache_width=6,
    layer_parameters=1000,
    head_parameters=100,
)


def cell_of(peer: str, quantity: str, num_rollouts: int, seconds: list[float]) -> Cell:
    work = Work(fed_tokens=10**6, attended=10**7, predictions=10**5) if peer == "ours" else None
    parts = {"generation": 0.25, "verification": 0.0, "training": 0.5} if peer == "ours" else {}
    facts = {"nats_per_token": 0.21} if peer == "ours" else {}
    runs = [Run(s, s, sampled_tokens=100, unique_tokens=25, work=work, parts=parts, facts=facts) for s in seconds]
    return Cell(Job(peer, quantity, "", num_rollouts, 1, 6, 32), runs, runs[:1], 10**6, 6 * 10**6)


def facts_of(*cells: Cell, max_new_tokens: int = 64) -> dict[str, Any]:
    workload = replace(WORKLOAD, max_new_tokens=max_new_tokens)
    return {
        "matmul_gflops": 50.0,
        "memory_gbytes": 10.0,
        "workload": asdict(workload),
        "cells": [asdict(cell) for cell in cells],
    }


def record_of(folder: Path, *parts: dict[str, Any]) -> Record:
    record = Record(folder, {})
    for number, facts in enumerate(parts):
        record.write(str(number), {"state": "done", "facts": facts})
    return Record(folder, {})


def table_rows(text: str, first: str) -> list[dict[str, str]]:
    """Read the table whose header names a column, as one mapping per row."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and f"| {first} |" in line)
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines[start:] if line.startswith("|")][: len(lines)]
    return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]


def test_the_table_of_steps_has_medians_ratios_and_both_fractions_of_the_peak(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    ours, trl = rng.uniform(1, 2, size=5).tolist(), rng.uniform(3, 9, size=3).tolist()
    record = record_of(tmp_path, facts_of(cell_of("ours", "step", 16, ours), cell_of("trl", "step", 16, trl)))
    text = markdown(record, num_runs=5)
    (row,) = table_rows(text, "times TRL")
    flops = 2 * (1000 * 10**6 + 100 * 10**5) + 4 * 2 * 8 * 10**7
    assert row["tokens"] == "64"
    assert row["step: ours, s"] == f"{np.median(ours):.3g}"
    assert row["times TRL"] == f"{np.median(trl) / np.median(ours):.2f}"
    assert row["% of peak: sampling"] == f"{100 * flops / 0.25 / 50e9:.1f}"
    assert row["learning"] == f"{100 * 3 * flops / 0.5 / 50e9:.1f}"
    least = 4 * flops / 50e9  # nothing is read
    assert row["times the least: ours"] == f"{np.median(ours) / least:.1f}"
    assert row["distinct"] == "0.250"
    assert row["MB: ours"] == "5"
    assert "Fewer than 5 runs: TRL N=16, 64 tokens: 3." in text


def test_what_was_not_measured_is_a_dash_or_no_column_at_all(tmp_path: Path) -> None:
    long = facts_of(
        cell_of("ours", "generation", 16, [2.0] * 5), cell_of("vllm", "generation", 16, [6.0] * 5), max_new_tokens=512
    )
    record = record_of(tmp_path, facts_of(cell_of("ours", "generation", 16, [1.0] * 5)), long)
    rows = table_rows(markdown(record, num_runs=5), "times vLLM")
    assert [(row["tokens"], row["times vLLM"]) for row in rows] == [("64", "-"), ("512", "3.00")]
    assert "transformers, s" not in rows[0]
    assert [row["nats/token"] for row in rows] == ["0.210", "0.210"]


def test_floors_are_met_or_not(tmp_path: Path, rng: np.random.Generator) -> None:
    ratio, of_vllm = float(rng.uniform(8.5, 9.5)), float(rng.uniform(0.9, 1.1))
    short = [cell_of("ours", "step", 512, [1.0] * 5), cell_of("trl", "step", 512, [ratio] * 5)]
    long = [cell_of("ours", "generation", 16, [1.0]), cell_of("vllm", "generation", 16, [of_vllm])]
    text = markdown(record_of(tmp_path, facts_of(*short), facts_of(*long, max_new_tokens=2048)), num_runs=5)
    met = ["yes" if value >= least else "NO" for value, least in ((ratio, 9), (of_vllm, 1))]
    assert f"| low: step, N = 512, 64 tokens, times TRL | at least 9 | {ratio:.2f} | {met[0]} |" in text
    assert f"| low: generation, N = 16, 2048 tokens, times vLLM | at least 1 | {of_vllm:.2f} | {met[1]} |" in text
    assert "| low: step memory above the model, fraction of TRL's | at most 0.5 | 1.00 | NO |" in text


def test_the_share_of_the_peak_and_the_growth_of_a_step_have_floors(tmp_path: Path) -> None:
    big = replace(WORKLOAD, setting="big-full")
    work = Work(fed_tokens=10**6, attended=0, predictions=10**6)  # 2.2 GFLOP in 0.25 s
    ours = cell_of("ours", "generation", 512, [0.25])
    ours = replace(ours, runs=[replace(run, work=work) for run in ours.runs])
    facts = facts_of(ours) | {"workload": asdict(big), "matmul_gflops": 11.0}
    trained = replace(WORKLOAD, setting="trained")
    steps = [
        replace(cell, job=replace(cell.job, prompts_per_step=16))
        for cell in (cell_of("ours", "step", 16, [1.0]), cell_of("ours", "step", 512, [2.0]))
    ]
    grown = facts_of(*steps) | {"workload": asdict(trained), "matmul_gflops": 11.0}
    text = markdown(record_of(tmp_path, facts, grown), num_runs=5)
    assert "| big-full: sampling, % of the peak | at least 60 | 80.00 | yes |" in text
    assert "| trained, 16 prompts a step: step of ours, N = 512 over N = 16 | at most 1.9 | 2.00 | NO |" in text
