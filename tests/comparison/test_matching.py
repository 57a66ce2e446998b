"""What a run had spent at an evaluation point, against a plain search; which runs are matched, and words for others."""

from itertools import pairwise

import numpy as np
import pytest
from comparisons import arm_of, run_of, score_of

from brorl.comparison.results import TOLERANCE, Spread, costs_at, is_matched
from brorl.comparison.scores import Arm, score_at
from brorl.cost import UNITS, Budget, Cost, Unit, cost_of_step, total_cost


def random_costs(rng: np.random.Generator, number: int) -> list[Cost]:
    """Costs that add up step by step."""
    costs, cost = [], Cost()
    for _ in range(number):
        step = Cost(1, float(rng.uniform(0.5, 3)), *(int(v) for v in rng.integers(1, 100, 3)))
        cost += step
        costs.append(cost)
    return costs


@pytest.mark.parametrize("unit", UNITS)
def test_finds_the_first_evaluation_that_reaches_the_mark(rng: np.random.Generator, unit: Unit) -> None:
    costs = random_costs(rng, 12)
    run = run_of(0, [score_of(cost, [i]) for i, cost in enumerate([Cost(), *costs])])
    reached = [getattr(cost, unit) for cost in costs]
    for eval_point in [*rng.uniform(0.1, reached[-1], 30), *reached]:
        first = next(i for i, spent in enumerate(reached) if spent >= eval_point)
        assert score_at(run, unit, eval_point).num_correct_P[0] == first + 1
    assert score_at(run, unit, 0).num_correct_P[0] == 0


def test_a_run_that_ended_by_itself_keeps_its_last_score() -> None:
    scores = [score_of(Cost(), [0]), score_of(Cost(seconds=5.0), [3])]
    assert score_at(run_of(0, scores, ended_early="collapsed"), "seconds", 80).num_correct_P[0] == 3
    with pytest.raises(ValueError, match=r"runs/7 \(seed 7\) has no evaluation at 80 seconds or later.*at 5 seconds;"):
        score_at(run_of(7, scores), "seconds", 80)
    with pytest.raises(ValueError, match="has no evaluation; compare"):
        score_at(run_of(0, []), "seconds", 1)


def test_runs_are_matched_up_to_the_tolerance() -> None:
    def arm(name: str, *samples: int) -> Arm:
        scores = [[score_of(Cost(), [0]), score_of(Cost(2, 1.0, n), [1])] for n in samples]
        return arm_of(name, [run_of(seed, row) for seed, row in enumerate(scores)])

    edge = round(1000 * (1 + TOLERANCE))
    for samples, matched in (((1000, edge), True), ((1010, edge + 1), False), ((1500,), False)):
        assert is_matched(arm("a", *samples), "samples", 1000) == matched
    early = run_of(3, [score_of(Cost(), [0]), score_of(Cost(seconds=40.0), [1])], ended_early="no mixed groups")
    assert is_matched(arm_of("a", [early]), "seconds", 100)  # it could not spend more


def test_costs_in_all_units_at_a_mark(rng: np.random.Generator) -> None:
    costs = [random_costs(rng, 4) for _ in range(3)]
    arm = arm_of("a", [run_of(s, [score_of(c, [0]) for c in [Cost(), *row]]) for s, row in enumerate(costs)])
    found = costs_at(arm, "steps", 3)
    for field in ("steps", "seconds", "samples", "sampled_tokens", "unique_tokens"):
        values = [getattr(row[2], field) for row in costs]
        spread = found[field]
        assert (spread.least, spread.most) == (min(values), max(values))
        assert spread.mean == pytest.approx(np.mean(values), rel=1e-14)
    with pytest.raises(ValueError, match="at least one run"):
        Spread.of([])


def test_costs_of_steps_add_up_without_the_start(rng: np.random.Generator) -> None:
    records: list[dict[str, object]] = [{"step": 0, "evaluation": {"seconds": 9.0}}]
    for step in range(5):
        samples, sampled, unique = (int(v) for v in rng.integers(1, 1000, 3))
        sampling = {"samples": samples, "sampled_tokens": sampled, "unique_tokens": unique}
        records.append({"step": step + 1, "sampling": sampling, "seconds": {"total": float(rng.uniform(0.1, 2))}})
    found = total_cost(records)
    steps = [r for r in records if "sampling" in r]
    assert cost_of_step(records[0]) == Cost()
    assert found.steps == 5
    assert found.seconds == pytest.approx(sum(r["seconds"]["total"] for r in steps), rel=1e-14)  # type: ignore[index]
    for name in ("samples", "sampled_tokens", "unique_tokens"):
        assert getattr(found, name) == sum(r["sampling"][name] for r in steps)  # type: ignore[index]


def test_budget_is_spent_at_its_limit_and_evaluation_points_are_passed_once() -> None:
    budget = Budget("samples", 100, (30, 60, 100))
    at = [Cost(samples=n) for n in (0, 29, 30, 31, 90, 100, 120)]
    assert [budget.is_spent(cost) for cost in at] == [False] * 5 + [True] * 2
    passed = [budget.passes_eval_point(before, after) for before, after in pairwise(at)]
    assert passed == [False, True, False, True, True, False]
    with pytest.raises(ValueError, match="above 0"):
        Budget("samples", 0)
    with pytest.raises(ValueError, match="got 101"):
        Budget("samples", 100, (50, 101))
