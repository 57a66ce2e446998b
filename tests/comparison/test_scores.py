"""Scores of runs: pairing by seed, phases, prompts that were not verified, and equal scores."""

import re
from dataclasses import replace

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, figure_of, run_of, score_of

from brorl.comparison.findings import unverified_prompts
from brorl.comparison.results import results_of
from brorl.comparison.scores import (
    Comparison,
    RunEvaluation,
    have_same_seeds,
    scores_at,
    start_scores,
    without_unverified,
)
from brorl.comparison.tables import arm_table
from brorl.cost import Cost
from brorl.errors import UserError
from brorl.evaluation.pass_at_k import pass_at_k


def test_arms_of_a_comparison_are_paired_by_seed(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (2, 3, 2, 15))  # arms, seeds, evaluations, prompts
    seeds = [[4, 1, 9], [9, 4, 1]]
    arms = [
        arm_of(name, [
            run_of(seed, [score_of(Cost(seconds=10.0 * e), row) for e, row in enumerate(evaluations)])
            for seed, evaluations in zip(order, of_arm, strict=True)
        ])
        for name, order, of_arm in zip("ab", seeds, counts, strict=True)
    ]  # fmt: skip
    comparison = comparison_of(arms, [10], 8)
    assert have_same_seeds(*arms)
    a_SP, b_SP = counts[0, [1, 0, 2], 1], counts[1, [2, 1, 0], 1]  # by seed: 1, 4, 9
    for k in (1, 3):
        for arm, of_arm in zip(arms, (a_SP, b_SP), strict=True):
            expected_SP = np.stack([pass_at_k(row, 8, k) for row in of_arm])
            np.testing.assert_array_equal(scores_at(comparison, arm, 10, k), expected_SP)
    np.testing.assert_array_equal(scores_at(comparison, arms[1], 0), counts[1, [2, 1, 0], 0] / 8)
    other = arm_of("c", [run_of(s, [score_of(Cost(), counts[0, 0, 0])]) for s in (4, 1, 1)])
    assert not have_same_seeds(arms[0], other)
    assert not have_same_seeds(other, other)
    with pytest.raises(ValueError, match="arm none has no run"):
        scores_at(comparison, arm_of("none", []), 10)


def test_the_start_is_averaged_over_the_runs_of_a_seed(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (2, 2, 12))  # arms, seeds, prompts
    arms = [
        arm_of(name, [run_of(seed, [score_of(Cost(), row_P)]) for seed, row_P in enumerate(of_arm)])
        for name, of_arm in zip("ab", counts, strict=True)
    ]
    expected = [(pass_at_k(counts[0, s], 8, 2) + pass_at_k(counts[1, s], 8, 2)) / 2 for s in range(2)]
    np.testing.assert_allclose(start_scores(comparison_of(arms, [1], 8), 2), expected, atol=1e-15)


TITLE = "sharpen (phase 2 of 2, grpo)"


def test_begins_are_means_over_runs_and_drawn_on_the_line(rng: np.random.Generator) -> None:
    begins_S, points = rng.uniform(2, 9, 3), (5.0, 10.0)
    arms = []
    for name, n in (("A", 16), ("B", 512)):
        runs = [
            run_of(seed, [score_of(Cost(int(p), p, int(p), 0, 0), rng.integers(0, 9, 20)) for p in (0.0, *points)])
            for seed in range(3)
        ]
        if name == "B":
            runs = [
                replace(r, phase_begins={TITLE: Cost(seconds=float(b))}) for r, b in zip(runs, begins_S, strict=True)
            ]
        arms.append(arm_of(name, runs, n))
    comparison = comparison_of(arms, points, 8)
    assert arms[0].phase_begins("seconds") == {}
    assert arms[1].phase_begins("seconds") == {TITLE: pytest.approx(begins_S.mean())}
    said = [note for note in arm_table(results_of(comparison)).notes if TITLE in note]
    assert len(said) == 1
    shown = re.fullmatch(rf"In B, {re.escape(TITLE)} began after (\S+) seconds on average\.", said[0])
    assert shown is not None
    assert float(shown[1]) == pytest.approx(begins_S.mean(), abs=0.051)

    (axis, *_) = figure_of(comparison).axes
    (diamond,) = [line for line in axis.get_lines() if line.get_marker() == "D"]
    mean_M = [np.mean([run.scores[i].num_correct_P / 8 for run in arms[1].runs]) for i in range(3)]
    assert diamond.get_xdata()[0] == pytest.approx(begins_S.mean())
    assert diamond.get_ydata()[0] == pytest.approx(np.interp(begins_S.mean(), (0.0, *points), mean_M))


def random_comparison(rng: np.random.Generator, fraction: float) -> Comparison:
    """Two arms of two runs with three evaluations of 12 prompts, some with unverified responses."""

    def score() -> RunEvaluation:
        lost = rng.integers(1, 3, 12) * (rng.random(12) < fraction)
        made = score_of(Cost(), rng.integers(0, 9, 12), rng.integers(1, 99, 12))
        return replace(made, num_unverified_P=lost if lost.any() else None)

    arms = [arm_of(name, [run_of(seed, [score() for _ in range(3)]) for seed in range(2)]) for name in "AB"]
    return comparison_of(arms, [3.0], 8, unit="steps", ks=(1, 4))


def test_all_arms_keep_the_prompts_that_were_verified_everywhere(rng: np.random.Generator) -> None:
    for _ in range(20):
        whole = random_comparison(rng, 0.03)
        scores = [s for arm in whole.arms for run in arm.runs for s in run.scores]
        kept = [
            i for i in range(12) if not any(s.num_unverified_P is not None and s.num_unverified_P[i] for s in scores)
        ]
        if not kept:
            continue
        smaller = without_unverified(whole)
        assert list(smaller.prompts) == [f"held-{i}" for i in kept]
        assert smaller.num_left_out == 12 - len(kept)
        found = [s for arm in smaller.arms for run in arm.runs for s in run.scores]
        for before, after in zip(scores, found, strict=True):
            assert after.num_correct_P.tolist() == [before.num_correct_P[i] for i in kept]
            assert after.sampled_tokens_P.tolist() == [before.sampled_tokens_P[i] for i in kept]
        told = [(finding.values["left_out"], finding.values["number"]) for finding in unverified_prompts(smaller)]
        assert told == ([] if len(kept) == 12 else [(12 - len(kept), 12)])


def test_a_comparison_without_unverified_responses_stays(rng: np.random.Generator) -> None:
    whole = random_comparison(rng, 0.0)
    assert without_unverified(whole) is whole
    assert not list(unverified_prompts(whole))


def test_nothing_can_be_compared_if_no_prompt_is_left(rng: np.random.Generator) -> None:
    with pytest.raises(UserError, match="every held-out prompt has responses that could not be verified"):
        without_unverified(random_comparison(rng, 1.0))
