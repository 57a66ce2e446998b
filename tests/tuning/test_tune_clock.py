"""The budget of a tuning holds on machines of any speed, and what is complete at its end is the answer."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest

import brorl
from brorl.comparison.arm_recipes import ArmRecipe
from brorl.config.reading import make_config, read_recipe
from brorl.format import Estimate
from brorl.tuning import race as module
from brorl.tuning.spec import NUM_EVALUATIONS, RUNGS, TuneClock, TuningSpec, room_after


def spec_of(
    seconds: float, run_seconds: float, arms: int = 4, seeds: int = 3, jobs: int = 2, **more: Any
) -> TuningSpec:
    config = make_config(read_recipe("quickstart"), {"engine.clock": more.pop("clock", "wall")}, "")
    recipes = [ArmRecipe("yours", config, title="mine")] + [ArmRecipe(f"candidate {i}", config) for i in range(1, arms)]
    start = {1: Estimate(0.1, 0.05, 0.15), 256: Estimate(0.9, 0.8, 0.95)}
    return TuningSpec("pass@1", 1, seconds, run_seconds, seeds, jobs, "here", start, (16, 16), tuple(recipes), **more)


@pytest.mark.parametrize("startup", [0.0, 2.0, 20.0, 60.0])
@pytest.mark.parametrize("clock_setting", ["wall", "cpu"])
@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_the_race_and_the_final_end_before_the_deadline(
    startup: float, clock_setting: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that starts slowly, and on which a second of the processor takes longer than a second."""
    now, stretch, ends = 0.0, 1.0 + startup / 20 * (clock_setting == "cpu"), []
    monkeypatch.setattr("brorl.tuning.spec.perf_counter", lambda: now)

    def wave(fraction: float, evaluations: int) -> float:
        return startup + fraction * spec.run_seconds * stretch + evaluations * 2 * spec.evaluation_seconds

    for seconds in (300.0, 1800.0):
        spec = spec_of(seconds, seconds / 12, 8, jobs=jobs, clock=clock_setting, evaluation_seconds=1.0)
        now, left = 0.0, len(spec.arms)
        clock = TuneClock.start(spec)
        for rung, fraction in enumerate(RUNGS):
            if rung and clock.rung_seconds(rung) > clock.left_to_race:
                break
            before = (0.0, *RUNGS)[rung]
            took = ceil(left / jobs) * wave(fraction - before, 1 if rung else 3)
            now += min(took, clock.left_to_race if rung else clock.left)
            if not rung:
                clock.observe(took)
            left = room_after(rung, len(spec.arms))
        size = clock.size_of_final()
        if size is None:
            assert startup >= 20
            continue
        run_seconds, seeds = size
        assert 2 <= seeds <= 3
        assert spec.run_seconds / 2 <= run_seconds <= spec.run_seconds
        now += ceil(2 * seeds / jobs) * wave(run_seconds / spec.run_seconds, NUM_EVALUATIONS)
        assert now <= clock.deadline * 1.001 <= seconds  # amounts are rounded to four digits
        ends.append(now)
    if startup <= 2:
        assert len(ends) == 2  # a quick machine has its final


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "slots_for", lambda *_: [])
    monkeypatch.setattr(module, "machine_of", lambda *_: "here")
    (tmp_path / "out").mkdir()
    spec_of(300.0, 20.0, used_seconds=30.0).write(tmp_path / "out")
    return tmp_path / "out"


def test_a_race_that_is_stopped_in_its_first_part_has_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "finish_runs", lambda *_: False)
    result = brorl.tune(str(folder), progress=False)
    assert result.answer.startswith("No answer within 5m00s: the first part of the race is not complete; continue with")
    assert result.answer.endswith(f"brorl tune {folder} --budget 10m")
    assert (result.race, result.final, result.page) == ((), None, None)
    assert json.loads((folder / "tune.json").read_text())["used_seconds"] >= 30.0
    brorl.tune(str(folder), budget="20m", progress=False)
    assert json.loads((folder / "tune.json").read_text())["seconds"] == 1200


@pytest.mark.parametrize(("complete", "seeds"), [([2, 2], 2), ([3, 2], 2), ([3, 3], 3), ([1, 0], 0), ([0, 3], 0)])
def test_a_final_that_is_stopped_has_the_seeds_that_are_complete_in_both_arms(
    complete: list[int], seeds: int, folder: Path
) -> None:
    spec = spec_of(300.0, 20.0)
    compared = spec.final(spec.arms[1], 20.0, 3)
    line = {"step": 1, "sampling": {"samples": 1, "sampled_tokens": 1, "unique_tokens": 1}}
    for run in compared.runs_in(folder / "final"):
        run.directory.mkdir(parents=True)
        ends = run.seed < complete[run.arm == "candidate 1"]
        line["seconds"] = {"total": 21.0 if ends else 5.0}
        (run.directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert module._complete_seeds(compared, folder / "final") == seeds
