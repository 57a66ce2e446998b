"""Tables and record of an evaluation: what they show is what was measured, on 80 columns."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from brorl.evaluation.summary import (
    EvaluationResult,
    PromptResult,
    pass_table,
    remarks,
    response_table,
    shown_ks,
    summarize_all,
)


@pytest.fixture
def report(rng: np.random.Generator) -> EvaluationResult:
    results = [
        PromptResult(
            prompt_id=f"{name}:{i}",
            data_set=name,
            domain="math" if name != "own" else "countdown",
            num_samples=512,
            num_correct=int(rng.integers(1, 512)),
            num_truncated=0,
            num_distinct=300,
            sampled_tokens=int(rng.integers(10_000_000, 99_000_000)),
            unique_tokens=5_000_000,
            verifier_timeouts=0,
            verifier_failures=0,
        )
        for name in ("olympiadbench", "aime24", "own")
        for i in range(12)
    ]
    seconds = {"olympiadbench": 123_456.7, "aime24": 2.0, "own": 0.5}
    summary = summarize_all(results, (1, 2, 4, 8, 16, 32, 64, 128, 256), seconds)
    return EvaluationResult(
        Path("out"), summary, results, {"max_new_tokens": 32_768}, {"aime24": ["aime24:3"]}, [{"python": "3"}]
    )


def shown(*tables: object) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_the_repr_is_a_short_line(report: EvaluationResult) -> None:
    pass_at = report.summary.overall.pass_at
    assert repr(report).startswith(f"EvaluationResult('out': pass@1 {pass_at[1].value:.3f} [")
    assert f"pass@256 {pass_at[256].value:.3f} [" in repr(report)
    assert len(repr(report)) < 150


def test_tables_are_whole_on_80_columns(report: EvaluationResult) -> None:
    text = shown(pass_table(report), response_table(report))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    summary = report.summary
    named = {**summary.by_data_set, "all prompts": summary.overall}
    for name, one in named.items():
        first, second = (line for line in lines if line.startswith(name))
        for k in (1, 16, 256):
            at = one.pass_at[k]
            assert f"{at.value:.3f} [{at.low:.2f}, {at.high:.2f}]" in first
        assert f"{one.solved}/{one.num_prompts}" in second
        assert f"{one.tokens_per_response:,.1f}" in second
        assert f"{one.sampled_tokens:,}" in second
        assert f"{one.unique_tokens / one.sampled_tokens:.1%}" in second
    for one in summary.by_domain.values():
        at = one.pass_at[16]
        assert f"{at.value:.3f} [{at.low:.2f}, {at.high:.2f}]" in text
    assert text.count("domain ") == 4


def test_the_result_of_the_command_has_tables_then_lines(report: EvaluationResult) -> None:
    told = replace(report, differences=("The run's own evaluations differ.", "repeat them: brorl eval x"))
    lines = [line.rstrip() for line in shown(told).splitlines()]
    tables = [
        line.rstrip() for table in (pass_table(told), response_table(told)) for line in ["", *shown(table).splitlines()]
    ]
    written = "written: out/evaluation.json; every response: out/responses"
    assert lines == [*tables, "", written, *told.differences]
    page = told._repr_html_()
    assert page.startswith("<pre")
    assert all(line in page for line in (written, "brorl eval x"))


def test_one_data_set_needs_no_row_for_all(report: EvaluationResult) -> None:
    alone = [r for r in report.prompts if r.data_set == "own"]
    single = replace(report, summary=summarize_all(alone, (1,), {"own": 1.0}), prompts=alone)
    text = shown(pass_table(single), response_table(single))
    assert "all prompts" not in text
    assert "domain" not in text


def test_the_record_holds_every_number_and_is_json(report: EvaluationResult) -> None:
    record = json.loads(json.dumps(report.record()))
    for name, one in report.summary.by_data_set.items():
        given = record["by_data_set"][name]
        assert {int(k): at for k, at in given.pop("pass_at").items()} == {k: asdict(a) for k, a in one.pass_at.items()}
        assert given == {key: value for key, value in asdict(one).items() if key != "pass_at"}
    assert record["overall"]["num_prompts"] == 36
    assert set(record["by_domain"]) == {"math", "countdown"}
    assert record["prompts"] == [asdict(result) for result in report.prompts]
    assert record["unreadable_references"] == {"aime24": ["aime24:3"]}
    assert (record["settings"], record["sittings"]) == ({"max_new_tokens": 32_768}, [{"python": "3"}])


def test_what_is_out_of_the_ordinary_is_said(report: EvaluationResult) -> None:
    assert remarks(report) == []
    few = [replace(r, num_truncated=256, verifier_timeouts=2, verifier_failures=1) for r in report.prompts[:3]]
    odd = replace(report, summary=summarize_all(few, (1,), {"olympiadbench": 1.0}))
    lost, cut = remarks(odd)
    assert lost == "6 of 900 verifications timed out and 3 failed; they count as incorrect"
    assert cut.startswith("50% of the responses were cut at 32,768 tokens")


def test_sessions_on_different_machines_give_a_remark(report: EvaluationResult) -> None:
    one = {"processor": "a", "threads": 2, "command": ["brorl", "eval"]}
    assert remarks(replace(report, sessions=[one, {**one, "command": ["brorl", "eval", "--ks=1"]}])) == []
    (said,) = remarks(replace(report, sessions=[one, one, {**one, "processor": "b", "threads": 4}]))
    assert said.startswith("the 3 sessions differ in processor, threads: the seconds are a mixture")


def test_the_table_shows_three_ks() -> None:
    assert shown_ks([1, 2, 4, 8, 16, 32, 64, 128, 256]) == [1, 16, 256]
    assert shown_ks([256, 1]) == [1, 256]
    assert shown_ks([1]) == [1]
    assert shown_ks([1, 2, 4, 8]) == [1, 4, 8]
