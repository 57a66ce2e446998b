"""Scores per token against plain sums, their intervals against repetitions; rates against plain ratios."""

from math import inf

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.matching import token_efficiency, training_efficiency
from brorl.cost import Cost
from brorl.evaluation.paired import mean_over_runs


def test_scores_per_token_are_correct_responses_over_tokens(rng: np.random.Generator) -> None:
    counts, tokens = rng.integers(0, 5, (2, 3, 2, 24)), rng.integers(4, 900, (2, 3, 2, 24))
    arms = [
        arm_of(name, [
            run_of(s, [score_of(Cost(seconds=10.0 * e), c[e], t[e]) for e in (0, 1)])
            for s, (c, t) in enumerate(zip(*of_arm, strict=True))
        ])
        for name, of_arm in zip("ab", zip(counts, tokens, strict=True), strict=True)
    ]  # fmt: skip
    comparison = comparison_of(arms, [10], 4)
    for found, of_runs in (
        (token_efficiency(comparison, arms[1], 10), [(1, s, 1) for s in range(3)]),
        (token_efficiency(comparison), [((0, 1), s, 0) for s in range(3)]),  # runs of one seed together
    ):
        correct = [[np.mean(counts[run][..., p]) for p in range(24)] for run in of_runs]
        spent = [[np.mean(tokens[run][..., p]) for p in range(24)] for run in of_runs]
        assert found.tokens == mean_over_runs(np.array(spent) / 4, highest=inf)
        assert found.per_thousand is not None
        assert found.per_thousand.value == pytest.approx(1000 * sum(map(sum, correct)) / sum(map(sum, spent)))
        assert found.per_thousand.low <= found.per_thousand.value <= found.per_thousand.high


def test_interval_of_the_ratio_covers_it() -> None:
    """300 experiments in which long responses are the wrong ones, so that score and tokens are far from independent."""
    generator = np.random.default_rng(2)

    def experiment(prompts: int) -> tuple[np.ndarray, np.ndarray]:
        chance_P = generator.beta(2, 2, prompts)
        return generator.binomial(8, chance_P), generator.poisson(8 * (20 + 100 * (1 - chance_P)))

    correct, tokens = experiment(400_000)
    truth, covered = 1000 * correct.sum() / tokens.sum(), 0
    for _ in range(300):
        correct, tokens = experiment(60)
        arms = [arm_of("a", [run_of(0, [score_of(Cost(), correct, tokens)])])]
        row = token_efficiency(comparison_of(arms, [10], 8), arms[0], 0)
        assert row.per_thousand is not None
        covered += row.per_thousand.low <= truth <= row.per_thousand.high
    assert 0.90 <= covered / 300 <= 0.99


def test_responses_without_tokens_have_no_score_per_token() -> None:
    arms = [arm_of("a", [run_of(0, [score_of(Cost(), [0, 1], [0, 0])])])]
    row = token_efficiency(comparison_of(arms, [10], 2), arms[0], 0)
    assert row.per_thousand is None


def test_rates_are_ratios_of_each_run(rng: np.random.Generator) -> None:
    runs, expected = [], {}
    for seed in range(3):
        seconds, generation = rng.uniform(10, 20), rng.uniform(1, 9)
        samples, sampled, unique, groups = (int(v) for v in rng.integers(10, 1000, 4))
        mixed = int(rng.integers(0, groups + 1))
        cost = Cost(5, seconds, samples, sampled, unique)
        run = run_of(seed, [score_of(cost, [1])], phases={"generation": generation}, groups=(groups, mixed))
        runs.append(run)
        for name, value in (
            ("samples_per_s", samples / seconds),
            ("generated_per_s", samples / generation),
            ("sampled_tokens_per_s", sampled / seconds),
            ("unique_tokens_per_s", unique / seconds),
            ("mixed_fraction", mixed / groups),
            ("tokens_per_unique", sampled / unique),
        ):
            expected.setdefault(name, []).append(value)
    # a run that made no step has no rates
    found = training_efficiency(arm_of("a", [*runs, run_of(9, [score_of(Cost(), [1])], groups=(0, 0))]))
    for name, values in expected.items():
        spread = found[name]
        assert [spread.mean, spread.least, spread.most] == pytest.approx([np.mean(values), min(values), max(values)])
    empty = training_efficiency(arm_of("a", [run_of(9, [score_of(Cost(), [1])], groups=(0, 0))]))
    assert set(empty.values()) == {None}
