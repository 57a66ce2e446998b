"""Runs that end with a budget and are evaluated at its marks, against sums over their own metrics."""

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.cost import Budget, Cost
from brorl.runs.step_record import total_cost
from made_up_runs import typed
from run_support import SMALL, command

QUIET = ("--evaluation.every=0", "--diagnostics.held_out_check_every=0", "--checkpoint_every=2", "--steps=50")


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def spent_by(records: list[dict[str, Any]], unit: str) -> list[float]:
    """Cumulative cost at each line."""
    rows = [r["sampling"][unit] if "sampling" in r else 0 for r in records]
    return np.cumsum(rows).tolist()


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps without a budget."""
    path = tmp_path_factory.mktemp("runs") / "probe"
    outcome = command("train", *SMALL, *QUIET, "--steps=3", "--output_dir", path)
    assert outcome.code == 0, outcome.err
    return path


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["samples", "unique_tokens"])
def test_a_run_ends_with_its_budget_and_is_evaluated_at_its_marks(unit: str, probe: Path, tmp_path: Path) -> None:
    spent = spent_by(records_of(probe), unit)
    limit, mark = spent[2] + 1, spent[1] - 1  # reached by the third step, and by the first
    options = (f"--budget.unit={unit}", f"--budget.limit={limit}", f"--budget.eval_points=[{mark}]")
    outcome = command("train", *SMALL, *QUIET, *options, "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    records = records_of(tmp_path / "run")
    assert spent_by(records, unit) == spent
    assert [r["step"] for r in records if "evaluation" in r] == [0, 1, 3]
    of_budget = f"{spent[3]:,.0f} of {limit:,.0f} {unit.replace('_', ' ')} spent"
    assert f"finished 3 steps, ended by the budget: {of_budget}" in outcome.said

    assert command("resume", tmp_path / "run").code == 0  # nothing is left to do
    assert records_of(tmp_path / "run") == records
    more = command("resume", tmp_path / "run", f"--budget.limit={spent[3] + 1}")
    assert more.code == 0, more.err
    assert records_of(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.slow
def test_a_run_with_a_budget_of_seconds_ends_when_its_steps_have_taken_them(tmp_path: Path) -> None:
    options = ("--budget.unit=seconds", "--budget.limit=0.2", "--budget.eval_points=[0.001]")
    assert command("train", *SMALL, *QUIET, *options, "--output_dir", tmp_path / "run").code == 0
    records = records_of(tmp_path / "run")
    seconds = np.cumsum([r["seconds"]["total"] if "seconds" in r else 0.0 for r in records])
    assert seconds[-2] < 0.2 <= seconds[-1]
    assert {0, 1, records[-1]["step"]} == {r["step"] for r in records if "evaluation" in r}


@pytest.mark.slow
def test_a_budget_on_the_command_line_alone_ends_the_run(tmp_path: Path) -> None:
    """The recipe's number of steps would end it after two steps."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 2\n")
    quiet = [option for option in QUIET if not option.startswith("--steps")]
    probe = command("train", recipe, *SMALL, *quiet, "--output_dir", tmp_path / "probe")
    assert "finished 2 steps;" in probe.said
    limit = 2 * int(spent_by(records_of(tmp_path / "probe"), "samples")[-1])  # so that two steps do not reach it

    outcome = command("train", recipe, *SMALL, *quiet, f"--budget.limit={limit}", "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    spent = spent_by(records_of(tmp_path / "run"), "samples")
    assert len(spent) > 3
    assert spent[-2] < limit <= spent[-1]
    assert (
        f"finished {len(spent) - 1} steps, ended by the budget: {spent[-1]:,} of {limit:,} samples spent"
        in outcome.said
    )
    assert f"train longer: brorl resume {tmp_path / 'run'} --budget.limit {2 * limit:g}\n" in outcome.out
    assert command("resume", tmp_path / "run").code == 0
    assert spent_by(records_of(tmp_path / "run"), "samples") == spent


@pytest.mark.slow
def test_a_run_ends_with_its_steps_before_its_budget_and_tells_how_each_prompt_fared(tmp_path: Path) -> None:
    both = ("--steps=1", "--budget.limit=1e6")
    outcome = command("train", *SMALL, *QUIET, *both, "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    spent = spent_by(records_of(tmp_path / "run"), "samples")
    assert len(spent) == 2
    assert f"finished 1 step, ended by steps = 1: {spent[-1]:,} of 1,000,000 samples spent" in outcome.said
    held_out = json.loads((tmp_path / "run" / "held_out.json").read_text())
    for record in records_of(tmp_path / "run"):
        evaluation = record["evaluation"]
        correct = np.array(evaluation["prompts"]["num_correct"])
        assert len(held_out) == correct.size == evaluation["num_prompts"]
        assert correct.mean() / evaluation["num_samples"] == pytest.approx(evaluation["pass_at"]["1"]["value"])
        assert sum(evaluation["prompts"]["sampled_tokens"]) == evaluation["sampled_tokens"]
        assert (correct > 0).sum() == evaluation["solved"]
    assert {p["source"] for p in held_out} == {"countdown"}


@pytest.mark.slow
def test_a_paused_run_continues_as_if_it_had_not_paused(probe: Path, tmp_path: Path) -> None:
    spent = spent_by(records_of(probe), "samples")
    options = (f"--budget.limit={spent[3]}", "--optimizer.schedule=cosine")  # the rate depends on the whole budget
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    marks = f"--budget.eval_points=[{spent[1]},{spent[2]}]"
    assert command("train", *SMALL, *QUIET, *options, marks, "--output_dir", whole).code == 0

    pause = f"--budget.pause_at={spent[1] - 1}"
    outcome = command("train", *SMALL, *QUIET, *options, pause, "--output_dir", paused)
    assert outcome.code == 0, outcome.err
    assert f"paused after step 1 (budget.pause_at = {spent[1] - 1:g})" in outcome.said
    assert f"continue with: brorl resume {paused}" in outcome.out
    assert command("resume", paused, f"--budget.pause_at={spent[2]}").code == 0
    assert records_of(paused)[-1]["step"] == 2
    assert command("resume", paused).code == 0  # the same pause is behind it

    without = [{k: v for k, v in r.items() if k != "seconds"} for r in records_of(paused)]
    for record in without:
        record.get("evaluation", {}).pop("seconds", None)
    expected = [{k: v for k, v in r.items() if k != "seconds"} for r in records_of(whole)]
    for record in expected:
        record.get("evaluation", {}).pop("seconds", None)
    assert without == expected


@pytest.mark.parametrize(
    "options", [("eval_points=[5]",), ("limit=4", "eval_points=[5]"), ("pause_at=5",), ("limit=4", "pause_at=5")]
)
def test_marks_and_pauses_need_a_budget(options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = command("train", *SMALL, *(f"--budget.{option}" for option in options), "--output_dir", tmp_path / "run")
    assert outcome.code == 2
    name = options[-1].partition("=")[0]
    assert f"budget.{name} must be above 0 and at most budget.limit" in outcome.said


def test_costs_add_up(rng: np.random.Generator) -> None:
    records: list[dict[str, Any]] = [{"step": 0, "evaluation": {}}]
    for step in range(1, 6):
        samples, sampled, unique = (int(n) for n in rng.integers(1, 1000, 3))
        sampling = {"samples": samples, "sampled_tokens": sampled, "unique_tokens": unique}
        records.append({"step": step, "sampling": sampling, "seconds": {"total": float(rng.random()), "training": 9.0}})
    steps = typed(records)
    total = total_cost(steps)
    assert total.steps == 5
    assert total.samples == sum(r["sampling"]["samples"] for r in records[1:])
    assert total.unique_tokens == sum(r["sampling"]["unique_tokens"] for r in records[1:])
    assert total.seconds == pytest.approx(sum(r["seconds"]["total"] for r in records[1:]))
    assert steps[0].cost == Cost()


def test_marks_are_passed_once() -> None:
    budget = Budget("samples", 100, (10, 20, 100))
    at = [Cost(samples=n) for n in (0, 9, 10, 30, 99, 100, 120)]
    passed = [budget.passes_eval_point(before, after) for before, after in pairwise(at)]
    assert passed == [False, True, True, False, True, False]
    assert [budget.is_spent(cost) for cost in at] == [False] * 5 + [True] * 2


@pytest.mark.slow
def test_seconds_are_those_of_the_chosen_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU clock is replaced by one that ticks once per look: all seconds are then whole numbers."""
    ticks = count()
    monkeypatch.setattr("brorl.rollout.settings.process_time", lambda: float(next(ticks)))
    for clock, whole in (("cpu", True), ("wall", False)):
        outcome = command(
            "train", *SMALL, *QUIET[:3], "--steps=2", f"--engine.clock={clock}", "--output_dir", tmp_path / clock
        )
        assert outcome.code == 0, outcome.err
        seconds = [s for r in records_of(tmp_path / clock) if "update" in r for s in r["seconds"].values()]
        assert all(s.is_integer() for s in seconds) == whole
