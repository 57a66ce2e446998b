"""Tasks made to be of each kind are sorted into it; names follow from what is shown, and from nothing else."""

from itertools import product

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.arms import Arm
from brorl.comparison.prompt_changes import kind_of, movement_of, task_trends
from brorl.cost import Cost
from brorl.evaluation.paired import difference_interval, mean_over_runs
from brorl.format import Estimate

_KINDS = {  # task: pass rates of the start, of A and of B
    "both improve and B leads": (0.2, 0.5, 0.8),
    "both improve and A leads": (0.2, 0.8, 0.5),
    "both improve, no lead shown": (0.2, 0.6, 0.6),
    "A degrades while B improves": (0.5, 0.2, 0.8),
    "B degrades while A improves": (0.5, 0.8, 0.2),
    "both degrade and A leads": (0.9, 0.6, 0.3),
    "both degrade, no lead shown": (0.8, 0.4, 0.4),
    "neither gains": (0.5, 0.5, 0.5),
    "only B improves and B leads": (0.3, 0.3, 0.8),
    "only A degrades and B leads": (0.7, 0.3, 0.7),
}


def arms_by_kind(generator: np.random.Generator, seeds: int, each: int) -> tuple[list[Arm], list[str]]:
    sources = [task for task in _KINDS for _ in range(each)]
    rates = np.array([_KINDS[task] for task in sources])
    start_P = generator.binomial(16, rates[:, 0])
    arms = []
    for column in (1, 2):
        # pass rates that did not change: the same responses again, so that nothing is there to be shown by chance
        same_P = rates[:, column] == rates[:, 0]
        ends_SP = np.where(same_P, start_P, generator.binomial(16, rates[:, column], (seeds, len(sources))))
        runs = [run_of(s, [score_of(Cost(), start_P), score_of(Cost(1), end_P)]) for s, end_P in enumerate(ends_SP)]
        arms.append(arm_of("AB"[column - 1], runs))
    return arms, sources


def test_tasks_of_each_kind_are_told_apart() -> None:
    arms, sources = arms_by_kind(np.random.default_rng(6), 4, 40)
    comparison = comparison_of(arms, [1], 16, sources=sources, unit="steps")
    rows = task_trends(comparison, 1)
    assert [row.task for row in rows] == sorted(_KINDS)
    assert {row.task: row.kind for row in rows} == {task: task for task in _KINDS}
    assert {row.num_prompts for row in rows} == {40}


def test_intervals_are_those_of_the_tasks_prompts(rng: np.random.Generator) -> None:
    arms, sources = arms_by_kind(rng, 3, 5)
    rows = task_trends(comparison_of(arms, [1], 16, sources=sources, unit="steps"), 1)
    for row in rows:
        chosen = [i for i, source in enumerate(sources) if source == row.task]
        start_SP, end_SP = (
            [np.stack([run.scores[e].num_correct_P[chosen] / 16 for run in arm.runs]) for arm in arms] for e in (0, 1)
        )
        assert row.change_a == mean_over_runs(end_SP[0] - start_SP[0], lowest=-1)
        assert row.change_b == mean_over_runs(end_SP[1] - start_SP[1], lowest=-1)
        assert row.difference == difference_interval(*end_SP, seeds_paired=True)
        assert row.movement_a == movement_of(row.change_a)


def test_a_sign_alone_is_no_movement() -> None:
    assert movement_of(Estimate(0.3, -0.01, 0.6)) == "no change shown"
    assert movement_of(Estimate(0.3, 0.01, 0.6)) == "improves"
    assert movement_of(Estimate(-0.3, -0.6, -0.01)) == "degrades"
    assert movement_of(Estimate(0.0, 0.0, 0.0)) == "no change shown"


def test_every_combination_has_a_name_of_its_own() -> None:
    movements, leads = ("improves", "degrades", "no change shown"), ("A leads", "B leads", "no difference shown")
    names = {(a, b, lead): kind_of(a, b, lead) for a, b, lead in product(movements, movements, leads)}
    # a lead in the direction of opposite movements goes without saying, so these two pairs share their names
    assert len(set(names.values())) == len(names) - 2
    swap = {"A leads": "B leads", "B leads": "A leads", "no difference shown": "no difference shown"}
    turned = str.maketrans("AB", "BA")
    for (a, b, lead), name in names.items():
        assert names[b, a, swap[lead]] == name.translate(turned)
    assert names["no change shown", "no change shown", "B leads"] == "neither gains and B leads"


def test_refuses_runs_that_did_not_reach_the_evaluation_point(rng: np.random.Generator) -> None:
    arms, sources = arms_by_kind(rng, 2, 2)
    with pytest.raises(ValueError, match="no evaluation at 2 steps"):
        task_trends(comparison_of(arms, [2], 16, sources=sources, unit="steps"), 2)
