"""The study's recipes are of one kind, its stages can be stopped, and its tables state what the runs measured."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from brorl.config.reading import make_config, read_recipe

STUDY = Path(__file__).parents[1] / "examples" / "plateau"


def test_all_tasks_are_trained_and_judged_alike() -> None:
    three, four, five, many = (
        make_config(read_recipe(str(STUDY / f"{name}.yaml")), {}, name).model_dump()
        for name in ("three", "four", "five", "many")
    )
    for other in (four, five, many):
        (one,), (theirs,) = three["data"]["sources"], other["data"]["sources"]
        assert {name for name in one if one[name] != theirs[name]} == {"num_numbers", "max_number"}
        assert {name for name in three if three[name] != other[name]} <= {"model", "data", "sampling", "evaluation"}
    for other in (five, many):
        assert {k for k in three["sampling"] if three["sampling"][k] != other["sampling"][k]} == {"max_new_tokens"}
    assert {k for k in three["evaluation"] if three["evaluation"][k] != five["evaluation"][k]} == {"num_prompts"}
    assert three["sampling"] == four["sampling"]
    assert three["evaluation"] == four["evaluation"] == many["evaluation"]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STUDY))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    return importlib.import_module("study")


@pytest.mark.slow
def test_the_arms_of_the_long_runs_are_recipes_and_are_not_tuned_on_what_judges_them(study: Any) -> None:
    seen: dict[tuple[str, str], set[int]] = {}
    for task, table in study.study().items():
        for stage in table["stages"]:
            for _, seed, settings in study.runs_of(task, stage):
                given = {key: value for key, value in settings.items() if key not in ("model", "objective")}
                config = make_config(read_recipe(str(STUDY / f"{task}.yaml")), given, stage)
                assert config.engine.clock == "cpu"
                skipped = config.evaluation.skip_prompts
                judged = set(range(skipped, skipped + config.evaluation.num_prompts))
                kind = "verdict" if stage.startswith("verdict") else "tries"
                seen.setdefault((task, f"{kind} seeds"), set()).add(seed)
                seen.setdefault((task, f"{kind} prompts"), set()).update(judged)
        for what in ("seeds", "prompts"):
            assert not seen.get((task, f"tries {what}"), set()) & seen.get((task, f"verdict {what}"), set())


@pytest.mark.example
def test_a_stopped_stage_continues_and_its_table_states_what_the_runs_measured(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.yaml"
    settings = {
        "budget.unit": "samples", "budget.limit": 600, "budget.eval_points": [200], "steps": None, "report": False,
        "evaluation.every": 0, "evaluation.num_prompts": 4, "checkpoint_every": 1, "prompts_per_step": 4,
    }  # fmt: skip
    arms = {
        "16 plain": {}, "32 averaged": {"rollouts_per_prompt": 32, "optimizer.ema_decay": 0.9},
        "16 focal": {"objective": "focal:1"},
    }  # fmt: skip
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
    rows = [row[2:-2].split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| ")][2:]
    assert len(rows) == 6
    for arm, seed, _, steps, _, _, _, end, best, averaged in rows:
        assert bool(averaged) == (arm == "32 averaged")
        assert float(best.split("/")[0]) >= float(end.split("/")[0])
        folder = tmp_path / "runs" / "three" / "tries" / arm.replace(" ", "_") / f"seed-{seed}"
        last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
        assert int(steps) == last["step"]
        values = [estimate["value"] for estimate in last["evaluation"]["pass_at"].values()]
        assert [float(value) for value in end.split("/")] == pytest.approx(values, abs=5.1e-4)


def cells_of(markdown: str) -> list[list[str]]:
    return [row.strip("| ").split(" | ") for row in markdown.splitlines() if row.startswith("| ")][2:]


def run_of_three_evaluations(arm: str, n: int, seed: int, draw: np.random.Generator) -> dict[str, Any]:
    """Return a run whose evaluations are at 0, 10 and 20 seconds, with 40 prompts of 32 responses."""
    counts = [draw.binomial(32, draw.uniform(0.1, 0.3 + 0.2 * i, 40)).tolist() for i in range(3)]
    costs = [{"steps": i, "seconds": 10.0 * i, "samples": 100 * n * i, "tokens": 1000 * i} for i in range(3)]
    evaluations = [
        {**cost, "pass_at": {"1": float(np.mean(c)) / 32, "32": float(np.mean(np.array(c) > 0))}, "num_correct": c,
         "mixed": 5 * i, "groups": 9 * i, "correct": 20 * n * i**2}
        for i, (cost, c) in enumerate(zip(costs, counts, strict=True))
    ]  # fmt: skip
    settings = {
        "model": "quickstart", "rollouts_per_prompt": n, "prompts_per_step": 4, "budget.unit": "seconds",
        "budget.limit": 20, "budget.eval_points": [10],
    }  # fmt: skip
    return {"arm": arm, "seed": seed, "settings": settings, "evaluations": evaluations}


@pytest.mark.example
def test_a_run_with_an_objective_that_fails_is_not_finished(tmp_path: Path) -> None:
    command = [sys.executable, str(STUDY / "objectives.py"), "focal:1", "train", str(tmp_path / "missing.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "missing.yaml" in run.stderr


@pytest.mark.example
@pytest.mark.parametrize("objective", ["focal", "focal:x", "solved:0.5", "nonsense:1"])
def test_an_unknown_objective_is_named(objective: str) -> None:
    command = [sys.executable, str(STUDY / "objectives.py"), objective, "train"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.endswith(f"focal:GAMMA, spread:SIZE or solved:VISITS, got {objective}\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_verdict_states_the_differences_of_its_runs(
    study: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    runs = [
        run_of_three_evaluations(arm, n, seed, rng) for arm, n in (("16 a", 16), ("512 b", 512)) for seed in (0, 1, 2)
    ]
    runs.append(run_of_three_evaluations("16 a", 16, 3, rng))  # 512 b has not finished this seed: it is left out
    stage = {
        "seeds": [0, 1, 2, 3],
        "settings": {},
        "differences": [["512 b", "16 a"]],
        "arms": {"16 a": {}, "512 b": {}},
    }
    table = tmp_path / "table.yaml"
    table.write_text(json.dumps({"three": {"model": "quickstart", "stages": {"verdict": stage}}}))
    monkeypatch.setenv("STUDY", str(table))
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    (tmp_path / "three-verdict.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    study.main([])
    arms, course, training, differences, *_ = capsys.readouterr().out.split("## ")[1:]

    # of 100 N samples between two evaluations 20 N, then 60 N, are correct; of 9 groups 5 are mixed
    assert [row[1:] for row in cells_of(training)] == [["20% / 56%", "60% / 56%"]] * 2

    def counts(arm: str, point: int) -> Any:
        return np.array([r["evaluations"][point]["num_correct"] for r in runs if r["arm"] == arm and r["seed"] < 3])

    measures = [lambda c: c / 32, lambda c: (c > 0) * 1.0]  # pass@1, and pass@k of k = n
    for arm, steps, samples, tokens, *scores, moved in cells_of(arms):
        assert (steps, samples, tokens) == ("2", "3.20k" if "16" in arm else "102k", "2.00k")
        for score, measure in zip(scores, measures, strict=True):
            assert float(score.split()[0]) == pytest.approx(measure(counts(arm, 2)).mean(), abs=5.1e-4)
        start, end = counts(arm, 0) > 0, counts(arm, 2) > 0
        gained, lost = ((a & ~b).sum(1).mean() for a, b in ((end, start), (start, end)))
        assert [float(x) for x in moved.split(" / ")] == pytest.approx([gained, lost], abs=0.051)
    for arm, *points in cells_of(course):
        expected = [[m(counts(arm, i)).mean() for m in measures] for i in (1, 2)]
        assert [[float(x) for x in point.split("/")] for point in points] == [
            pytest.approx(values, abs=5.1e-4) for values in expected
        ]
    rows = {at: values for _, at, *values in cells_of(differences)}
    best = 1 + int(counts("16 a", 2).mean() > counts("16 a", 1).mean())
    for at, point in (("20 s", 2), ("2k unique tokens", 2), (f"best of the second, {10 * best} s", best)):
        for text, measure in zip(rows[at], measures, strict=True):
            apart_SP = measure(counts("512 b", 2)) - measure(counts("16 a", point))
            parts = [(apart_SP.mean(axis), apart_SP.shape[1 - axis]) for axis in (0, 1)]
            shown = apart_SP.mean(0)[apart_SP.mean(0) != 0]  # and prompts may show none of such a size
            unseen = (np.mean(shown**2) if shown.size else 1.0) * (1 - 0.025 ** (1 / apart_SP.shape[1])) ** 2
            half = (unseen + sum(t.ppf(0.975, n - 1) ** 2 * mean.var(ddof=1) / n for mean, n in parts)) ** 0.5
            value, low, high = (float(x.strip("[],")) for x in text.rstrip("* ").split())
            assert [value, low, high] == pytest.approx(
                [apart_SP.mean(), apart_SP.mean() - half, apart_SP.mean() + half], abs=5.1e-4
            )
            assert ("*" in text) == (low > 0 or high < 0)

    study.main(["figure", str(tmp_path / "figure.png"), "verdict"])
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    with pytest.raises(SystemExit, match="no stage verdict-b has finished runs of all arms"):
        study.main(["figure", str(tmp_path / "figure.png"), "verdict-b"])

    del stage["differences"]
    table.write_text(json.dumps({"three": {"model": "quickstart", "stages": {"verdict": stage}}}))
    study.main([])
    assert capsys.readouterr().out.split("## ")[1:] == [arms, course, training]
