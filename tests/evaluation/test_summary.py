"""Summaries of an evaluation against plain loops, and their tables and lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from brorl.algorithms.groups import Group
from brorl.api.evaluate import default_ks
from brorl.evaluation.evaluator import BatchCounts, PromptCounts, count_responses, evaluation_record, summarize
from brorl.evaluation.pass_at_k import mean_with_interval, pass_at_k_of_each
from brorl.evaluation.responses import (
    EvaluationResult,
    pass_table,
    remarks,
    response_table,
    shown_ks,
)
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import Verdict

N = 6


def results(rng: np.random.Generator) -> list[PromptCounts]:
    return [
        PromptCounts(
            prompt_id=f"p{i}",
            source=("one", "one", "two")[i % 3],
            domain=("math", "countdown")[i // 3 % 2],
            num_samples=N,
            num_correct=int(rng.integers(0, N + 1)),
            num_truncated=int(rng.integers(0, N + 1)),
            num_distinct=int(rng.integers(1, N + 1)),
            sampled_tokens=int(rng.integers(N, 100)),
            unique_tokens=int(rng.integers(1, 7)),
            verifier_timeouts=int(rng.integers(0, 2)),
            verifier_failures=int(rng.integers(0, 2)),
        )
        for i in range(12)
    ]


def result_of(
    prompts: Sequence[PromptCounts], ks: Sequence[int], seconds: Mapping[str, float], **more: Any
) -> EvaluationResult:
    rest = {
        "path": Path("out"),
        "settings": {"max_new_tokens": 32_768},
        "unreadable": {},
        "sessions": [{"python": "3"}],
    }
    return EvaluationResult.of(prompts, ks, seconds, **(rest | more))


def test_every_number_by_data_set_domain_and_over_all_prompts(rng: np.random.Generator) -> None:
    given = results(rng)
    found = result_of(given, (1, 2, 5), {"one": 2.5, "two": 0.5})
    assert list(found.by_source) == ["one", "two"]
    assert list(found.by_domain) == ["countdown", "math"]
    groups = [(found.overall, given, 3.0)]
    groups += [
        (s, [r for r in given if r.source == n], t)
        for (n, s), t in zip(found.by_source.items(), (2.5, 0.5), strict=True)
    ]
    groups += [(s, [r for r in given if r.domain == n], None) for n, s in found.by_domain.items()]
    for summary, rows, seconds in groups:
        assert summary.seconds == seconds
        assert (summary.num_prompts, summary.num_samples) == (len(rows), N)
        for k in (1, 2, 5):
            fractions = []
            for row in rows:
                outcomes = [i < row.num_correct for i in range(N)]
                subsets = [any(chosen) for chosen in combinations(outcomes, k)]
                fractions.append(sum(subsets) / len(subsets))
            assert summary.pass_at[k].value == pytest.approx(sum(fractions) / len(fractions))
            alone = mean_with_interval(np.array(fractions))
            assert (summary.pass_at[k].low, summary.pass_at[k].high) == pytest.approx((alone.low, alone.high))
        total = dict.fromkeys(("solved", "tokens", "unique", "cut", "timeouts", "failures", "distinct"), 0)
        for row in rows:
            total["solved"] += row.num_correct > 0
            total["tokens"] += row.sampled_tokens
            total["unique"] += row.unique_tokens
            total["cut"] += row.num_truncated
            total["timeouts"] += row.verifier_timeouts
            total["failures"] += row.verifier_failures
            total["distinct"] += row.num_distinct
        assert summary.solved == total["solved"]
        assert summary.tokens_per_response == pytest.approx(total["tokens"] / (N * len(rows)))
        assert summary.truncation_rate == pytest.approx(total["cut"] / (N * len(rows)))
        assert (summary.sampled_tokens, summary.unique_tokens) == (total["tokens"], total["unique"])
        assert (summary.verifier_timeouts, summary.verifier_failures) == (total["timeouts"], total["failures"])
        assert summary.num_distinct == total["distinct"]


def test_counts_of_a_tree_are_those_of_its_rollouts(rng: np.random.Generator) -> None:
    rollouts = [rng.integers(2, 4, rng.integers(1, 4)).tolist() for _ in range(40)]
    finished = [bool(rng.integers(0, 2)) for _ in rollouts]
    tree = RolloutTree.from_responses((9,), rollouts, finished=finished)
    reasons = ["correct", "wrong answer", "timeout", "out of memory", "verifier raised ValueError: x"]
    reason_of = {}
    for (tokens, _), done in zip(tree.responses(), tree.finished.tolist(), strict=True):
        reason_of[tokens, done] = str(rng.choice(reasons))
    verdicts = [Verdict(r == "correct", 0.0, None, r, 0.0) for r in reason_of.values()]
    found = count_responses(Group.from_verdicts(Prompt("a:1", "x", (9,), "r", "math", "a"), tree, verdicts))
    every = [reason_of[tuple(r), f] for r, f in zip(rollouts, finished, strict=True)]
    assert found.num_correct == every.count("correct")
    assert found.num_truncated == finished.count(False)
    assert found.num_samples == 40
    assert found.sampled_tokens == sum(map(len, rollouts))
    assert found.unique_tokens == len({tuple(r[:i]) for r in rollouts for i in range(1, len(r) + 1)})
    assert found.num_distinct == len({(tuple(r), f) for r, f in zip(rollouts, finished, strict=True)})
    assert found.verifier_timeouts == list(reason_of.values()).count("timeout")
    assert found.verifier_failures == sum(r.startswith(("out of", "verifier")) for r in reason_of.values())
    assert (found.prompt_id, found.source, found.domain) == ("a:1", "a", "math")


def test_turns_and_given_tokens_are_counted_and_shown_where_there_are_some(rng: np.random.Generator) -> None:
    groups = []
    for i in range(4):
        rollouts = [rng.integers(2, 4, rng.integers(2, 5)).tolist() for _ in range(N)]
        given = [[0 < at < len(ids) - 1 and ids[at - 1] == 3 for at in range(len(ids))] for ids in rollouts]
        tree = RolloutTree.from_responses((9,), [[*ids, 9] for ids in rollouts], given=[[*ids, False] for ids in given])
        verdicts = [Verdict(False, 0.0, None, "wrong", 0.0)] * tree.num_responses
        groups.append(Group.from_verdicts(Prompt(f"a:{i}", "x", (9,), "r", "math", "a"), tree, verdicts))
    found = [count_responses(group) for group in groups]
    assert [counts.given_tokens for counts in found] == [int(group.tree.given.sum()) for group in groups]
    turns = [len(turns) for group in groups for turns, count in
             zip(group.tree.turns(), group.tree.leaf_count.tolist(), strict=True) for _ in range(count)]  # fmt: skip
    result = result_of(found, (1,), {"a": 1.0})
    assert result.overall.turns == pytest.approx(np.mean(turns))
    assert result.overall.given_tokens == sum(counts.given_tokens for counts in found) > 0
    table = response_table(result)
    assert table.columns[-3:-1] == ("given", "turns")
    assert table.rows[0][-3:-1] == (str(result.overall.given_tokens), f"{np.mean(turns):.2f}")
    record = evaluation_record(BatchCounts(tuple(found), 1.0), (1,))
    assert record is not None
    assert (record.given_tokens, record.turns) == (result.overall.given_tokens, result.overall.turns)
    plain = [replace(group, tree=replace(group.tree, given=np.zeros(0, bool))) for group in groups]
    record = evaluation_record(BatchCounts(tuple(map(count_responses, plain)), 1.0), (1,))
    assert record is not None
    assert (record.given_tokens, record.turns) == (None, None)
    assert "turns" not in response_table(result_of([count_responses(g) for g in plain], (1,), {"a": 1.0})).columns


def test_default_ks() -> None:
    assert default_ks(512) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert default_ks(5000) == default_ks(512)
    assert default_ks(16) == (1, 2, 4, 8)
    assert default_ks(31) == (1, 2, 4, 8)
    assert default_ks(1) == default_ks(2) == default_ks(3) == (1,)
    assert default_ks(4) == (1, 2)


def test_averages_need_prompts_of_one_number_of_samples(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="got no prompt"):
        summarize([], (1,), None)
    first, second, *_ = results(rng)
    with pytest.raises(ValueError, match=r"got \[6, 7\]"):
        summarize([first, replace(second, num_samples=7)], (1,), None)


def prompt_result(name: str, num_verified: int, num_correct: int, n: int) -> PromptCounts:
    return PromptCounts(name, "set", "math", n, num_correct, 0, n, 5 * n, 3 * n, 0, 0, n - num_verified)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_estimates_are_means_over_all_subsets_of_the_verified_responses(k: int, rng: np.random.Generator) -> None:
    for _ in range(20):
        verified_P = rng.integers(0, 7, 8)
        correct_P = np.array([rng.integers(0, n + 1) for n in verified_P])
        expected = [
            np.mean([any(s) for s in combinations([True] * c + [False] * (n - c), k)])
            for n, c in zip(verified_P.tolist(), correct_P.tolist(), strict=True)
            if n >= k
        ]
        assert pass_at_k_of_each(correct_P, verified_P, k).tolist() == pytest.approx(expected)
        results = [prompt_result(f"p{i}", n, c, 6) for i, (n, c) in enumerate(zip(verified_P, correct_P, strict=True))]
        summary = summarize(results, [k], None)
        assert summary.num_samples == 6
        assert summary.num_unverified == 6 * 8 - verified_P.sum()
        assert summary.left_out == ({k: 8 - len(expected)} if len(expected) < 8 else {})
        assert set(summary.pass_at) == ({k} if expected else set())
        if expected:
            assert summary.pass_at[k].value == pytest.approx(np.mean(expected))


@pytest.fixture
def report(rng: np.random.Generator) -> EvaluationResult:
    results = [
        PromptCounts(
            prompt_id=f"{name}:{i}",
            source=name,
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
    ks = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return result_of(results, ks, seconds, unreadable={"aime24": ["aime24:3"]})


def shown(*tables: object) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_the_repr_is_a_short_line(report: EvaluationResult) -> None:
    pass_at = report.overall.pass_at
    assert repr(report).startswith(f"EvaluationResult('out': pass@1 {pass_at[1].value:.3f} [")
    assert f"pass@256 {pass_at[256].value:.3f} [" in repr(report)
    assert len(repr(report)) < 150


def test_tables_are_whole_on_80_columns(report: EvaluationResult) -> None:
    text = shown(pass_table(report), response_table(report))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    named = {**report.by_source, "all prompts": report.overall}
    for name, summary in named.items():
        first, second = (line for line in lines if line.startswith(name))
        for k in (1, 16, 256):
            at = summary.pass_at[k]
            assert f"{at.value:.3f} [{at.low:.2f}, {at.high:.2f}]" in first
        assert f"{summary.solved}/{summary.num_prompts}" in second
        assert f"{summary.tokens_per_response:,.1f}" in second
        assert f"{summary.sampled_tokens:,}" in second
        assert f"{summary.unique_tokens / summary.sampled_tokens:.1%}" in second
    called = [replace(counts, calling_turns=512, given_tokens=123_456) for counts in report.prompts]
    with_tools = result_of(called, (1,), {name: summary.seconds or 0.0 for name, summary in report.by_source.items()})
    assert max(map(len, shown(response_table(with_tools)).splitlines())) <= 80
    assert "…" not in shown(response_table(with_tools))
    for summary in report.by_domain.values():
        at = summary.pass_at[16]
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
    alone = [r for r in report.prompts if r.source == "own"]
    single = result_of(alone, (1,), {"own": 1.0})
    text = shown(pass_table(single), response_table(single))
    assert "all prompts" not in text
    assert "domain" not in text


def test_the_record_holds_every_number_and_is_json(report: EvaluationResult) -> None:
    record = json.loads(json.dumps(report.record()))
    for name, one in report.by_source.items():
        given = record["by_source"][name]
        assert {int(k): at for k, at in given.pop("pass_at").items()} == {k: asdict(a) for k, a in one.pass_at.items()}
        assert given == {key: value for key, value in asdict(one).items() if key != "pass_at"}
    assert record["overall"]["num_prompts"] == 36
    assert set(record["by_domain"]) == {"math", "countdown"}
    assert record["prompts"] == [asdict(result) for result in report.prompts]
    assert record["unreadable_references"] == {"aime24": ["aime24:3"]}
    assert (record["settings"], record["sessions"]) == ({"max_new_tokens": 32_768}, [{"python": "3"}])


def test_what_is_out_of_the_ordinary_is_said(report: EvaluationResult) -> None:
    assert remarks(report) == []
    cut = replace(report, overall=replace(report.overall, truncation_rate=0.5))
    assert "truncated at 32,768 tokens; with" in remarks(cut)[0]
    with_tools = replace(cut, settings={**report.settings, "tools": {}})
    assert "truncated at 32,768 tokens per turn, or at the limits in tools; with" in remarks(with_tools)[0]
    few = [replace(r, num_truncated=256, verifier_timeouts=2, verifier_failures=1) for r in report.prompts[:3]]
    odd = result_of(few, (1,), {"olympiadbench": 1.0})
    lost, cut = remarks(odd)
    assert "6 of 900" in lost
    assert "3 failed" in lost
    assert cut.startswith("50%")


def test_sessions_on_different_machines_give_a_remark(report: EvaluationResult) -> None:
    one = {"processor": "a", "threads": 2, "command": ["brorl", "eval"]}
    assert remarks(replace(report, sessions=[one, {**one, "command": ["brorl", "eval", "--ks=1"]}])) == []
    (said,) = remarks(replace(report, sessions=[one, one, {**one, "processor": "b", "threads": 4}]))
    assert said.startswith("the 3 sessions differ in processor, threads: seconds are not comparable")


def test_the_table_shows_three_ks() -> None:
    assert shown_ks([1, 2, 4, 8, 16, 32, 64, 128, 256]) == [1, 16, 256]
    assert shown_ks([256, 1]) == [1, 256]
    assert shown_ks([1]) == [1]
    assert shown_ks([1, 2, 4, 8]) == [1, 4, 8]
