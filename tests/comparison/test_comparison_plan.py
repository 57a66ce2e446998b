"""What a comparison chooses and changes where arguments are missing or do not fit, and what its errors propose."""

import re
from dataclasses import replace
from typing import Any

import pytest

from brorl.comparison.matching import TOLERANCE
from brorl.comparison.plan import Arguments, ComparisonPlan, fit_steps, plan_for
from brorl.errors import UserError

SWEEP = {"rollouts_per_prompt": [16, 512], "prompts_per_step": [512, 16]}


def planned(**arguments: Any) -> tuple[ComparisonPlan, Arguments]:
    asked = Arguments(**{"arms": ("quickstart",), "sweep": SWEEP, **arguments})
    return plan_for(None, asked), asked


def prompts(plan: ComparisonPlan) -> list[int]:
    return [arm.config.prompts_per_step for arm in plan.arms]


def test_steps_that_fit_change_nothing() -> None:
    plan, asked = planned(budget=30)
    assert fit_steps(plan, asked, {"N=16": 1.2, "N=512": 0.1}) == plan


@pytest.mark.parametrize("unit", ["seconds", "samples", "unique_tokens"])
@pytest.mark.parametrize("cost", [1.6, 4.7, 20.0])
def test_all_arms_get_fewer_prompts_by_one_factor_if_steps_are_too_long(unit: Any, cost: float) -> None:
    plan, asked = planned(match=unit, budget=30)
    fitted = fit_steps(plan, asked, {"N=16": cost, "N=512": cost / 2})
    (few, many), (step_few, step_many) = prompts(fitted), (512 / cost, 16 / cost)
    assert (fitted.budget, fitted.eval_points) == (30, plan.eval_points)
    assert cost * few / 512 <= TOLERANCE * 30  # a step is as long as it has prompts
    assert few / 512 > 0.6 * TOLERANCE * 30 / cost
    assert 16 * few / 512 - 1 < many <= 16 * few / 512 + 1
    assert [arm.config.optimizer.mini_batches for arm in fitted.arms] == [min(4, few), min(4, many)]
    assert [arm.asked for arm in fitted.arms] == [arm.config for arm in plan.arms]
    (note,) = fitted.notes
    assert f"N=16 512 -> {few}, N=512 16 -> {many}" in note
    assert step_few > step_many
    budget = re.search(r"--budget ([\d.]+)$", note)
    assert budget is not None  # with it, nothing is changed
    plan, asked = planned(match=unit, budget=float(budget[1]))
    assert fit_steps(plan, asked, {"N=16": cost, "N=512": cost / 2}) == plan


@pytest.mark.parametrize("cost", [0.4, 1.6, 47.0])
def test_a_budget_that_was_not_given_is_that_of_24_steps_and_at_least_30_seconds(cost: float) -> None:
    plan, asked = planned()
    fitted = fit_steps(plan, asked, {"N=16": cost, "N=512": 0.1})
    assert prompts(fitted) == [512, 16]
    assert fitted.budget == pytest.approx(max(30.0, 24 * cost), rel=0.1)
    assert fitted.budget >= max(30.0, 24 * cost)
    assert fitted.eval_points[-1] == fitted.budget
    assert len(fitted.eval_points) == 8
    plan, asked = planned(match="steps")
    assert plan.budget == 24
    assert planned(marks=[10.0, 40.0])[0].budget == 40


def test_steps_that_never_fit_are_refused_with_a_budget_that_is_enough() -> None:
    plan, asked = planned(budget=1)
    cost = {"N=16": 8.0, "N=512": 4.0}
    with pytest.raises(UserError, match="a step of N=16 takes 8 seconds, more than 5% of 1 second") as refusal:
        fit_steps(plan, asked, cost)
    few, all_ = map(float, re.findall(r"--budget ([\d.]+)", str(refusal.value)))
    assert few < all_
    plan, asked = planned(budget=few)
    assert min(prompts(fit_steps(plan, asked, cost))) == 1
    plan, asked = planned(budget=all_)
    assert fit_steps(plan, asked, cost) == plan


@pytest.mark.parametrize(("own", "values"), [(16, [16, 512]), (64, [64, 512]), (512, [16, 512]), (2048, [16, 2048])])
def test_one_recipe_is_compared_at_its_own_n_and_at_another(own: int, values: list[int]) -> None:
    plan = plan_for(None, Arguments(("quickstart",), budget="5m", overrides={"rollouts_per_prompt": own}))
    assert [arm.config.rollouts_per_prompt for arm in plan.arms] == values
    assert plan.budget == 300
    assert "one recipe at two N" in plan.notes[0]


def test_a_folder_continues_with_the_command_that_began_it(tmp_path: Any) -> None:
    """Also if its plan chose the budget, or lowered the prompts; another budget or other prompts are refused."""
    for budget, other in ((None, 5), (30, 31)):
        plan, asked = planned(budget=budget)
        fitted = fit_steps(plan, asked, {"N=16": 4.7, "N=512": 1.0})
        assert fitted.notes
        folder = tmp_path / str(budget)
        fitted.write(folder, "a machine", 1)
        assert plan_for(folder, asked) == fitted
        assert plan_for(folder, replace(asked, seeds=7)).seeds == 7
        with pytest.raises(UserError, match="contains a comparison with budget"):
            plan_for(folder, replace(asked, budget=other))
        with pytest.raises(UserError, match="contains a comparison of other arms"):
            plan_for(folder, replace(asked, sweep={**SWEEP, "prompts_per_step": [256, 16]}))
