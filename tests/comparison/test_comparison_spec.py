"""What a comparison chooses and changes where arguments are missing or do not fit, and what its errors propose."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brorl.comparison.arm_recipes import run_config
from brorl.comparison.results import TOLERANCE
from brorl.comparison.spec import ComparisonRequest, ComparisonSpec, fit_budget, spec_for
from brorl.cost import Budget
from brorl.errors import UserError

SWEEP = {"rollouts_per_prompt": [16, 512], "prompts_per_step": [512, 16]}


def planned(**arguments: Any) -> tuple[ComparisonSpec, ComparisonRequest]:
    asked = ComparisonRequest(**{"arms": ("quickstart",), "sweep": SWEEP, **arguments})
    return spec_for(None, asked), asked


def prompts(spec: ComparisonSpec) -> list[int]:
    return [arm.config.prompts_per_step for arm in spec.arms]


def test_the_budget_of_a_comparison_ends_a_recipe_without_an_end() -> None:
    recipes = [{"steps": None, "rollouts_per_prompt": n} for n in (16, 512)]
    spec = spec_for(None, ComparisonRequest(tuple(recipes), budget=60))
    configs = [run_config(arm, 0, Path("run"), Budget("seconds", spec.budget)) for arm in spec.arms]
    assert [(config.steps, config.budget.limit) for config in configs] == [(None, 60), (None, 60)]
    assert len(spec_for(None, ComparisonRequest((recipes[0],))).arms) == 2


def test_steps_that_fit_change_nothing() -> None:
    spec, asked = planned(budget=30)
    assert fit_budget(spec, asked, {"N=16": 1.2, "N=512": 0.1}) == spec


@pytest.mark.parametrize("cost", [0.4, 1.6, 47.0])
def test_a_budget_that_was_not_given_is_that_of_24_steps_and_at_least_30_seconds(cost: float) -> None:
    spec, asked = planned()
    fitted = fit_budget(spec, asked, {"N=16": cost, "N=512": 0.1})
    assert prompts(fitted) == [512, 16]
    assert fitted.budget == pytest.approx(max(30.0, 24 * cost), rel=0.1)
    assert fitted.budget >= max(30.0, 24 * cost)
    assert fitted.eval_points[-1] == fitted.budget
    assert len(fitted.eval_points) == 8
    spec, asked = planned(match="steps")
    assert spec.budget == 24
    assert planned(eval_points=[10.0, 40.0])[0].budget == 40


@pytest.mark.parametrize("unit", ["seconds", "samples", "unique_tokens"])
@pytest.mark.parametrize("cost", [1.6, 8.0, 20.0])
def test_a_budget_that_is_too_small_is_raised_to_one_that_is_enough(unit: Any, cost: float) -> None:
    spec, asked = planned(match=unit, budget=30, eval_points=2)
    costs = {"N=16": cost, "N=512": cost / 2}
    fitted = fit_budget(spec, asked, costs)
    assert fitted.asked_budget == 30
    assert fitted.eval_points == (float(f"{fitted.budget / 2**0.5:.6g}"), fitted.budget)
    assert 24 * cost <= fitted.budget <= 1.1 * 24 * cost  # 24 steps with a margin of 1.2 are 5% each
    (note,) = fitted.notes
    assert re.match(
        rf"the budget is .* instead of 30 .*, because a step of N=16 takes .* more than {TOLERANCE:.0%} of 30 ", note
    )
    assert fit_budget(fitted, asked, costs) == fitted
    (percent,) = re.findall(r"to ([\d.]+)% or less", note)  # a step is as long as it has prompts
    shorter = fit_budget(spec, asked, {arm: (float(percent) - 0.01) / 100 * cost for arm, cost in costs.items()})
    assert shorter == spec


@pytest.mark.parametrize(("own", "values"), [(16, [16, 512]), (64, [64, 512]), (512, [16, 512]), (2048, [16, 2048])])
def test_one_recipe_is_compared_at_its_own_n_and_at_another(own: int, values: list[int]) -> None:
    spec = spec_for(None, ComparisonRequest(("quickstart",), budget="5m", overrides={"rollouts_per_prompt": own}))
    assert [arm.config.rollouts_per_prompt for arm in spec.arms] == values
    assert spec.budget == 300
    assert "one recipe at two N" in spec.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"budget": 30}, {"budget": 30, "eval_points": 3}, {"eval_points": [10.0, 30.0]}])
def test_a_folder_continues_with_the_command_that_began_it(given: dict[str, Any], tmp_path: Any) -> None:
    """Also if its plan chose the budget; another budget or other prompts are refused."""
    spec, asked = planned(**given)
    fitted = fit_budget(spec, asked, {"N=16": 4.7, "N=512": 1.0})
    assert fitted.budget > 100
    assert fitted.notes
    fitted = replace(fitted, machine="a machine", jobs=1)
    fitted.write(tmp_path)
    assert spec_for(tmp_path, asked) == fitted
    assert spec_for(tmp_path, replace(asked, seeds=7)).seeds == 7
    with pytest.raises(UserError, match="contains a comparison with budget"):
        spec_for(tmp_path, replace(asked, budget=5, eval_points=None))
    with pytest.raises(UserError, match="contains a comparison with evaluation points"):
        spec_for(tmp_path, replace(asked, eval_points=6))
    with pytest.raises(UserError, match="contains a comparison of different arms"):
        spec_for(tmp_path, replace(asked, sweep={**SWEEP, "prompts_per_step": [256, 16]}))
