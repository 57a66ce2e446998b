"""The study's recipes are of one kind, and its scripts go through: tuning, plateau, rates, comparison, tables."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brorl.config.reading import make_config, read_recipe

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "examples" / "plateau"
PROMPTS = {16: 16, 64: 8, 512: 4}


def test_both_tasks_are_trained_and_judged_alike() -> None:
    three, four, five = (
        make_config(read_recipe(str(STUDY / f"{name}.yaml")), {}, name).model_dump()
        for name in ("three", "four", "five")
    )
    for other in (four, five):
        (one,), (theirs,) = three["data"]["sources"], other["data"]["sources"]
        assert {name for name in one if one[name] != theirs[name]} == {"num_numbers", "max_number"}
        assert {name for name in three if three[name] != other[name]} <= {"model", "data", "sampling", "evaluation"}
    assert {k for k in three["sampling"] if three["sampling"][k] != five["sampling"][k]} == {"max_new_tokens"}
    assert {k for k in three["evaluation"] if three["evaluation"][k] != five["evaluation"][k]} == {"num_prompts"}
    assert (three["sampling"], three["evaluation"]) == (four["sampling"], four["evaluation"])


def rate_of(run: Path) -> float:
    return make_config(read_recipe(str(run / "config.yaml")), {}, "config.yaml").optimizer.learning_rate


@pytest.mark.example
def test_the_study_goes_through_and_its_tables_say_what_the_runs_measured(tmp_path: Path) -> None:
    folder = tmp_path / "three"
    environment = {
        **os.environ, "REHEARSE": "1", "OUT": str(folder), "PYTHON": sys.executable,
        "BRORL": str(Path(sys.executable).parent / "brorl"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def records(path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / path / "metrics.jsonl").read_text().splitlines()]

    def last_pass(path: str) -> float:
        return float([r["evaluation"]["pass_at"]["1"]["value"] for r in records(path) if "evaluation" in r][-1])

    run("bash", "examples/plateau/study.sh", "three")
    again = run("bash", "examples/plateau/study.sh", "three", "tune")
    assert "8 of 8 runs are complete already" in again  # nothing is trained again
    text = run(sys.executable, "examples/plateau/tables.py", str(folder))
    tables = {
        part.splitlines()[0]: [row.strip("| ").split(" | ") for row in part.splitlines() if row.startswith("| ")][2:]
        for part in text.split("## ")[1:]
    }
    # Tuning, two ways to the plateau; of both points rates, costs, coverage left; against the first, gained and lost.
    assert len(tables) >= 9  # coverage left needs every N to rise, and has a title for every pass@1

    rates = {}
    for n in PROMPTS:
        tried = {
            rate_of(run): last_pass(str(run.relative_to(folder)))
            for run in folder.glob(f"knee/rate-N{n}/arms/*/seed-0")
        }
        assert sorted(tried) == [3e-5, 1e-4, 3e-4, 1e-3]
        rates[n] = {rate for rate, score in tried.items() if score == max(tried.values())}
    for row in tables["From the knee, 12 seconds, 2 seeds"][1:]:
        n = int(row[0])
        runs = [f"knee/compare/arms/N={n}/seed-{seed}" for seed in (0, 1)]
        assert int(row[1]) == PROMPTS[n]
        assert row[2] == "as N = 16" or float(row[2]) in rates[n]
        steps = [[r["sampling"] for r in records(run) if "sampling" in r] for run in runs]
        assert float(row[3]) == pytest.approx(sum(map(len, steps)) / 2, abs=0.05 + 0.005 * len(steps[0]))
        mixed, groups = (sum(s[key] for one in steps for s in one) for key in ("groups_mixed", "groups"))
        assert float(row[8].rstrip("%")) == pytest.approx(100 * mixed / groups, abs=1.5)
        scored = re.match(r"[\d.]+", row[11])
        assert scored
        assert float(scored[0]) == pytest.approx(sum(map(last_pass, runs)) / 2, abs=5.1e-4)


@pytest.mark.example
def test_the_second_part_goes_through_and_its_tables_state_what_the_runs_measured(tmp_path: Path) -> None:
    environment = {**os.environ, "REHEARSE": "1", "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("examples/plateau/objectives.py", "three")
    again = run("examples/plateau/objectives.py", "three", "verdict")
    assert "6 of 6 runs are complete already" in again
    text = run("examples/plateau/objective_tables.py", str(tmp_path), "--figure", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    tries = set((tmp_path / "three" / "tries").glob("*/*"))
    for part in text.split("## `three` from ")[1:]:
        point = part.partition(":")[0]
        for row in (line for line in part.splitlines() if line.startswith("| n")):
            name, seconds, steps, _, _, end = row.strip("| ").split(" | ")
            folder = tmp_path / "three" / "tries" / point / name
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            last = [r["evaluation"]["pass_at"] for r in records if "evaluation" in r][-1]
            expected = [e["value"] for e in last.values()]
            assert [float(value) for value in end.split("/")] == pytest.approx(expected, abs=6e-4)
            assert int(steps) == sum("update" in r for r in records)
            spent = sum(r["seconds"]["total"] for r in records if "update" in r)
            assert float(seconds) == pytest.approx(spent, abs=0.51)
            tries.remove(folder)
    assert not tries


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STUDY))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    return importlib.import_module("study")


def test_the_arms_of_the_long_runs_are_recipes_and_are_not_tuned_on_what_judges_them(study: Any) -> None:
    seen: dict[tuple[str, str], set[int]] = {}
    for task, table in study.study().items():
        for stage in table["stages"]:
            for _, seed, settings in study.runs_of(task, stage):
                given = {key: value for key, value in settings.items() if key != "model"}
                config = make_config(read_recipe(str(STUDY / f"{task}.yaml")), given, stage)
                assert config.engine.clock == "cpu"
                skipped = config.evaluation.skip_prompts
                judged = set(range(skipped, skipped + config.evaluation.num_prompts))
                kind = "verdict" if stage.startswith("verdict") else "tries"
                seen.setdefault((task, f"{kind} seeds"), set()).add(seed)
                seen.setdefault((task, f"{kind} prompts"), set()).update(judged)
        for what in ("seeds", "prompts"):
            assert not seen[task, f"tries {what}"] & seen.get((task, f"verdict {what}"), set())


@pytest.mark.example
def test_a_stopped_stage_continues_and_its_table_states_what_the_runs_measured(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.yaml"
    settings = {
        "budget.unit": "samples", "budget.limit": 600, "budget.marks": [200], "steps": None, "report": False,
        "evaluation.every": 0, "evaluation.num_prompts": 4, "checkpoint_every": 1, "prompts_per_step": 4,
    }  # fmt: skip
    arms = {"16 plain": {}, "32 averaged": {"rollouts_per_prompt": 32, "optimizer.ema_decay": 0.9}}
    stage = {"seeds": [3, 4], "settings": settings, "arms": arms}
    table.write_text(json.dumps({"three": {"model": "quickstart", "stages": {"tries": stage}}}))
    monkeypatch.setenv("STUDY", str(table))
    monkeypatch.setattr(study, "ROOT", tmp_path / "runs")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")
    study.main(["three"])
    first = study.results("three", "tries")
    assert sorted((r["arm"], r["seed"]) for r in first) == [(a, s) for a in sorted(arms) for s in (3, 4)]

    (tmp_path / "results" / "three-tries.jsonl").unlink()  # as if it had been killed before it wrote the results
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    study.main(["three", "tries"])
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("metrics.jsonl")} == before
    again = study.results("three", "tries")
    assert sorted(again, key=str) == sorted(first, key=str)

    capsys.readouterr()
    study.main([])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| ")][2:]
    assert len(rows) == 4
    for arm, seed, _, steps, _, _, _, end, *_ in rows:
        folder = tmp_path / "runs" / "three" / "tries" / arm.replace(" ", "_") / f"seed-{seed}"
        last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
        assert int(steps) == last["step"]
        values = [estimate["value"] for estimate in last["evaluation"]["pass_at"].values()]
        assert [float(value) for value in end.split("/")] == pytest.approx(values, abs=5.1e-4)
