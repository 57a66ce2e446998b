"""Rates of an arm and of the start are plain ratios of each run."""

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.results import use_of_samples
from brorl.cost import Cost


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
    arm = arm_of("a", [run_of(9, [score_of(Cost(), [1], [0])], groups=(0, 0), ended_early="collapsed")])
    found = use_of_samples(comparison_of([arm], [10], 2), arm)
    assert found.pop("tokens_per_response").mean == 0
    assert set(found.values()) == {None}
