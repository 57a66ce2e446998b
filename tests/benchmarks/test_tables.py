"""Results through JSON, and the tables made of them, against numbers worked out here."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from measurement import Cell, Job, Run
from results import Entry, Results
from table import markdown
from workload import Work, Workload

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
    layer_parameters=1000,
    head_parameters=100,
)


def entry_of(peer: str, quantity: str, num_rollouts: int, seconds: list[float], **workload: object) -> Entry:
    work = Work(fed_tokens=10**6, attended=10**7, predictions=10**5) if peer == "ours" else None
    parts = {"generation": 0.25, "verification": 0.0, "training": 0.5} if peer == "ours" else {}
    facts = {"nats_per_token": 0.21} if peer == "ours" else {}
    runs = [Run(s, s, sampled_tokens=100, unique_tokens=25, work=work, parts=parts, facts=facts) for s in seconds]
    job = Job(peer, quantity, "", num_rollouts, 1, 6, 32)
    return Entry(replace(WORKLOAD, **workload), Cell(job, runs, runs[:1], 10**6, 6 * 10**6))


def table_rows(text: str, first: str) -> list[dict[str, str]]:
    """Read the table whose header names a column, as one mapping per row."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and f"| {first} |" in line)
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines[start:] if line.startswith("|")][: len(lines)]
    return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]


def test_results_are_the_same_after_json(tmp_path: Path, rng: np.random.Generator) -> None:
    entries = [
        entry_of(peer, "step", int(n), rng.uniform(1, 9, size=3).tolist(), max_new_tokens=tokens)
        for peer, n, tokens in [("ours", 16, 64), ("trl", 16, 64), ("ours", 512, 2048)]
    ]
    results = Results(entries, 104.0)
    for number, part in enumerate((entries[:2], entries[2:])):
        record = json.dumps(Results(part, 100.0 + 4 * number).record())
        (tmp_path / f"{number}.json").write_text(record, encoding="utf-8")
    assert Results.read([tmp_path / "0.json", tmp_path / "1.json"]) == results


def test_the_table_of_steps_has_medians_ratios_and_both_shares_of_the_peak(rng: np.random.Generator) -> None:
    ours, trl = rng.uniform(1, 2, size=5).tolist(), rng.uniform(3, 9, size=3).tolist()
    entries = [entry_of("ours", "step", 16, ours), entry_of("trl", "step", 16, trl)]
    text = markdown(Results(entries, matmul_gflops=50.0), num_runs=5)
    (row,) = table_rows(text, "times TRL")
    flops = 2 * (1000 * 10**6 + 100 * 10**5) + 4 * 2 * 8 * 10**7
    assert row["tokens"] == "64"
    assert row["step: ours, s"] == f"{np.median(ours):.3g}"
    assert row["times TRL"] == f"{np.median(trl) / np.median(ours):.2f}"
    assert row["% of peak: sampling"] == f"{100 * flops / 0.25 / 50e9:.1f}"
    assert row["learning"] == f"{100 * 3 * flops / 0.5 / 50e9:.1f}"
    assert row["distinct"] == "0.250"
    assert row["MB: ours"] == "5"
    assert "Fewer than 5 runs: TRL N=16, 64 tokens: 3." in text


def test_what_was_not_measured_is_a_dash_or_no_column_at_all() -> None:
    entries = [
        entry_of("ours", "generation", 16, [1.0] * 5),
        entry_of("ours", "generation", 16, [2.0] * 5, max_new_tokens=512),
        entry_of("vllm", "generation", 16, [6.0] * 5, max_new_tokens=512),
    ]
    rows = table_rows(markdown(Results(entries, 50.0), num_runs=5), "times vLLM")
    assert [(row["tokens"], row["times vLLM"]) for row in rows] == [("64", "-"), ("512", "3.00")]
    assert "transformers, s" not in rows[0]
    assert [row["nats/token"] for row in rows] == ["0.210", "0.210"]


def test_floors_are_met_or_not(rng: np.random.Generator) -> None:
    ratio = float(rng.uniform(5.5, 6.5))
    entries = [entry_of("ours", "step", 512, [1.0] * 5), entry_of("trl", "step", 512, [ratio] * 5)]
    text = markdown(Results(entries, 50.0), num_runs=5)
    met = "yes" if ratio >= 6 else "NO"
    assert f"| low: step, times trl | at least 6 | {ratio:.2f} | {met} |" in text
    assert "| low: step memory above the model, fraction of trl's | at most 0.5 | 1.00 | NO |" in text
