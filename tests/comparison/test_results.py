"""Numbers of a comparison against plain loops: matching, use of samples, coverage, equal cost, the best arms."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of
from numpy.typing import NDArray

from brorl.comparison.results import (
    TOLERANCE,
    EqualCost,
    Spread,
    at_equal_cost,
    costs_at,
    coverage_change,
    frontier,
    is_matched,
    scores_at_cost,
    use_of_samples,
)
from brorl.comparison.scores import Arm, Comparison, FinishedRun, score_at
from brorl.cost import UNITS, Budget, Cost, Unit
from brorl.evaluation.paired import paired_difference
from brorl.evaluation.pass_at_k import pass_at_k
from brorl.runs.step_record import total_cost
from made_up_runs import typed


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
    assert score_at(run_of(0, scores, end_reason="collapsed"), "seconds", 80).num_correct_P[0] == 3
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
    early = run_of(3, [score_of(Cost(), [0]), score_of(Cost(seconds=40.0), [1])], end_reason="no mixed groups")
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
    found = total_cost(typed(records))
    steps = [r for r in records if "sampling" in r]
    assert typed(records)[0].cost == Cost()
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


def test_rates_are_ratios_of_each_run(rng: np.random.Generator) -> None:
    runs, expected = [], {}
    for seed in range(3):
        seconds, generation = rng.uniform(10, 20), rng.uniform(1, 9)
        samples, sampled, unique, groups = (int(v) for v in rng.integers(10, 1000, 4))
        mixed, correct_P, tokens_P = int(rng.integers(0, groups + 1)), rng.integers(0, 5, 6), rng.integers(4, 99, 6)
        cost = Cost(5, seconds, samples, sampled, unique)
        scores = [score_of(Cost(), rng.integers(0, 5, 6)), score_of(cost, correct_P, tokens_P)]
        runs.append(run_of(seed, scores, phases={"generation": generation}, groups=(groups, mixed)))
        for name, value in (
            ("samples_per_s", samples / seconds),
            ("generated_per_s", samples / generation),
            ("unique_tokens_per_s", unique / seconds),
            ("mixed_fraction", mixed / groups),
            ("tokens_per_unique", sampled / unique),
            ("tokens_per_response", tokens_P.sum() / (4 * 6)),
            ("correct_per_1000_tokens", 1000 * correct_P.sum() / tokens_P.sum()),
        ):
            expected.setdefault(name, []).append(value)
    arm = arm_of("a", runs)
    comparison = comparison_of([arm], [10], 4)
    found = use_of_samples(comparison, arm)
    assert set(found) == set(expected)
    for name, values in expected.items():
        spread = found[name]
        assert [spread.mean, spread.least, spread.most] == pytest.approx([np.mean(values), min(values), max(values)])
    starts = [run.scores[0].num_correct_P.sum() for run in runs]  # of 100 tokens a prompt
    start = use_of_samples(comparison)
    assert start["correct_per_1000_tokens"].mean == pytest.approx(np.mean(starts) * 1000 / 600)
    assert start["tokens_per_response"].mean == 25


def test_without_steps_and_tokens_there_are_no_rates() -> None:
    arm = arm_of("a", [run_of(9, [score_of(Cost(), [1], [0])], groups=(0, 0), end_reason="collapsed")])
    found = use_of_samples(comparison_of([arm], [10], 2), arm)
    assert found.pop("tokens_per_response").mean == 0
    assert set(found.values()) == {None}


def random_arms(rng: np.random.Generator, seeds: int, prompts: int) -> tuple[list[Arm], np.ndarray]:
    """Two arms of some runs, each evaluated at the start and after 10 s with 4 responses, half of the counts 0."""
    counts = rng.integers(0, 5, (2, seeds, 2, prompts)) * rng.integers(0, 2, (2, seeds, 2, prompts))
    arms = []
    for name, of_arm in zip("ab", counts, strict=True):
        scores = [[score_of(Cost(seconds=10.0 * e), row) for e, row in enumerate(run)] for run in of_arm]
        arms.append(arm_of(name, [run_of(seed, row) for seed, row in enumerate(scores)]))
    return arms, counts


def test_gains_and_losses_are_those_of_sets(rng: np.random.Generator) -> None:
    arms, counts = random_arms(rng, 3, 30)
    comparison = comparison_of(arms, [10], 4)
    found = coverage_change(comparison, arms[1], 10, 2)
    gained, lost = [], []
    for start, end in counts[1]:
        before, after = ({p for p in range(30) if row[p] > 0} for row in (start, end))
        gained.append(after - before)
        lost.append(before - after)
    for spread, sets in ((found.gained, gained), (found.lost, lost)):
        sizes = [len(s) for s in sets]
        assert (spread.least, spread.most) == (min(sizes), max(sizes))
        assert spread.mean == pytest.approx(sum(sizes) / 3)
    assert found.arm == "b"


def test_expected_numbers_are_sums_of_pass_at_k(rng: np.random.Generator) -> None:
    arms, counts = random_arms(rng, 3, 20)
    found = coverage_change(comparison_of(arms, [10], 4), arms[0], 10, 3)
    before, after = (np.array([pass_at_k(run[e], 4, 3).sum() for run in counts[0]]) for e in (0, 1))
    spread = found.expected
    assert [spread.mean, spread.least, spread.most] == pytest.approx([after.mean(), after.min(), after.max()])
    change = found.expected_change
    assert change.value == pytest.approx((after - before).mean(), abs=1e-12)
    assert -20 <= change.low <= change.value <= change.high <= 20


def test_gains_by_chance_are_those_of_every_deal() -> None:
    """Of c correct responses among 2n, every set of n is as likely to be the start's."""
    n = 3
    pairs = [(0, 0), (0, 1), (2, 0), (0, 3), (1, 2), (3, 3), (1, 1)]
    expected = 0.0
    for start, end in pairs:
        correct = [1] * (start + end) + [0] * (2 * n - start - end)
        deals = list(combinations(range(2 * n), n))
        gains = [sum(correct) > 0 and not any(correct[i] for i in deal) for deal in deals]
        expected += sum(gains) / len(deals)
    run = run_of(0, [score_of(Cost(seconds=10.0 * e), [pair[e] for pair in pairs]) for e in (0, 1)])
    arms = [arm_of("a", [run])]
    found = coverage_change(comparison_of(arms, [10], n), arms[0], 10, 1)
    assert found.by_chance.mean == pytest.approx(expected, rel=1e-12)


def test_luck_alone_gives_as_many_gains_as_said() -> None:
    """Evaluations of an unchanged model: gains, and losses, agree with what is expected by chance."""
    generator = np.random.default_rng(8)
    chance_P = generator.beta(0.4, 3, 4000)
    run = run_of(0, [score_of(Cost(seconds=10.0 * e), generator.binomial(8, chance_P)) for e in (0, 1)])
    arms = [arm_of("a", [run])]
    found = coverage_change(comparison_of(arms, [10], 8), arms[0], 10, 1)
    assert found.by_chance.mean > 200
    assert found.gained.mean == pytest.approx(found.by_chance.mean, rel=0.15)
    assert found.lost.mean == pytest.approx(found.by_chance.mean, rel=0.15)


N, P = 8, 7


def random_run(
    rng: np.random.Generator,
    seed: int,
    first: int,
    gaps: tuple[int, int] = (5, 20),
    per_second: int = 1,
    end_reason: str | None = None,
) -> FinishedRun:
    """Make a run that is evaluated at 5 numbers of samples from `first` on, so many apart."""
    samples = first + np.cumsum([0, *rng.integers(*gaps, 4)])
    costs = [Cost(), *(Cost(int(s), float(s) / per_second, int(s), 0, int(s) * 3) for s in samples)]
    return run_of(seed, [score_of(c, rng.integers(0, N + 1, P)) for c in costs], end_reason=end_reason)


def one_curve(rng: np.random.Generator, name: str, rates_P: NDArray[np.float64], evaluated: Sequence[int]) -> Arm:
    """Make an arm of 5 runs whose logits rise by 2, half of it within 280 samples; evaluations cost nothing."""
    runs = []
    for seed in range(5):
        drift = rng.normal(0, 0.1)
        scores = []
        for samples in (0, *evaluated):
            logit_P = rates_P + 2 * (1 - np.exp(-samples / 400)) + (drift if samples else 0)
            cost = Cost(samples, float(samples), samples, samples, samples)
            scores.append(score_of(cost, rng.binomial(32, 1 / (1 + np.exp(-logit_P)))))
        runs.append(run_of(seed, scores))
    return arm_of(name, runs)


def read_off(run: FinishedRun, amount: float, k: int) -> list[float]:
    """Pass@k of each prompt where the run had sampled so many rollouts, by np.interp."""
    at = [s.cost.samples for s in run.scores]
    curves = [[1 - comb(N - int(s.num_correct_P[p]), k) / comb(N, k) for s in run.scores] for p in range(P)]
    return [float(np.interp(amount, at, curve)) for curve in curves]


def second_at_equal_cost(comparison: Comparison, k: int = 1) -> EqualCost:
    return at_equal_cost(comparison, comparison.arms[1], "samples", (k,))


def random_comparison(rng: np.random.Generator) -> Comparison:
    slow = arm_of("N=16", [random_run(rng, s, 60) for s in (1, 0, 2)])
    fast = arm_of("N=512", [random_run(rng, s, 50, (20, 45), 8) for s in (0, 1, 2)], 512)
    return comparison_of([slow, fast], [1.0], N)


@pytest.mark.parametrize("k", [1, 4])
def test_scores_lie_on_lines_between_evaluations(rng: np.random.Generator, k: int) -> None:
    comparison = random_comparison(rng)
    found = second_at_equal_cost(comparison, k)
    runs = [run for arm in comparison.arms for run in arm.runs]
    assert found.amount == min(run.scores[-1].cost.samples for run in runs)
    means = []
    for arm in comparison.arms:
        expected = [read_off(run, found.amount, k) for run in sorted(arm.runs, key=lambda r: r.seed)]
        at_cost = scores_at_cost(comparison, arm, "samples", found.amount, k)
        np.testing.assert_allclose(at_cost, expected, atol=1e-12)
        means.append(np.mean(expected))
    score, difference = found.scores[k], found.differences[k]
    assert score is not None
    assert score.value == pytest.approx(means[1])
    assert difference is not None
    assert difference.seeds_paired
    assert difference.difference.value == pytest.approx(means[1] - means[0])


def test_a_run_that_ended_early_keeps_its_last_score_and_does_not_limit_the_others(rng: np.random.Generator) -> None:
    ended = random_run(rng, 0, 5, end_reason="nothing was left to learn")
    other = random_run(rng, 0, 1000)
    comparison = comparison_of([arm_of("N=16", [ended]), arm_of("N=512", [other], 512)], [1.0], N)
    found = second_at_equal_cost(comparison)
    assert found.amount == other.scores[-1].cost.samples > ended.scores[-1].cost.samples
    difference = found.differences[1]
    assert difference is not None
    gap = other.scores[-1].num_correct_P.mean() / N - ended.scores[-1].num_correct_P.mean() / N
    assert difference.difference.value == pytest.approx(gap)


@pytest.mark.parametrize(
    ("evaluated", "known"),
    [
        ((1500, 3000), False),  # first evaluated later
        ((200, 1500), False),  # evaluated before and after, far apart
        ((700, 1400), True),
        pytest.param((1000, 9000), True, marks=pytest.mark.slow),  # evaluated right there
        ((10, 1000), True),
    ],
)
def test_two_arms_of_one_distribution_show_no_lead(
    rng: np.random.Generator, evaluated: tuple[int, int], known: bool
) -> None:
    """A straight line that is too long runs below the curve: it gave a lead in nearly every such trial."""
    leads = 0
    for _ in range(20):
        logit_P = rng.normal(-1.5, 1, 100)
        arms = [one_curve(rng, "often", logit_P, (250, 500, 1000)), one_curve(rng, "rarely", logit_P, evaluated)]
        found = second_at_equal_cost(comparison_of(arms, [1000.0], 32))
        assert found.amount == 1000
        difference = found.differences[1]
        assert (difference is not None) == (found.scores[1] is not None) == known
        leads += difference is not None and difference.conclusion != "no difference shown"
    assert leads <= 8  # nominally 1 of 20, and 12% with a line between 700 and 1,400
    if not known:
        assert scores_at_cost(comparison_of(arms, [1000.0], 32), arms[1], "samples", 1000) is None


def test_one_run_that_was_evaluated_late_leaves_its_arm_without_a_score(rng: np.random.Generator) -> None:
    late = random_run(rng, 1, 400)
    arms = [arm_of(f"N={n}", [random_run(rng, 0, 90), *([late] if n == 16 else [])], n) for n in (8, 16, 32)]
    comparison = comparison_of(arms, [1.0], N)
    found = [at_equal_cost(comparison, arm, "samples", (1,)) for arm in arms[1:]]
    assert [(one.scores[1] is None, one.differences[1] is None) for one in found] == [(True, True), (False, False)]


def comparison_from(
    counts: np.ndarray,
    eval_points: tuple[float, ...],
    num_samples: int,
    numbers: tuple[int, ...],
    overshoot: dict | None = None,
) -> Comparison:
    """counts: [arms, seeds, evaluations, prompts], the first evaluation that of the start."""
    arms = []
    for a, of_arm in enumerate(counts):
        spent = [0.0, *(eval_point * (overshoot or {}).get((a, eval_point), 1.01) for eval_point in eval_points)]
        runs = [
            run_of(s, [score_of(Cost(seconds=c), row) for c, row in zip(spent, run, strict=True)])
            for s, run in enumerate(of_arm)
        ]
        arms.append(arm_of(f"arm {a}", runs, numbers[a]))
    return comparison_of(arms, eval_points, num_samples)


@pytest.mark.parametrize("k", [1, 3])
def test_the_best_are_those_of_plain_sorting(rng: np.random.Generator, k: int) -> None:
    counts = rng.integers(0, 9, (3, 3, 3, 20))
    comparison = comparison_from(counts, (5.0, 9.0), 8, (4, 16, 64))
    found = frontier(comparison, k)
    assert [best.eval_point for best in found] == [5.0, 9.0]

    def scores(a: int, m: int) -> np.ndarray:
        return np.stack([pass_at_k(run[m + 1], 8, k) for run in counts[a]])

    for m, best in enumerate(found):
        means = [scores(a, m).mean() for a in range(3)]
        first, second, _ = sorted(range(3), key=lambda a: -means[a])
        assert (best.arm, best.second) == (f"arm {first}", f"arm {second}")
        difference = paired_difference(scores(second, m), scores(first, m), seeds_paired=True)
        assert best.lead == difference.difference
        assert best.lead_shown == (difference.conclusion == "B leads")


def test_what_is_not_matched_is_left_out(rng: np.random.Generator) -> None:
    counts = np.sort(rng.integers(0, 9, (4, 3, 5, 20)), axis=0)  # the later, the better
    overshoot = {
        (3, 10.0): 3.0,
        (3, 20.0): 1.5,
        **{(a, 40.0): 1.6 for a in range(4)},
        **{(a, 80.0): 2 for a in range(3)},
    }
    found = frontier(comparison_from(counts, (10.0, 20.0, 40.0, 80.0), 32, (4, 16, 64, 256), overshoot))
    # without the best another is the best of the rest; who alone is matched has beaten nobody
    assert [(best.eval_point, best.arm) for best in found] == [(10.0, "arm 2"), (20.0, "arm 2")]
