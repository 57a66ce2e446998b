"""Phases of the objective: when they change, what they estimate, and that a resumed run makes the same choices."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.algorithms import advantages
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import AdvantageSettings
from brorl.comparison.arm_recipes import ArmRecipe, run_config
from brorl.comparison.scores import read_scores
from brorl.config.reading import first_change, fixed_settings, make_config
from brorl.cost import Budget, Cost
from brorl.errors import UserError
from brorl.evaluation.settings import EvaluationSettings
from brorl.prompts.prompt import Prompt
from brorl.runs.step_record import StepRecord, from_json, to_json, total_cost
from brorl.training.schedule import PhaseSchedule, Schedule
from brorl.training.settings import PhaseSettings
from brorl.tree import RolloutTree
from case_tables import table
from child_runs import ChildRuns, Harm
from made_up_runs import typed
from recipes import recipe
from run_support import SMALL, assert_same_run, command

N = 32


def phases_of(*phases: PhaseSettings, evaluate_every: int = 0) -> PhaseSchedule:
    return PhaseSchedule(recipe(phases=phases, evaluation=EvaluationSettings(every=evaluate_every)))


def phase(name: str, until: float = 1.0, patience: int | None = None) -> PhaseSettings:
    return PhaseSettings(name=name, until=until, until_coverage_stalls=patience)


def evaluation(step: int, coverage: float) -> dict[str, Any]:
    pass_at = {str(k): {"value": v, "low": v, "high": v} for k, v in ((1, 1 - coverage), (16, coverage))}
    return {"step": step, "evaluation": {"pass_at": pass_at}}


def names(objective: PhaseSchedule, fractions: Sequence[float]) -> list[str]:
    phase_names = []
    for fraction in fractions:
        objective.begin_step(fraction)
        phase_names.append(objective.phase.name)
    return phase_names


PROMPT = Prompt("id", "text", (1,), "a", "d")


def group(num_correct: int) -> Group:
    """A group of N rollouts, all of them distinct, with c correct ones."""
    tree = RolloutTree.from_responses((1,), [(2, i) for i in range(N)])
    correct_L = np.arange(N) < num_correct
    return Group(PROMPT, tree, correct_L, correct_L.astype(float))


def test_phases_end_at_their_share_of_the_budget() -> None:
    objective = phases_of(phase("a", 0.3), phase("b", 0.6), phase("c"))
    assert names(objective, [0, 0.29, 0.3, 0.5, 0.61, 1.0]) == ["a", "a", "b", "b", "c", "c"]


def test_a_step_can_pass_over_a_phase_and_phases_never_return() -> None:
    objective = phases_of(phase("a", 0.3), phase("b", 0.31), phase("c"))
    assert names(objective, [0.2, 0.5, 0.1]) == ["a", "c", "c"]


def test_progress_runs_from_the_begin_of_a_phase_to_its_end() -> None:
    objective = phases_of(phase("a", 0.5), phase("b"))
    for fraction, progress in ((0, 0), (0.25, 0.5), (0.6, 0.0), (0.8, 0.5), (1.0, 1.0)):
        objective.begin_step(fraction)
        assert objective.progress == pytest.approx(progress)


def test_a_phase_ends_when_coverage_stalls() -> None:
    """Two regular evaluations in a row without a new best; others do not count, nor does the smallest k."""
    objective = phases_of(phase("a", 0.9, patience=2), phase("b"), evaluate_every=10)
    for step, coverage, name in (
        (0, 0.5, "a"), (10, 0.6, "a"), (20, 0.6, "a"), (25, 0.1, "a"), (30, 0.7, "a"), (40, 0.6, "a"), (50, 0.7, "b"),
    ):  # fmt: skip
        objective.add(from_json(evaluation(step, coverage)))
        objective.begin_step(0.01)
        assert objective.phase.name == name, step


def test_recalled_metrics_rebuild_the_state(rng: np.random.Generator) -> None:
    phases = [phase("a", 0.9, patience=2), phase("b", 0.95, patience=2), phase("c")]
    objective, lines = phases_of(*phases, evaluate_every=1), []
    for step in range(12):
        if step:
            objective.begin_step(step / 100)
        line = from_json(evaluation(step, float(rng.choice([0.3, 0.4, 0.5]))))
        line = replace(line, objective=objective.record()) if step else line
        objective.add(line)
        lines.append(to_json(line))
        again = phases_of(*phases, evaluate_every=1)
        for past in json.loads(json.dumps(lines)):
            again.add(from_json(past))
        again.begin_step((step + 1) / 100)
        expected = phases_of(*phases, evaluate_every=1)
        expected.__dict__.update(objective.__dict__)
        expected.begin_step((step + 1) / 100)
        assert again.__dict__ == expected.__dict__


def objective_of(**settings: Any) -> PhaseSchedule:
    return PhaseSchedule(make_config({"rollouts_per_prompt": N, **settings}, {}, "test"))


def test_the_learning_rate_falls_from_a_fraction_of_the_budget_on() -> None:
    """At a quarter of the fall the cosine has lost (1 - cos 45 degrees) / 2 of what it will lose."""
    quarter = 1 - (1 - 0.5**0.5) / 2
    for schedule, left in (("constant", (1, 1, 1, 1)), ("linear", (1, 0.75, 0.5, 0)), ("cosine", (1, quarter, 0.5, 0))):
        options = {} if schedule == "constant" else {"decay_from": 0.2, "final_rate": 0.05}
        objective = objective_of(optimizer={"schedule": schedule, "learning_rate": 1e-3, **options})
        final = options.get("final_rate", 0.0)
        for fraction, expected in zip((0.2, 0.4, 0.6, 1.0), left, strict=True):
            objective.begin_step(fraction)
            assert objective.lr_scale == pytest.approx(final + (1 - final) * expected), (schedule, fraction)
        objective.begin_step(0.1)
        assert objective.lr_scale == 1.0


def test_the_rate_of_a_phase_falls_with_the_budget_of_the_run() -> None:
    phases = [{"name": "a", "until": 0.5}, {"name": "b", "learning_rate": 1e-4}]
    objective = objective_of(phases=phases, optimizer={"schedule": "linear", "learning_rate": 1e-3, "final_rate": 0.0})
    for fraction, rate in ((0.25, 0.75e-3), (0.5, 0.5e-4), (0.75, 0.25e-4)):
        objective.begin_step(fraction)
        assert 1e-3 * objective.lr_scale == pytest.approx(rate)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": {"decay_from": 0.5}}, "set optimizer.schedule: linear or cosine"),
        ({"optimizer": {"final_rate": 0.0}}, "set optimizer.schedule: linear or cosine"),
        ({"advantage": {"estimator": "maxrl", "final_order_at": 0.5}}, "has no effect without advantage.final_order"),
        ({"evaluation": {"best_k": 3}}, "evaluation.best_k = 3 must be one of evaluation.ks"),
        ({"evaluation": {"patience": 3, "every": 0}}, "evaluation.patience counts regular evaluations, but"),
        ({"optimizer": {"ema_decay": 0.9}, "cluster": {"nodes": 1, "mode": "async"}}, "set cluster.mode: sync"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        make_config(settings, {}, "test")


@pytest.mark.parametrize(("final", "at"), [(1, 1.0), (4, 0.5)])
def test_the_order_of_maxrl_falls_geometrically_and_then_stays(final: int, at: float) -> None:
    objective = objective_of(advantage={"estimator": "maxrl", "final_order": final, "final_order_at": at})
    groups = [group(c) for c in (1, 5, 20)]
    for fraction in (0.0, 0.25, 0.5, 0.8, 1.0):
        fallen = min(fraction / at, 1)
        order = round(np.exp((1 - fallen) * np.log(N - 1) + fallen * np.log(final)))
        objective.begin_step(fraction)
        for tested, advantage_L in zip(groups, objective.estimate_advantages(groups), strict=True):
            c = tested.num_correct
            np.testing.assert_allclose(
                advantage_L, advantages.maxrl_weight(N, c, order) * (tested.reward_L - c / N), rtol=1e-12
            )


def test_the_share_spent_is_the_larger_of_steps_and_budget(rng: np.random.Generator) -> None:
    for _ in range(20):
        limit, steps = float(rng.uniform(10, 99)), int(rng.integers(5, 50))
        spent, done = float(rng.uniform(0, limit)), int(rng.integers(0, steps))
        schedule = Schedule(make_config({"steps": steps, "budget": {"unit": "seconds", "limit": limit}}, {}, "test"))
        assert schedule.fraction_spent(done, Cost(seconds=spent)) == pytest.approx(max(done / steps, spent / limit))
    alone = Schedule(make_config({"budget": {"unit": "samples", "limit": 200}}, {}, "test"))
    assert alone.fraction_spent(3, Cost(samples=50)) == pytest.approx(0.25)


def test_a_comparison_keeps_the_evaluations_that_a_phase_waits_for(tmp_path: Path) -> None:
    phases = [{"name": "a", "until": 0.5, "until_coverage_stalls": 2}, {"name": "b"}]
    for given, every in (({"phases": phases}, 7), ({}, 0)):
        config = make_config({"evaluation.every": 7, **given}, {}, "test")
        run = run_config(ArmRecipe("arm", config), 0, tmp_path, Budget("steps", 9))
        assert run.evaluation.every == every


def test_changed_phases_are_not_resumed() -> None:
    before = make_config({"phases": [{"name": "a", "until": 0.5}, {"name": "b"}]}, {}, "test")
    now = make_config({"phases": [{"name": "a", "until": 0.6}, {"name": "b"}]}, {}, "test")
    assert first_change(fixed_settings(before), now) == "phases"


def test_each_phase_has_its_estimator_and_its_learning_rate() -> None:
    objective = objective_of(
        optimizer={"learning_rate": 2e-4},
        phases=[
            {"name": "broaden", "until": 0.5, "advantage": {"estimator": "maxrl"}},
            {"name": "sharpen", "advantage": {"estimator": "grpo"}, "learning_rate": 1e-4},
        ],
    )
    one = group(2)
    for fraction, weight, factor in ((0.0, N / 2, 1.0), (0.5, advantages.grpo_weight(N, 2), 0.5)):
        objective.begin_step(fraction)
        [advantage_L] = objective.estimate_advantages([one])
        np.testing.assert_allclose(advantage_L, weight * (one.reward_L - 2 / N), rtol=1e-6)
        assert objective.lr_scale == pytest.approx(factor)


def test_a_larger_budget_keeps_the_phase_and_progress_within_bounds() -> None:
    objective = phases_of(phase("a", 0.5), phase("b"))
    objective.begin_step(0.6)
    line = StepRecord(step=1, objective=objective.record())
    again = phases_of(phase("a", 0.5), phase("b"))
    again.add(line)
    for fraction, progress in (
        (0.3, 0.0),
        (0.6, 0.0),
        (0.8, 0.5),
        (1.0, 1.0),
    ):  # the fraction falls as the budget grows
        again.begin_step(fraction)
        assert again.phase.name == "b"
        assert again.progress == pytest.approx(progress)


def test_an_attempt_without_an_update_is_no_regular_evaluation() -> None:
    objective = phases_of(phase("a", 0.9, patience=1), phase("b"), evaluate_every=1)
    objective.add(from_json(evaluation(0, 0.5)))
    objective.add(from_json(evaluation(1, 0.4) | {"attempt": 0}))
    objective.begin_step(0.1)
    assert objective.phase.name == "a"
    objective.add(from_json(evaluation(1, 0.4)))
    objective.begin_step(0.1)
    assert objective.phase.name == "b"


def test_a_constant_objective_leaves_no_trace_in_the_metrics() -> None:
    assert objective_of().record() is None


@pytest.mark.parametrize(*table(__file__, "contradictions_are_named"))
def test_contradictions_are_named(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make_config({"rollouts_per_prompt": N, **settings}, {}, "test")


def test_phases_on_the_command_line_replace_the_advantages_of_the_recipe() -> None:
    recipe, phases = {"advantage": {"estimator": "maxrl"}}, {"phases": [{"name": "a"}]}
    assert make_config(recipe, phases, "test").advantages == (AdvantageSettings(),)
    with pytest.raises(UserError, match=r"both are set; .* or set phases: \[\]"):
        make_config(phases, recipe, "test")
    assert make_config(phases, recipe | {"phases": []}, "test").advantages[0].estimator == "maxrl"


PHASES = (
    "--phases=[{name: broaden, until: 0.6, advantage: {estimator: maxrl, final_order: 4}}, "
    "{name: sharpen, advantage: {estimator: grpo, batch_scale: true}, learning_rate: 1e-4}]"
)


@pytest.mark.slow
def test_a_killed_run_with_phases_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    child = ChildRuns(tmp_path)
    settings = (*SMALL, PHASES, "--steps=5", "--checkpoint_every=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert child("train", *settings, "--output_dir", whole).code == 0
    assert child("train", *settings, "--output_dir", killed, harms=[Harm("kill", r"update 7$")]).code == -9
    assert child("resume", killed).code == 0
    assert_same_run(whole, killed)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["objective"]["name"] for line in lines if "update" in line] == ["broaden"] * 3 + ["sharpen"] * 2
    rates = [line["update"]["learning_rate"] for line in lines if "update" in line]
    assert rates[2:4] == pytest.approx([3e-4, 1e-4])
    read = read_scores(whole, 0, Budget("steps", 5))
    assert read is not None
    title = "sharpen (phase 2 of 2, grpo, learning rate 1.0e-04)"
    assert read[0].phase_begins == {title: total_cost(typed(lines[:4]))}

    for missing in (0, -1):
        lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
        del [line for line in lines if "evaluation" in line][missing]["evaluation"]
        (killed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UserError, match=f"at the start or at the budget has no score.*delete {killed} and rerun"):
            read_scores(killed, 0, Budget("steps", 5))


@pytest.mark.slow
def test_the_console_announces_a_phase(tmp_path: Path) -> None:
    outcome = command("train", *SMALL, PHASES, "--steps=3", "--output_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "begins: broaden (phase 1 of 2, maxrl, order N-1 to 4)" in outcome.said
    assert "begins: sharpen (phase 2 of 2, grpo, learning rate 1.0e-04)" in outcome.said
