"""The live lines and the final tables, against numbers computed here from the same metrics."""

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from brorl.activity import Round
from brorl.api.training_session import TrainingResult
from brorl.console.progress import StepLines, TrainingProgress, step_notes, warnings
from brorl.console.screen import Screen
from brorl.console.tables import cost_table, coverage_table, held_out_check_lines, outcome_table
from brorl.cost import Budget
from brorl.runs.step_record import from_json
from brorl.training.loop import Ending
from made_up_runs import random_step, step_record, typed


def step(number: int, *, samples: int, sampled: int, unique: int, distinct: int, groups: int) -> dict[str, Any]:
    return {
        "step": number,
        "sampling": {
            "reward": number / 16, "groups": groups, "samples": samples, "sampled_tokens": sampled,
            "unique_tokens": unique, "distinct_responses": distinct, "verifier_timeouts": 0, "verifier_failures": 0,
            "truncation_rate": number / 16 if samples else 0.0,
        },
        "update": {"out_of_memory_retries": 0, "nodes_per_pass": 1024, "old_policy_kl": 0.001},
        "kept": {"groups": 2, "samples": 2 * samples // groups, "carried": 0},
        "seconds": {"generation": 1.5, "verification": 0.25, "training": 2.0, "storing": 0.5, "total": 5.0},
    }  # fmt: skip


def evaluation(one: float, eight: float, solved: int) -> dict[str, Any]:
    estimates = {1: (one, one - 0.01, one + 0.02), 8: (eight, eight - 0.03, eight + 0.04)}
    pass_at = {str(k): {"value": v, "low": low, "high": high} for k, (v, low, high) in estimates.items()}
    return {"pass_at": pass_at, "num_prompts": 50, "num_samples": 8, "solved": solved, "by_source": {}}


def progress_into(file: Path) -> TrainingProgress:
    screen = Screen()
    screen.log_to(file)
    return TrainingProgress(3, Budget("steps", 3), screen)


def finish(records: list[dict[str, Any]], path: Path, message: str, hints: tuple[str, ...] = ()) -> None:
    """Show the end of a run, also in its log."""
    screen = Screen()
    screen.log_to(path / "run.log")
    TrainingResult(path, Ending.FINISHED, message, typed(records), (), None, None, hints).show_on(screen)


@pytest.fixture
def records() -> list[dict[str, Any]]:
    return [
        {"step": 0, "evaluation": evaluation(0.125, 0.5, 25)},
        step(1, samples=1000, sampled=9000, unique=1800, distinct=300, groups=5),
        step(2, samples=600, sampled=5400, unique=200, distinct=100, groups=3)
        | {"evaluation": evaluation(0.2, 0.55, 27)},
        step(3, samples=400, sampled=1600, unique=1000, distinct=100, groups=2)
        | {"evaluation": evaluation(0.25, 0.625, 30)},
    ]


def test_final_tables(records: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(records, tmp_path, "finished 3 steps", ("try this",))
    for text in (capsys.readouterr().out, (tmp_path / "run.log").read_text()):
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "pass@1 0.125 [0.115, 0.145] 0.250 [0.240, 0.270] +0.125" in lines
        assert "pass@8 0.500 [0.470, 0.540] 0.625 [0.595, 0.665] +0.125" in lines
        assert "solved of 50 25 30 +5" in lines
        table = "\n".join(lines)
        assert re.search(r"^steps 3 6 groups in updates, 10 sampled", table, re.MULTILINE)
        assert re.search(rf"^rollouts {1000 + 600 + 400:,} {300 + 100 + 100} verified: 4\.0x", table, re.MULTILINE)
        assert re.search(rf"^tokens {16000:,} {3000:,} computed: {16000 / 3000:.1f}x", table, re.MULTILINE)
        assert re.search(r"^seconds 15\.0 sampling 4\.5, verifying 0\.8, learning 6\.0", table, re.MULTILINE)
        assert "finished 3 steps" in table
        assert "try this" in table


CALLED = {
    "turns": 2.5,
    "calls": 1500,
    "distinct_calls": 12,
    "given_tokens": 70,
    "failures": {"raised": 5, "timeout": 9},
}


def test_the_cost_of_a_run_with_tools(records: list[dict[str, Any]]) -> None:
    plain = cost_table(typed(records)).rows
    none = CALLED | {"turns": 1.0, "calls": 0, "distinct_calls": 0, "given_tokens": 0, "failures": {}}
    for record, called in zip(records[1:], (CALLED, none, CALLED | {"failures": {"raised": 10}}), strict=True):
        record["tools"] = called
    rows = {row[0]: row[1:] for row in cost_table(typed(records)).rows}
    turns = (1000 * 2.5 + 600 + 400 * 2.5) / 2000
    assert rows["calls"] == ("3,000", f"24 distinct: 125.0x fewer; {turns:.2f} turns per rollout")
    assert rows["failed"] == ("24", "calls: raised 15, timeout 9")
    assert rows["tokens"] == ("16,000", "3,000 computed: 5.3x fewer; 140 given")
    assert [row for row in cost_table(typed(records)).rows if row[0] not in ("calls", "failed", "tokens")] == [
        row for row in plain if row[0] != "tokens"
    ]
    for record in records[1:]:
        record["tools"] = none
    rows = {row[0]: row[1:] for row in cost_table(typed(records)).rows}
    assert rows["calls"] == ("0", "0 distinct; 1.00 turns per rollout")
    assert "failed" not in rows


def test_the_last_evaluation_of_a_stopped_run_has_its_step(records: list[dict[str, Any]]) -> None:
    assert outcome_table(typed(records)).columns == ("", "before", "after", "change")
    stopped = [*records, step(4, samples=400, sampled=1600, unique=1000, distinct=100, groups=2)]
    table = outcome_table(typed(stopped))
    assert table.columns == ("", "before", "after step 3", "change")
    assert "step 3 of 4 is the last one with an evaluation" in " ".join(table.notes)


def test_a_source_without_verdicts_at_the_end_has_no_row(records: list[dict[str, Any]]) -> None:
    first, last = records[0]["evaluation"], records[3]["evaluation"]
    first["by_source"] = {"lost": first["pass_at"], "kept": first["pass_at"]}
    last["by_source"] = {"kept": last["pass_at"]}
    names = [name.strip() for name, *_ in outcome_table(typed(records)).rows]
    assert names == ["pass@1", "pass@8", "kept pass@1", "kept pass@8", "solved of 50"]


def test_line_of_a_step(records: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records[1]["kept"]["carried"] = 1
    progress = progress_into(tmp_path / "run.log")
    for record in records:
        progress.show(from_json(record))
    out = capsys.readouterr().out
    assert out == (tmp_path / "run.log").read_text()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith(
        "held-out prompts before training: pass@1 0.125 [0.115, 0.145], pass@8 0.500 [0.470, 0.540]"
    )
    assert lines[3].startswith("1 0.062 2 5 6% 20.0% 5.00s")
    assert lines[4].startswith("2 0.125 0.200 [0.19, 0.22] 2 (1 carried) 3 12% 3.7% 5.00s")
    assert lines[5].startswith("3 0.188 0.250 [0.24, 0.27] 2 2 19% 62.5% 5.00s")
    assert lines[5].endswith("0s")  # nothing is left to do after the last step


def test_turns_have_a_column_where_there_are_tools(
    records: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress, plain = progress_into(tmp_path / "run.log"), progress_into(tmp_path / "plain.log")
    for record in records:
        plain.show(from_json(record))
        progress.show(from_json(record | {"tools": CALLED} if "sampling" in record else record))
    lines = (tmp_path / "run.log").read_text().splitlines()
    at = lines[2].index("  turns") + len("  turns")
    assert [line[at - 6 : at] for line in lines[3:]] == ["  2.50"] * 3
    rest = [line[: at - 7] + line[at:] for line in lines[2:]]
    assert [*lines[:2], *rest] == (tmp_path / "plain.log").read_text().splitlines()
    assert max(map(len, lines[2:])) <= 100
    assert capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_columns_stand_under_their_heads_and_fit(width: int, records: list[dict[str, Any]]) -> None:
    lines = StepLines(width)
    for record in records[1:]:
        record["step"] += 9_000
        record["kept"]["groups"] = 512
        line = lines.line(from_json(record), 100, "23h59m").plain
        assert len(line) <= width
        rate = f"{record['sampling']['samples'] / 5:,.0f}"
        for head, value in (("step", str(record["step"])), ("groups", "512 (100 carried)"), ("rollouts/s", rate)):
            if head in lines.header:
                assert line[: lines.header.index(head) + len(head)].endswith(f" {value}")
    assert len(lines.header) <= width
    assert len(lines.legend) <= width


def test_wider_terminals_show_more_columns_and_the_widest_all() -> None:
    heads = [StepLines(width).header.split("  ") for width in (40, 60, 80, 100, 126, 1000)]
    shown = [{head for head in one if head} for one in heads]
    for narrow, wide in pairwise(shown):
        assert narrow <= wide
    assert {"step", "reward", "held-out pass@1", "groups", "cut", "time", "left"} <= {h.strip() for h in shown[2]}
    assert len(shown[0]) < len(shown[2]) < len(shown[4]) == len(shown[5])


def test_a_step_that_sampled_nothing_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The surplus of earlier steps filled the step."""
    empty = step(5, samples=0, sampled=0, unique=0, distinct=0, groups=1)
    empty["sampling"]["groups"] = 0
    before = step(4, samples=40, sampled=90, unique=80, distinct=30, groups=5)
    before["kept"]["carried"] = 7
    progress = progress_into(tmp_path / "run.log")
    progress.recall(typed([before]))  # as when a run is resumed
    progress.show(from_json(empty))
    assert re.search(r"^ +5 +0\.312 +2 \(2 carried\) +0 +0% +0\.0%", capsys.readouterr().out, re.MULTILINE)


def test_a_step_with_many_rounds_has_extra_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At rounds 3, 4, 6, 10, ...: seldom enough for a step of a hundred rounds."""
    progress = progress_into(tmp_path / "run.log")
    for number in range(1, 21):
        progress.observe(Round(7, number, number // 2, 16))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step 7: round {n}, {n // 2} of 16 mixed groups so far" for n in (3, 4, 6, 10, 18)]
    assert (tmp_path / "run.log").read_text().splitlines() == lines


CUT = "50% of the rollouts were truncated at sampling.max_new_tokens; raise it"


def test_cut_rollouts_are_named_at_most_once_in_ten_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning follows a step of which more than a third was cut."""
    progress = progress_into(tmp_path / "run.log")
    counts = []
    for n in (4, 5, 6, 8, 15, 16):
        progress.show(from_json(step(n, samples=16, sampled=90, unique=80, distinct=30, groups=2)))
        counts.append(capsys.readouterr().out.count("truncated at sampling.max_new_tokens"))
    assert counts == [0, 0, 1, 0, 0, 1]  # 6 of 16 is the first above a third


def test_a_reward_of_nearly_all_rollouts_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_into(tmp_path / "run.log")
    counts = []
    for number, accuracy in enumerate((0.5, 0.9, 0.95, 0.99, 1.0), 1):
        record = step(number, samples=16, sampled=90, unique=80, distinct=30, groups=2)
        record["sampling"]["accuracy"] = accuracy
        progress.show(from_json(record))
        counts.append(" ".join(capsys.readouterr().out.split()).count(f"{accuracy:.0%} of the rollouts are correct"))
    assert counts == [0, 0, 1, 0, 0]


def test_limits_of_turns_are_named_where_there_are_tools() -> None:
    record = step(8, samples=16, sampled=90, unique=80, distinct=30, groups=2)
    assert "tools.max_turns" not in str(warnings(from_json(record))["cut"])
    assert str(warnings(from_json(record | {"tools": CALLED}))["cut"]).endswith(
        "; tools.max_turns and tools.max_response_tokens truncate rollouts too"
    )


def test_cut_rollouts_are_named_while_a_step_refills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_into(tmp_path / "run.log")
    for number in range(1, 7):
        progress.observe(Round(16, number, 0, 4, 0.3 if number < 4 else 0.5))
    progress.show(from_json(step(16, samples=16, sampled=90, unique=80, distinct=30, groups=2)))
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:2] == [f"step 16: round {n}, 0 of 4 mixed groups so far" for n in (3, 4)]
    assert CUT in " ".join(lines[2:4])
    assert "step 16: round 6, 0 of 4 mixed groups so far" in lines[3:5]
    assert out.count("truncated at sampling") == 1


def test_time_left_by_the_budget_alone(records: list[dict[str, Any]], tmp_path: Path) -> None:
    """1,600 samples are half of 3,200: as much time is left as has passed."""
    screen = Screen()
    screen.log_to(tmp_path / "run.log")
    progress = TrainingProgress(None, Budget("samples", 3200), screen)
    progress.show(from_json(records[0]))
    progress._start = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brorl.console.progress.perf_counter", lambda: 100.0)
        for record in records[1:3]:
            progress.show(from_json(record))
    assert "1m40s" in (tmp_path / "run.log").read_text().splitlines()[-1]


def test_nothing_done_is_no_table_and_names_with_brackets_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a[lr=1]").mkdir()
    finish([], tmp_path / "a[lr=1]", "stopped", ("go on",))
    out = capsys.readouterr().out
    assert out.split("\n")[1].startswith("stopped")
    assert "go on" in out
    assert "a[lr=1]" in out


def covered(
    informative: dict[int, float] | None, unsampled: dict[int, float] | None, q_pos: float | None, groups: int = 4
) -> Any:
    pooled = {"mixed_fraction_at": informative or {}, "unsampled_correct_at": unsampled, "q_pos": q_pos}
    record = {"step": 1, "sampling": {"groups": groups}, "coverage": {"pooled": pooled}}
    return json.loads(json.dumps(record))  # as read from the file


def test_coverage_table() -> None:
    steps = [covered({16: 0.9, 64: 0.9}, {16: 0.9, 64: 0.9, 256: 0.9}, 0.9)] * 3  # too old to count
    steps += [covered({16: 0.5, 64: 0.8}, {16: 0.3, 64: 0.2, 256: 0.1}, 0.4)] * 20
    steps += [covered({16: 0.25, 64: 0.4}, {16: 0.1, 64: 0.05, 256: 0.0}, 0.1, groups=8)] * 5
    table = coverage_table(typed(steps))
    assert "last 25 steps" in table.title
    assert table.columns == ("N =", "16", "64", "256*")
    assert "mixed groups: groups with correct and incorrect rollouts" in " ".join(table.notes)
    assert "from the same 64 rollouts per prompt" in " ".join(table.notes)
    informative, mass = table.rows
    assert informative[1:] == (f"{(80 * 0.5 + 40 * 0.25) / 120:.1%}", f"{(80 * 0.8 + 40 * 0.4) / 120:.1%}", "-")
    whole = 20 * 0.4 + 5 * 0.1
    assert mass[1:] == tuple(f"{1 - (20 * a + 5 * b) / whole:.1%}" for a, b in ((0.3, 0.1), (0.2, 0.05), (0.1, 0.0)))


def test_coverage_table_without_an_estimate() -> None:
    table = coverage_table(typed([covered({16: 0.5}, None, None)]))
    assert len(table.rows) == 1
    assert "all responses were unique" in " ".join(table.notes)
    nothing_solved = coverage_table(typed([covered({16: 0.0}, {16: 0.0, 64: 0.0}, 0.0)]))
    assert "no correct response was sampled" in " ".join(nothing_solved.notes)
    assert coverage_table(typed([covered(None, None, None)])).rows == ()
    assert coverage_table(typed([{"step": 1, "sampling": {}}])).rows == ()


def checked(change: float, half: float, risen: int, correct: int, drop: float | None) -> dict[str, Any]:
    fraction = risen / correct if correct else None
    return {"step": 1, "sampling": {}, "update": {}, "held_out_check": {
        "change": change, "change_low": change - half, "change_high": change + half, "num_correct": correct,
        "fraction_improved": fraction, "worst_drop": drop,
    }}  # fmt: skip


def test_held_out_checks_are_pooled() -> None:
    assert held_out_check_lines(typed([{"step": 1, "sampling": {}}])) == []
    records = [
        checked(0.02, 0.003, 6, 10, -0.004),
        checked(-0.01, 0.004, 30, 30, -0.5),
        checked(0.0, 0.0, 0, 0, None),
        {"step": 4, "sampling": {}, "update": {}},
        {"step": 5, "sampling": {}, "attempt": 0},  # no update
    ]
    (line,) = held_out_check_lines(typed(records))
    mean, half = 0.01 / 3, 0.005 / 3
    assert "3 of 4 updates" in line
    assert f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]" in line
    assert "90% of the correct mass rose" in line
    assert "was 0.5" in line
    assert "mass" not in held_out_check_lines(typed(records[2:]))[0]
    assert "no sampled response dropped" in held_out_check_lines(typed([checked(0.1, 0.01, 3, 3, 0.0)]))[0]
    assert held_out_check_lines(typed([{"step": 1, "sampling": {}, "held_out_check": {"change": None}}])) == []


def test_unusual_events_of_a_step_have_notes() -> None:
    record = step(3, samples=10, sampled=20, unique=10, distinct=5, groups=2)
    assert step_notes(from_json(record)) == []
    record["sampling"] |= {"verifier_timeouts": 4, "verifier_failures": 1}
    record["evaluation"] = evaluation(0.1, 0.2, 3) | {"verifier_timeouts": 0, "verifier_failures": 7}
    record["update"] |= {"out_of_memory_retries": 1, "nodes_per_pass": 512, "old_policy_kl": 3.25}
    record |= {"reference_reset": "for a reason", "collapse": "it collapses"}
    lines = step_notes(from_json(record))
    assert [line.startswith("warning:") for line in lines] == [False, False, False, True, False, True]
    assert [line.split()[0] for line in lines[:2]] == ["4", "0"]
    assert [" 1 failed" in lines[0], " 7 failed" in lines[1], " 512 " in lines[2], " 3.2 " in lines[3]] == [True] * 4
    assert "lower optimizer.learning_rate" in lines[3]
    assert lines[4].endswith("for a reason")
    assert lines[5].endswith("it collapses")


def test_an_attempt_costs_and_is_no_step(records: list[dict[str, Any]]) -> None:
    attempt = step(4, samples=500, sampled=900, unique=90, distinct=9, groups=2) | {"attempt": 0}
    del attempt["update"]
    rows = {row[0]: row[1:] for row in cost_table(typed([*records, attempt])).rows}
    assert (rows["steps"][0], rows["rollouts"][0]) == ("3", "2,500")


def test_dropped_rollouts_are_part_of_the_cost(records: list[dict[str, Any]]) -> None:
    for number, record in enumerate(records[1:], 1):
        record["sampling"] |= {"samples_dropped": 100 * number, "unique_tokens_dropped": 7 * number}
    rows = {row[0]: row[1:] for row in cost_table(typed(records)).rows}
    dropped = 100 + 200 + 300
    assert rows["dropped"][0] == str(dropped)
    assert f"not kept: {dropped / 2000:.0%}, " in rows["dropped"][1]
    assert f", {7 * 6} tokens computed" in rows["dropped"][1]
    for record in records[1:]:
        record["sampling"]["samples_dropped"] = 0
    assert "dropped" not in {row[0] for row in cost_table(typed(records)).rows}


def test_tables_fit_80_columns(records: list[dict[str, Any]]) -> None:
    """The run is long, with several sources and large numbers."""
    big = {"samples": 10**9, "sampled_tokens": 10**12, "unique_tokens": 10**11, "distinct_responses": 10**8,
           "samples_dropped": 5 * 10**8, "unique_tokens_dropped": 10**10}  # fmt: skip
    fractions = dict.fromkeys(("16", "64", "256", "512"), 0.123)
    pooled = {"mixed_fraction_at": fractions, "unsampled_correct_at": {**fractions, "2048": 0.1}, "q_pos": 0.9}
    for record in records:
        if "sampling" in record:
            record["sampling"] |= big
            record["coverage"] = {"pooled": pooled}
        if "evaluation" in record:
            record["evaluation"]["by_source"] = {"a source with a name": record["evaluation"]["pass_at"]}
    tables = [outcome_table(typed(records)), coverage_table(typed(records)), cost_table(typed(records))]
    out = io.StringIO()
    console = Console(file=out, width=80)
    for table in tables:
        console.print(table)
    lines = out.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert not any("…" in line for line in lines)  # nothing is cut either
    assert f"{10**9 * 3:,}" in out.getvalue()


REASON = "unverified: a worker was lost"


def lossy(record: dict[str, Any], lost: int, rollouts: int = 1000) -> dict[str, Any]:
    sampling = record["sampling"] | {
        "samples": rollouts, "samples_unverified": lost, "unverified_reasons": {REASON: lost}, "groups_unverified": 0,
    }  # fmt: skip
    return record | {"sampling": sampling}


def test_warnings_of_a_step(rng: np.random.Generator) -> None:
    """The warnings are about more than one percent of the rollouts, and about programs that ran out of time."""
    record = step_record(rng, 1, random_step(rng, 2, 8))
    for lost in (0, 10, 11, 1000):
        note = warnings(from_json(lossy(record, lost))).get("unverified")
        assert (note is not None) == (lost > 10)
        assert note is None or note.startswith(f"warning: {lost:,} of 1,000 rollouts could not be verified")
        assert note is None or REASON in note
    record = record | {"sampling": record["sampling"] | {"verifier_batch_timeouts": 12}}
    note = warnings(from_json(record))["programs"]
    assert note is not None
    assert note.startswith("warning: 12 responses used up")
    assert "verification.batch_timeout_s" in note


def test_a_warning_comes_at_most_once_in_ten_steps(rng: np.random.Generator) -> None:
    screen = Screen()
    screen.console = Console(file=io.StringIO(), width=200, highlight=False)
    shown = TrainingProgress(40, Budget("steps", 40.0), screen)
    lossy_steps = {2, 3, 4, 11, 12, 13, 30}
    for step in range(1, 32):
        record = step_record(rng, step, random_step(rng, 2, 8))
        shown.show(from_json(lossy(record, 100) if step in lossy_steps else record))
    assert isinstance(screen.console.file, io.StringIO)
    lines = screen.console.file.getvalue().splitlines()
    warned, step = [], 0
    for line in lines:
        if found := re.match(r" *(\d+) +-?\d+\.\d{3} ", line):
            step = int(found[1])
        if "could not be verified" in line:
            warned.append(step)
    assert warned == [2, 12, 30]


def test_lost_evaluations_are_named() -> None:
    evaluation = {"num_prompts": 10, "num_samples": 8, "num_unverified": 3, "pass_at": {}}
    (line,) = step_notes(from_json({"step": 0, "evaluation": evaluation}))
    assert line.startswith("warning: 3 of 80 responses")
    (line,) = step_notes(from_json({"step": 0, "evaluation_unverified": 80}))
    assert line.startswith("warning: no evaluation: 80 responses")
