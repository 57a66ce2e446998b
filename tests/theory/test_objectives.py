"""The objectives of examples/plateau/objectives.py: what each is the gradient of, by enumeration and closed forms."""

import importlib
import re
from fractions import Fraction
from itertools import combinations
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_gradient_coefficient import gradient_coefficient, rates

from brorl.algorithms.advantages import OutcomeWeight, maxrl_weight, outcome_weighted, rloo_weight
from brorl.algorithms.groups import Group
from brorl.prompts.prompt import Prompt
from brorl.training.settings import DynamicSamplingSettings
from brorl.tree import RolloutTree

EXAMPLES = Path(__file__).parents[2] / "examples" / "plateau"


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose changes of brorl are undone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("objectives")
    monkeypatch.setattr(module.advantages, "outcome_weighted", outcome_weighted)
    monkeypatch.setattr(DynamicSamplingSettings, "keeps", DynamicSamplingSettings.keeps)
    return module


def gate(num_rollouts: int, num_correct: int, rate: float) -> float:
    """The factor of `dynamic_sampling.max_pass_rate` on a mixed group."""
    return float(num_correct <= DynamicSamplingSettings(max_pass_rate=rate).max_correct(num_rollouts))


def coefficient(weight: OutcomeWeight, num_rollouts: int, rate_G: np.ndarray) -> np.ndarray:
    return gradient_coefficient(np.array([weight(num_rollouts, c) for c in range(num_rollouts + 1)]), rate_G)


@pytest.mark.parametrize("num_rollouts", [2, 16, 512])
def test_focal_weights_are_pass_at_2_and_3_up_to_terms_of_order_1_over_n(
    num_rollouts: int, objectives: Any, rng: np.random.Generator
) -> None:
    """With RLOO, gamma = 1 is (pass@1 + (N/2 - 1) pass@2) / N exactly; gamma = 2 tends to pass@3 / 3."""
    rate_G = rates(rng)
    first = coefficient(lambda n, c: rloo_weight(n, c) * objectives.focal(n, c, 1), num_rollouts, rate_G)
    expected = (1 + (num_rollouts / 2 - 1) * 2 * (1 - rate_G)) / num_rollouts
    np.testing.assert_allclose(first, expected, rtol=1e-9, atol=1e-12)
    second = coefficient(lambda n, c: rloo_weight(n, c) * objectives.focal(n, c, 2), num_rollouts, rate_G)
    assert np.abs(second - (1 - rate_G) ** 2).max() <= 3 / num_rollouts


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_a_gate_maximizes_the_smaller_of_the_pass_rate_and_the_gates(rate: float, rng: np.random.Generator) -> None:
    """The weight falls from 1 to 0 around the gate, within a few standard deviations of c/N."""
    below, above = rate - rng.uniform(0, rate, 9), rate + rng.uniform(0, 1 - rate, 9)
    for num_rollouts in (16, 512):
        far = 6 / np.sqrt(num_rollouts)

        def weight(n: int, c: int) -> float:
            return rloo_weight(n, c) * gate(n, c, rate)

        assert np.all(coefficient(weight, num_rollouts, below[below < rate - far]) > 1 - 1e-9)
        assert np.all(coefficient(weight, num_rollouts, above[above > rate + far]) < 1e-9)
    assert coefficient(weight, 512, np.array([rate])) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("num_rollouts", "size"), [(4, 2), (5, 2), (5, 4), (6, 4), (6, 3)])
def test_the_factor_of_a_subset_gives_its_mean_gradient(
    num_rollouts: int, size: int, objectives: Any, rng: np.random.Generator
) -> None:
    """Over all subsets with as many correct rollouts, for any scores of the rollouts."""
    score_N = rng.normal(size=num_rollouts)
    for num_correct in range(num_rollouts + 1):
        reward_N = np.arange(num_rollouts) < num_correct
        spreads = {
            k: k * (size - k) for k in range(size + 1) if k <= num_correct and size - k <= num_rollouts - num_correct
        }
        best = max(spreads.values())
        (chosen, *others) = [k for k, spread in spreads.items() if spread == best]
        assert all(k == size - chosen for k in others)  # an odd size has two subsets of the same variance
        subsets = [
            [*right, *wrong]
            for right in combinations(range(num_correct), chosen)
            for wrong in combinations(range(num_correct, num_rollouts), size - chosen)
        ]
        assert len(subsets) == comb(num_correct, chosen) * comb(num_rollouts - num_correct, size - chosen)
        expected = np.mean([score_N[s] @ (reward_N[s] - reward_N[s].mean()) / size for s in subsets])
        advantage_N = objectives.spread(num_rollouts, num_correct, size) * (reward_N - reward_N.mean())
        assert score_N @ advantage_N / num_rollouts == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_a_large_group_s_spread_is_the_gradient_of_the_log_odds(objectives: Any) -> None:
    rate_G = np.array([0.1, 0.3, 0.5, 0.8, 0.9])
    got = coefficient(lambda n, c: objectives.spread(n, c, 32), 4096, rate_G)
    np.testing.assert_allclose(got, 1 / (4 * rate_G * (1 - rate_G)), rtol=0.01)


def test_the_table_of_the_documentation_is_computed(objectives: Any) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "theory.md").read_text("utf-8")
    table = page.partition("| factor with `rloo` | N |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\w+)(?:, \w+ = ([\d/]+))? \| (\d+) \|((?: \.\d+ \|){7})$", table, re.MULTILINE)
    assert len(rows) == 8
    names = {"focal": objectives.focal, "gate": gate, "subset": objectives.spread, "none": lambda *_: 1.0}
    rate_G = np.array([0.002, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95])
    for name, parameter, num_rollouts, cells in rows:
        factor, value = names[name], float(Fraction(parameter or 0))
        weight_C = [
            rloo_weight(int(num_rollouts), c) * factor(int(num_rollouts), c, value)
            for c in range(int(num_rollouts) + 1)
        ]
        got = gradient_coefficient(np.array(weight_C), rate_G)
        printed = [float(cell) for cell in cells.split("|")[:-1]]
        assert printed == pytest.approx((got * rate_G * (1 - rate_G)).tolist(), abs=5.1e-4)
    at_gate = coefficient(lambda n, c: rloo_weight(n, c) * gate(n, c, 0.5), 16, np.array([0.5, 0.6]))
    percents = re.search(r"pass rate \.5 has (\d+)% of its weight, and one of \.6 still has (\d+)%", page)
    assert percents is not None
    assert [int(percent) / 100 for percent in percents.groups()] == pytest.approx(at_gate.tolist(), abs=0.0051)


def group(num_correct: int, num_rollouts: int = 8, version: int = 1, name: str = "p") -> Group:
    counts = [n for n in (num_correct, num_rollouts - num_correct) if n]
    rows = [[token] for token, n in ((3, num_correct), (4, num_rollouts - num_correct)) if n]
    tree = RolloutTree.from_responses([1], rows, counts=counts)
    correct_L = np.array([row == [3] for row in rows])
    return Group(Prompt(name, "?", (1,), "a", "d"), tree, correct_L, correct_L.astype(float), version=version)


def test_the_objectives_change_what_is_trained(objectives: Any) -> None:
    objectives.use("focal:2")
    (advantage_L,) = objectives.advantages.advantage_estimator(
        SimpleNamespace(estimator="maxrl", order=1, batch_scale=False, normalize_over="trajectories")
    )([group(2)])
    np.testing.assert_allclose(advantage_L, maxrl_weight(8, 2, 1) * 0.75**2 * np.array([0.75, -0.25]))


def test_a_gate_is_inclusive_and_survives_rounding() -> None:
    """Against fractions: 0.29 * 100 is below 29 in floating point."""
    for rate, num_rollouts in ((0.25, 8), (0.29, 100), (0.7, 10), (0.5, 512), (0.3, 7), (1.0, 16)):
        rule = DynamicSamplingSettings(max_pass_rate=rate)
        expected = [
            0 < c < num_rollouts and Fraction(c, num_rollouts) <= Fraction(str(rate)) for c in range(num_rollouts + 1)
        ]
        assert [rule.keeps(group(c, num_rollouts)) for c in range(num_rollouts + 1)] == expected
    assert DynamicSamplingSettings(enabled=False).keeps(group(8))


def test_a_prompt_is_open_until_it_was_solved_in_all_of_its_last_visits(objectives: Any) -> None:
    objectives.use("solved:2")
    rule = DynamicSamplingSettings()
    visits = [
        (1, 7, True),
        (2, 6, True),
        (3, 7, False),
        (3, 7, False),
        (4, 4, False),
        (5, 7, True),
        (6, 7, True),
        (7, 7, False),
    ]
    for version, num_correct, is_open in visits:
        assert rule.keeps(group(num_correct, version=version)) is is_open
    assert rule.keeps(group(7, version=8, name="other"))
    assert not rule.keeps(group(8, version=9, name="other"))
