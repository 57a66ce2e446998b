"""The estimators of a plan: integrals of closed forms, and the rule of each aim by a plain search."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from test_plan_report import report, row

from brorl.algorithms.settings import AdvantageSettings
from brorl.planning.estimators import EstimatorGuide, K
from brorl.planning.recommendation import RolloutPlan
from brorl.theory.pass_rates import PassRates
from small_models import mostly_slow

NUMBERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def plan_for(rates: PassRates, fitting: tuple[int, ...] = NUMBERS) -> RolloutPlan:
    rows = [row(n, 10 if n in fitting else 0, 1.0) for n in NUMBERS]
    return replace(report().plan, rows=rows, pass_rates=rates)


def some_rates(rng: np.random.Generator) -> PassRates:
    return PassRates(float(rng.uniform(0.3, 1.5)), float(rng.uniform(1, 15)), float(rng.uniform(0, 0.4)))


def integral(rates: PassRates, order: int, low: float, high: float) -> float:
    """The gradient of MaxRL of prompts with pass rates from low to high, over that of all prompts."""
    beta = stats.beta(rates.a, rates.b)

    def density(z: float) -> float:
        p = 1 / (1 + np.exp(-z))
        return float((1 - p) * -np.expm1(order * np.log1p(-p)) * beta.pdf(p) * p * (1 - p))

    ends = [np.log(x / (1 - x)) for x in (max(low, 1e-11), min(high, 1 - 1e-11))]
    return quad(density, *ends, limit=400)[0]


def test_shares_and_reach_of_maxrl_are_integrals(rng: np.random.Generator) -> None:
    rates = some_rates(rng)
    guide = EstimatorGuide.of(plan_for(rates))
    for num_rollouts in NUMBERS:
        found = guide.at(num_rollouts)["maxrl"]
        rare = integral(rates, num_rollouts - 1, 0, 1 / 16)
        assert found.rare == pytest.approx(rare / integral(rates, num_rollouts - 1, 0, 1), rel=5e-3)
        assert found.rare == pytest.approx(sum(found.fractions[:3]))
        assert found.reach == pytest.approx(rare / integral(rates, 2047, 0, 1 / 16), rel=5e-3)


def test_only_the_weights_that_see_rarity_change_with_n(rng: np.random.Generator) -> None:
    guide = EstimatorGuide.of(plan_for(some_rates(rng)))
    small, large = guide.at(32), guide.at(2048)
    for name in ("reinforce_pp_baseline", "pass_at_k"):
        assert small[name].fractions == pytest.approx(large[name].fractions, rel=1e-6)
    assert small["reinforce_pp_baseline"].noise == pytest.approx(1)
    for name in ("grpo", "maxrl"):
        assert small[name].rare < large[name].rare
        assert 1 < small[name].noise < large[name].noise
    assert "pass_at_k" not in guide.at(16)
    assert sum(guide.prompts) == pytest.approx(1)


def test_the_rule_of_each_aim(rng: np.random.Generator) -> None:
    for _ in range(5):
        fitting = tuple(sorted(rng.choice(NUMBERS, 5, replace=False).tolist()))
        plan = plan_for(some_rates(rng), fitting)
        guide = EstimatorGuide.of(plan)
        assert guide.choices["pass@1"].index == plan.chosen
        reaching = [n for n in fitting if guide.at(n)["maxrl"].reach >= 0.5]
        quiet = [n for n in fitting if n > 16 and guide.at(n)["pass_at_k"].noise_to_known <= 1.25]
        for aim, allowed, most in (("coverage", reaching, fitting), ("pass@k", quiet, [n for n in fitting if n > 16])):
            choice = guide.choices[aim]  # type: ignore[index]
            wanted = min(allowed) if allowed else max(most)
            assert choice.index == NUMBERS.index(wanted)
            assert ("No N that fits reaches it" in choice.reason) == (not allowed)


def test_no_choice_where_no_group_is_large_enough() -> None:
    plan = plan_for(PassRates(0.5, 2.0), fitting=(8, 16))
    choice = EstimatorGuide.of(plan).choices["pass@k"]
    assert choice.index is None
    assert "raise --seconds-per-step" in choice.reason


def test_no_choice_where_no_number_above_k_was_compared() -> None:
    plan = plan_for(PassRates(0.5, 2.0))
    choice = EstimatorGuide.of(replace(plan, rows=plan.rows[:2])).choices["pass@k"]
    assert choice.index is None
    assert choice.reason.endswith("No N above 16 was compared; --rollouts sets the numbers.")


def test_k_is_the_default_of_the_setting() -> None:
    assert AdvantageSettings().k == K


@pytest.mark.parametrize(
    "own", mostly_slow(["rloo", "phases", "reinforce_pp_baseline", "grpo", "maxrl", "pass_at_k"], "rloo", "phases")
)
def test_a_recipes_own_estimator_of_pass_at_1_is_recommended_and_kept(own: str) -> None:
    choices = EstimatorGuide.of(plan_for(PassRates(0.5, 3.0)), own).choices
    kept = own in ("reinforce_pp_baseline", "grpo", "rloo")
    assert choices["pass@1"].estimator == (own if kept else "reinforce_pp_baseline")
    assert choices["coverage"].estimator == "maxrl"
