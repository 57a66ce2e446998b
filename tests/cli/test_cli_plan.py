"""`brorl plan` from the command line: a whole plan, a run directory, and one line for whatever cannot work."""

import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from case_tables import table
from run_support import SMALL, command, refused, save_tiny_model

PILOT = ("--pilot-prompts=12", "--pilot-rollouts=8", "--rollouts=4,16,64")


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
refusal = partial(refused, "plan")


def contents() -> list[Path]:
    return sorted(Path().rglob("*"))


@pytest.mark.slow
def test_a_plan_from_end_to_end() -> None:
    outcome = command("plan", *SMALL, *PILOT, "--seconds-per-step=2.5", "--output-dir=out/mine")
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    assert "8 rollouts for each of 12 training prompts, 96 in total (1.5 of a step)" in outcome.said
    assert "Steps of 2.5 s" in outcome.said
    assert "What a run needs by how it trains" in outcome.said
    record = json.loads(Path("out/mine/plan.json").read_text())
    assert [r["num_rollouts"] for r in record["rows"]] == [4, 16, 64]
    assert record["pilot"]["num_prompts"] == 12
    assert record["recipe"]["num_rollouts"] == 16
    best = record["recommendation"]
    assert best["seconds_per_step"] == 2.5
    assert best["rollouts_per_prompt"] in best["tied"]
    chosen = next(r for r in record["rows"] if r["num_rollouts"] == best["rollouts_per_prompt"])
    assert chosen["budget_seconds"] <= 2.5
    for row in record["rows"]:
        assert 0 <= row["kept"]["low"] <= row["kept"]["value"] <= row["kept"]["high"] <= 1
        assert row["seconds"]["total"] == pytest.approx(sum(s for n, s in row["seconds"].items() if n != "total"))
    assert all(line in outcome.said for line in best["lines"])
    assert sorted(p.name for p in Path("out/mine").iterdir()) == ["plan.json"]
    assert f"--rollouts_per_prompt {best['rollouts_per_prompt']}" in outcome.said
    assert f"--prompts_per_step {best['prompts_per_step']}" in outcome.said
    measure_it = next(line for line in outcome.out.splitlines() if line.startswith("or measure it: "))
    program, *words = shlex.split(measure_it.partition(": ")[2])
    assert (program, words[:2]) == ("brorl", ["compare", "quickstart"])
    assert "`seeds`: expected at least 1" in command(*words, "--seeds=0").err  # the last check of the command line


@pytest.mark.slow
def test_a_run_gives_its_settings_and_its_last_checkpoint(short_run: Path) -> None:
    before = {p: p.read_bytes() for p in short_run.rglob("*") if p.is_file()}
    outcome = command("plan", short_run, *PILOT, "--rollouts=4,16")
    assert outcome.code == 0, outcome
    assert "checkpoints/step-000001" in outcome.said
    record = json.loads(Path("runs/plan/plan.json").read_text())
    assert record["model"] == str(short_run / "checkpoints" / "step-000001")
    assert record["recipe"]["prompts_per_step"] == 4  # the run's, not the quickstart's 32
    assert {p: p.read_bytes() for p in short_run.rglob("*") if p.is_file()} == before  # nothing of the run has changed
    assert (
        f"brorl train {short_run / 'config.yaml'} --model {short_run / 'checkpoints' / 'step-000001'}" in outcome.said
    )
    assert re.search(r"--output_dir null --rollouts_per_prompt", outcome.said)


@pytest.mark.parametrize(*table(__file__, "what_cannot_work_is_said_before_any_work"))
def test_what_cannot_work_is_said_before_any_work(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_runs_without_a_whole_checkpoint(short_run: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints" / "step-000002").mkdir(parents=True)
    (unfinished / "config.yaml").write_bytes((short_run / "config.yaml").read_bytes())
    assert "has no complete checkpoint yet" in refusal(unfinished)
    assert "is not a complete checkpoint" in refusal(unfinished / "checkpoints" / "step-000002")


@pytest.mark.slow
def test_a_model_that_solves_nothing_stops_after_its_pilot(tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "tiny")
    outcome = command("plan", tiny, *SMALL, *PILOT, "--sampling.max_new_tokens=4")
    assert outcome.code == 1
    assert outcome.err.startswith("brorl: none of the 12 prompts has both correct and incorrect rollouts among 8")
    assert outcome.err.count("\n") == 1
    assert not Path("runs/plan").exists()
