"""Whole runs whose verifier loses workers to SIGKILL."""

import json
from pathlib import Path

import numpy as np
import pytest

import losing_function
from brorl.runs.stored_rollouts import read_groups, stored_steps
from run_support import SMALL, assert_same_run, command

pytestmark = pytest.mark.linux
REASON = "unverified: a worker was lost"
SETTINGS = (
    *SMALL, "--steps=2", "--store_rollouts_every=1", "--verification.workers=1", "--evaluation.num_prompts=6",
    f"--verification.functions={{countdown: {losing_function.__file__}:verify}}",
)  # fmt: skip


def records_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_once_is_that_of_an_undisturbed_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSING_FOLDER", str(tmp_path))
    for mode in ("no", "once"):
        monkeypatch.setenv("LOSING", mode)
        outcome = command("train", *SETTINGS, "--output_dir", tmp_path / mode)
        assert outcome.code == 0, outcome.said
    assert list(tmp_path.glob("seen-*"))
    assert_same_run(tmp_path / "once", tmp_path / "no")


@pytest.mark.slow
def test_a_run_leaves_out_and_shows_the_responses_that_end_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSING", "some")
    run = tmp_path / "run"
    checks = ("--diagnostics.held_out_check_every=1", "--diagnostics.held_out_rollouts=8")
    outcome = command("train", *SETTINGS, *checks, "--output_dir", run)
    assert outcome.code == 0, outcome.said
    records = records_of(run)
    lost_in_all = complete_in_all = 0
    for record in records[1:]:
        groups = list(read_groups(run, record["step"]))
        lost = 0
        for group in groups:
            assert group.tree.num_rollouts == 16
            for text, verdict, count, done, reward in zip(
                group.texts, group.verdicts, group.tree.leaf_count, group.tree.finished, group.reward_L, strict=True
            ):
                expected = bool(done) and losing_function.is_lost(text, group.prompt.reference)
                assert verdict.unverified == expected == bool(np.isnan(reward))
                if expected:
                    lost += int(count)
                    assert (verdict.reason, verdict.correct) == (REASON, False)
        sampling = record["sampling"]
        assert sampling["samples"] == 16 * len(groups)
        assert sampling.get("samples_unverified", 0) == lost
        if groups:
            fraction = sum(g.num_correct for g in groups) / (sampling["samples"] - lost)
            assert sampling["accuracy"] == pytest.approx(fraction)
        complete = [g.prompt.id for g in groups if g.num_verified == 16]
        # A step whose new prompts all lost a response, or that trains carried groups alone, has no coverage.
        assert record.get("coverage", {}).get("prompts", {}).get("id", []) == complete
        lost_in_all += lost
        complete_in_all += len(complete)
    assert lost_in_all
    assert complete_in_all
    said = command("samples", run, "--step", "2").said
    numbers = sum(r["sampling"].get("samples_unverified", 0) for r in records[2:])
    assert ("verified rollouts" in said) == bool(numbers)
    report = command("report", run)
    assert report.code == 0, report.said
    assert "could not be verified because of infrastructure failures" in (run / "report.html").read_text()
    for record in (records[0], records[-1]):
        evaluation = record["evaluation"]
        groups = list(read_groups(run, record["step"], "evaluations"))
        assert len(groups) == evaluation["num_prompts"] == 6
        verified = [int(g.num_verified) for g in groups]
        assert evaluation["prompts"]["num_correct"] == [g.num_correct for g in groups]
        assert evaluation["prompts"].get("num_unverified", [0] * 6) == [4 - n for n in verified]
        enough = [1 - 0.0**g.num_correct for g, n in zip(groups, verified, strict=True) if n >= 4]
        assert evaluation["pass_at"]["4"]["value"] == pytest.approx(np.mean(enough))
        fractions = [g.num_correct / n for g, n in zip(groups, verified, strict=True) if n]
        assert evaluation["pass_at"]["1"]["value"] == pytest.approx(np.mean(fractions))


@pytest.mark.slow
def test_a_broken_machine_ends_the_run_and_a_resume_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSING", "all")
    run = tmp_path / "run"
    few = ("--prompts_per_step=2", "--evaluation.num_prompts=2")  # every response costs two workers
    outcome = command("train", *SETTINGS, *few, "--output_dir", run)
    assert outcome.code == 1
    assert "most rollouts could not be verified because of infrastructure failures in 3 rounds in a row" in outcome.said
    assert f"most often: {REASON}" in outcome.said
    assert "warning: no evaluation: 8 responses could not be verified" in outcome.said
    records = records_of(run)
    assert [r["step"] for r in records] == [0, 1]
    assert "end_reason" not in records[-1]
    assert records[-1]["failure_reason"].startswith("most rollouts could not be verified")
    assert records[-1]["sampling"]["groups"] == 0
    assert records[-1]["sampling"]["samples_unverified"] == records[-1]["sampling"]["samples"]
    assert stored_steps(run) == [1]
    monkeypatch.setenv("LOSING", "no")
    outcome = command("resume", run)
    assert outcome.code == 0, outcome.said
    records = records_of(run)
    assert [r["step"] for r in records] == [0, 1, 1, 2]
    assert all("update" in r for r in records[2:])
    assert "evaluation" in records[-1]
    assert command("report", run).code == 0
    assert "An infrastructure failure stopped the run at step 1" in (run / "report.html").read_text()
