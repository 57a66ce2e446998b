"""`brorl tune` as a user calls it: a real race and a real final on a tiny budget, and everything that is refused."""

import json
from contextlib import suppress
from functools import partial
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import brorl
from brorl.algorithms.settings import AdvantageSettings
from brorl.comparison import answer as comparison_report
from brorl.comparison.arm_recipes import ArmRecipe
from brorl.comparison.scores import FinishedRun, RunEvaluation
from brorl.config.reading import make_config, parse_yaml, read_recipe
from brorl.cost import Budget, Cost
from brorl.errors import UserError
from brorl.evaluation.questions import build_questions
from brorl.format import Estimate
from brorl.tuning import race as module
from brorl.tuning.answer import TuningResult, recipe_for
from brorl.tuning.race import TuningPilot, with_tuning_prompts
from brorl.tuning.spec import OWN, RUNGS, TuningSpec, candidates
from case_tables import table
from run_support import SMALL, command, refused

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

TINY = tuple(s for s in SMALL if not s.startswith(("--report", "--evaluation.every", "--evaluation.num_prompts")))
refusal = partial(refused, "tune")


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def seconds_of(run: Path) -> float:
    return sum(record.get("seconds", {}).get("total", 0.0) for record in records_of(run))


def score_of(run: Path, spent: float) -> float:
    """Mean pass@1 of the first evaluation at which a run had spent so many seconds; of the last if it ended early."""
    seconds, score = 0.0, -1.0
    for record in records_of(run):
        seconds += record.get("seconds", {}).get("total", 0.0)
        if "evaluation" in record:
            counts = record["evaluation"]["prompts"]["num_correct"]
            score = float(sum(counts) / len(counts) / record["evaluation"]["num_samples"])
            if seconds >= spent:
                return score
    assert "end_reason" in record
    return score


@pytest.mark.slow
def test_a_race_and_a_final_on_other_prompts_and_seeds_end_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "candidates", lambda *a: candidates(*a)[:4])
    monkeypatch.setattr(module.TuneClock, "left", 1e6)  # on a busy machine, too
    monkeypatch.setattr(comparison_report, "make_figure", lambda *_: Figure())
    options = dict(option.removeprefix("--").split("=") for option in TINY if "{" not in option)
    settings = {
        **{name: parse_yaml(value, name) for name, value in options.items()}, "engine.clock": "cpu",
        "evaluation.num_prompts": 16, "evaluation.rollouts_per_prompt": 8, "prompts_per_step": 2,
        "optimizer.learning_rate": 3e-5,
        "data.sources": [{"task": "countdown", "num_numbers": 3, "max_number": 7}],
    }  # fmt: skip
    folder = tmp_path / "out"

    def no_final(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):  # stopped between the race and the final
        patch.setattr(module, "run_comparison", no_final)
        brorl.tune("quickstart", budget=64, seeds=2, jobs=2, output_dir=folder, progress=False, **settings)
    race = {path: path.read_bytes() for path in folder.glob("race/*/metrics.jsonl")}
    result = brorl.tune(str(folder), progress=False)
    assert {path: path.read_bytes() for path in race} == race  # nothing is trained again

    spec = json.loads((folder / "tune.json").read_text())
    limit, (skip, number) = spec["run_seconds"], spec["tuning_prompts"]
    assert (skip, number) == (16, 16)
    assert len(result.race[0]) == len(spec["arms"]) == 4
    for rung, fraction in zip(result.race, RUNGS, strict=True):
        for standing in rung:
            run = folder / "race" / standing.arm.replace(" ", "_")
            assert standing.score == pytest.approx(score_of(run, fraction * limit), abs=1e-12)
            if "end_reason" not in records_of(run)[-1]:
                assert (seconds_of(run) >= limit) == (standing.arm in {s.arm for s in result.race[-1]})
    dropped = {s.arm for rung in result.race[:-1] for s in rung if s.dropped}
    assert dropped.isdisjoint({s.arm for s in result.race[-1]})
    assert OWN in {s.arm for s in result.race[-1]}
    assert len(dropped) == 2
    for arm in (standing.arm for standing in result.race[0]):
        kept = list((folder / "race" / arm.replace(" ", "_")).glob("checkpoints/step-*/model.safetensors"))
        assert len(kept) == (arm not in dropped)  # only the last one, to continue from
    held_out = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("race/*/held_out.json")}

    page = (folder / "tune.html").read_text()
    assert result.page == folder / "tune.html"
    assert escape(result.answer) in page
    assert all(arm["name"] in page for arm in spec["arms"])
    assert page.count("data:image/png;base64,") == 1 + (result.final is not None)

    winner = result.race[-1][0].arm
    if winner == OWN:
        assert result.answer.startswith("Keep your recipe")
        return
    assert result.final is not None
    for arm in result.final.comparison.arms:
        assert [run.seed for run in arm.runs] == [0, 1]
    final = json.loads(next(folder.glob("final/arms/*/seed-0/held_out.json")).read_text())
    assert {p["id"] for p in final}.isdisjoint({p["id"] for prompts in held_out.values() for p in prompts})
    assert f"{result.final.pair[1].difference.value:+.3f}" in result.answer  # type: ignore[union-attr]
    if result.recipe is None:
        assert result.answer.startswith("Keep your recipe")
    else:
        config = make_config(read_recipe(str(result.recipe)), {}, "")
        chosen = next(arm for arm in spec["arms"] if arm["name"] == winner)
        assert config.advantage.model_dump(mode="json") == chosen["settings"]["advantage"]
        assert result.train_command == f"brorl train {result.recipe}"
    again = brorl.tune(str(folder), jobs=2, progress=False)
    assert again.answer == result.answer
    with pytest.raises(UserError, match="is already a tuning, which `seeds` cannot change"):
        brorl.tune(str(folder), seeds=9, progress=False)


def test_a_start_without_anything_to_find_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = {1: Estimate(0.5, 0.45, 0.505), 256: Estimate(0.505, 0.45, 0.51)}
    monkeypatch.setattr(module, "take_pilot", lambda *_: TuningPilot(flat, {16: 64}, 0.1, 1.0))
    returned: list[bool] = []
    monkeypatch.setattr(module, "return_freed_memory", lambda: returned.append(True))
    result = brorl.tune("quickstart", output_dir=tmp_path / "out", progress=False)
    assert result.answer.startswith("There is hardly anything to gain: held-out pass@256 is 0.505 [0.450, 0.510]")
    assert (result.recipe, result.final) == (None, None)
    assert returned == [True]  # the runs of a race get the memory of the pilot


def test_pass_at_1_alone_does_not_say_that_nothing_is_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval of the start leaves no room above it."""
    alone = {1: Estimate(0.5, 0.495, 0.505)}
    monkeypatch.setattr(module, "take_pilot", lambda *_: TuningPilot(alone, {16: 64}, 0.1, 1.0))
    with pytest.raises(UserError, match="budget"):  # it goes on to the plan, for which this is too short
        brorl.tune("quickstart", output_dir=tmp_path / "out", budget="1s", progress=False, **{"evaluation.ks": [1]})


def test_a_budget_that_is_too_short_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = {1: Estimate(0.1, 0.05, 0.15), 256: Estimate(0.9, 0.8, 0.95)}
    monkeypatch.setattr(module, "take_pilot", lambda *_: TuningPilot(rising, {16: 64}, 2.0, 1.0))
    with pytest.raises(UserError, match=r"budget=1m00s` is too short: a step of the recipe takes 2 s.*give at least"):
        brorl.tune("quickstart", budget="1m", output_dir=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_budget_is_refused_by_a_part_of_a_step_before_the_pilot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has 100 steps. Three arms run a quarter of one, two of them the rest, and the final has 10 runs.

    These are 12.25 runs. They have 3 * 3 + 2 + 2 + 10 * 5 = 63 evaluations, and 85% of the other time is training.
    """

    def pilot(*arguments: Any) -> TuningPilot:
        *_, check_time = arguments
        check_time(0.5, 7.0)  # 12.25 * 50 / .85 + 63 * 7 = 1162 seconds
        with pytest.raises(UserError, match="an evaluation takes at least 8 s; give more than 20m2"):
            check_time(0.5, 8.0)  # 1225 seconds
        check_time(0.9, 0.0)  # 1297 seconds
        return TuningPilot({}, {}, 0.9, 0.0)

    monkeypatch.setattr(module, "take_pilot", pilot)
    with pytest.raises(UserError, match=r"a step of the recipe takes at least 0\.9 s.*judged; give more than 21m3\ds"):
        brorl.tune("quickstart", budget="20m", jobs=1, output_dir=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("aim", ["pass@1", "pass@k", "coverage"])
def test_the_candidates_are_the_own_recipe_with_other_n_objectives_and_rates(aim: Any) -> None:
    config = make_config(read_recipe("quickstart-16"), {}, "")
    prompts = {16: 60, 128: 20, 512: 4}
    arms = candidates(config, prompts, aim)
    assert [arm.name for arm in arms] == [OWN, *(f"candidate {i}" for i in range(1, 9))]
    assert arms[0].config == config
    ends = {"pass@1": 1, "pass@k": 16, "coverage": None}
    tried, rate = set(), config.optimizer.learning_rate
    for arm in arms[1:]:
        changed = arm.config
        steady = (changed.prompts_per_step / config.prompts_per_step) ** 0.5
        factor = round(changed.optimizer.learning_rate / rate / steady, 4)
        tried.add((changed.rollouts_per_prompt, changed.advantage.estimator, factor))
        assert changed.optimizer.schedule == "cosine"
        assert changed.data == config.data
        if changed.advantage.estimator == "maxrl":
            assert changed.prompts_per_step == prompts[changed.rollouts_per_prompt]
            assert changed.advantage.final_order == ends[aim]
        else:
            assert changed.advantage == config.advantage
    of_own = {(16, config.advantage.estimator, factor) for factor in (3, 10)}
    assert tried == of_own | {(n, "maxrl", factor) for n in (16, 128, 512) for factor in (1, 3)}


def test_no_candidate_is_tried_twice() -> None:
    config = make_config(read_recipe("quickstart"), {}, "")  # MaxRL with N = 512
    arms = candidates(config, {16: 60, 128: 20, 512: config.prompts_per_step}, "coverage")
    assert len(arms) == 1 + 2 * 3
    assert all(a.config != b.config for a, b in combinations(arms, 2))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("evaluation_seconds", [0.1, 20.0])
def test_the_race_and_the_final_fit_in_the_budget(num_slots: int, evaluation_seconds: float) -> None:
    arms = tuple(ArmRecipe(f"{number}", make_config(read_recipe("quickstart"), {}, "")) for number in range(9))
    budget, spent = 7200.0, 100.0
    spec = module.with_sizes(
        TuningSpec("pass@1", 1, budget, 0.0, 3, num_slots, "here", {}, (0, 3), arms, evaluation_seconds, spent), 0.3
    )
    seconds, left, each, number = spent, len(spec.arms), spec.run_seconds, len(spec.arms)
    for rung, fraction in enumerate(RUNGS):
        lasts = each * (fraction - (0.0, *RUNGS)[rung]) + (1 if rung else 3) * evaluation_seconds
        seconds += -(-left // num_slots) * lasts
        left = min(left, module.room_after(rung, number))
    seconds += -(-2 * 3 // num_slots) * (each + 5 * evaluation_seconds)
    assert 0.8 * budget < seconds <= budget


def test_every_source_gives_prompts_to_the_race_and_to_the_final() -> None:
    sources = [
        {"task": "countdown", "num_numbers": 3, "max_number": n, "min_target": 1, "max_target": 99, "name": f"to {n}"}
        for n in (6, 10)
    ]
    config = make_config(read_recipe("quickstart"), {"data.sources": sources, "evaluation.num_prompts": 10**6}, "")
    few, many = (len(source.held_out) for source in build_questions(config))
    assert few < many
    for wanted in (few, many):  # not enough for both in the first source
        config = make_config(config.model_dump(mode="json"), {"evaluation.num_prompts": wanted}, "")
        judged, tuning = with_tuning_prompts(config)
        assert judged.evaluation.num_prompts == few - few // 2
        assert tuning == (few - few // 2, few // 2)


def test_a_race_leaves_out_prompts_that_were_not_verified_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(read_recipe("quickstart"), {"evaluation.rollouts_per_prompt": 8, "evaluation.ks": [1]}, "")
    arms = tuple(ArmRecipe(name, config) for name in (OWN, "other"))
    spec = TuningSpec("pass@1", 1, 60.0, 8.0, 2, 1, "here", {}, (0, 3), arms)
    lost = {OWN: None, "other": np.array([0, 2, 0])}

    def read(directory: Path, seed: int, _: Budget) -> tuple[FinishedRun, None]:
        costs, counts = [Cost(seconds=spent) for spent in (0.0, 1.0, 2.0)], np.array([8, 0, 4])
        scores = tuple(RunEvaluation(cost, counts, counts, 0.0, lost[directory.name]) for cost in costs)
        return FinishedRun(seed, scores, costs[-1], {}, 0, 0, None, str(directory)), None

    monkeypatch.setattr(module, "read_scores", read)
    standings = module._read_rung(spec, [spec.race_run(tmp_path, arm, 0.25) for arm in arms])
    assert [standing.score for standing in standings] == [0.75, 0.75]
    lost["other"] = np.ones(3, int)
    with pytest.raises(UserError, match="could not be verified"):
        module._read_rung(spec, [spec.race_run(tmp_path, arm, 0.25) for arm in arms])


def test_the_recipe_of_the_answer_can_be_trained(tmp_path: Path) -> None:
    """The recipe of a run or of an arm has a folder, marks and a pause of its own."""
    settings = {
        "output_dir": "runs/mine", "steps": None, "budget.unit": "samples", "budget.limit": 1e6,
        "budget.eval_points": [5e5], "budget.pause_at": 2e5, "tracking.run_name": "mine",
    }  # fmt: skip
    config = make_config(read_recipe("quickstart"), settings, "")
    recipe = make_config(read_recipe(str(recipe_for(config, 30.0, tmp_path))), {}, "")
    assert (recipe.output_dir, recipe.budget.eval_points, recipe.budget.pause_at) == (None, (), None)
    assert (recipe.budget.unit, recipe.budget.limit, recipe.steps) == ("seconds", 30.0, None)
    assert recipe.tracking.run_name is None
    assert recipe.optimizer == config.optimizer


@pytest.mark.parametrize(
    "advantage",
    [
        {"estimator": "pass_at_k", "k": 8},
        {"normalize_over": "tokens"},
        {"estimator": "maxrl", "order": 4, "final_order": 2, "final_order_at": 0.5},
    ],
)
@pytest.mark.parametrize("aim", ["pass@1", "coverage"])
def test_a_candidate_takes_over_no_option_of_the_own_objective(aim: Any, advantage: dict[str, Any]) -> None:
    config = make_config(read_recipe("quickstart-16"), {"advantage": advantage}, "")
    arm = candidates(config, {128: 20}, aim)[1]
    last = 1 if aim == "pass@1" else None
    assert arm.config.advantage == AdvantageSettings(estimator="maxrl", final_order=last)


def test_a_recipe_with_phases_gets_candidates_without() -> None:
    arms = candidates(make_config(read_recipe("plateau-512"), {}, ""), {16: 60}, "pass@1")
    assert [bool(arm.config.phases) for arm in arms] == [True, False, False, True, True]


@pytest.mark.parametrize(*table(__file__, "bad_input_is_refused_before_any_work"))
def test_bad_input_is_refused_before_any_work(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


def test_too_few_training_prompts_are_refused(tmp_path: Path) -> None:
    for name, numbers in {"train": range(7), "held_out": range(7, 60)}.items():
        rows = [json.dumps({"prompt": f"{n}+{n}:", "answer": str(2 * n)}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    train, held_out = (
        {"path": str(tmp_path / f"{name}.jsonl"), "name": name, "domain": "math"} for name in ("train", "held_out")
    )
    recipe = {
        "model": "quickstart",
        "data": {"sources": [train], "held_out_fraction": 0},
        "evaluation": {"sources": [held_out], "num_prompts": 16, "rollouts_per_prompt": 4, "ks": [1, 4]},
        "prompts_per_step": 4,
        "sampling": {"max_new_tokens": 8},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert "tuning needs at least 8 training prompts, got 7" in refusal(str(tmp_path / "recipe.yaml"))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert "exists and is not empty" in refusal("quickstart", f"--output-dir={tmp_path / 'used'}")
    (tmp_path / "used" / "tune.json").write_text("{")
    assert "continue it with: brorl tune" in refusal("quickstart", f"--output-dir={tmp_path / 'used'}")
    assert "is damaged" in refusal(f"{tmp_path / 'used'}")
    assert "is already a tuning, which `output_dir`" in refusal(f"{tmp_path / 'used'}", "--output-dir=other")


def test_the_command_prints_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_tuning(_config: Any, folder: Path, *_: Any) -> TuningResult:
        return TuningResult(folder, "nothing to find", None, (), None, None, None)

    monkeypatch.setattr(module, "prepare_tuning", prepare_tuning)
    outcome = command("tune", "quickstart", f"--output-dir={tmp_path / 'out'}")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "nothing to find")
