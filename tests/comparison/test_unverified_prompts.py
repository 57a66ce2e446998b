"""Comparisons of runs with responses that could not be verified."""

from dataclasses import replace

import numpy as np
import pytest
from comparisons import arm_of, comparison_of, run_of, score_of

from brorl.comparison.answer import unverified_words
from brorl.comparison.scores import Comparison, Score, without_unverified
from brorl.cost import Cost
from brorl.errors import UserError


def random_comparison(rng: np.random.Generator, fraction: float) -> Comparison:
    """Two arms of two runs with three evaluations of 12 prompts, some with unverified responses."""

    def score() -> Score:
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
        assert [p.id for p in smaller.prompts] == [f"held-{i}" for i in kept]
        assert smaller.num_left_out == 12 - len(kept)
        found = [s for arm in smaller.arms for run in arm.runs for s in run.scores]
        for before, after in zip(scores, found, strict=True):
            assert after.num_correct_P.tolist() == [before.num_correct_P[i] for i in kept]
            assert after.sampled_tokens_P.tolist() == [before.sampled_tokens_P[i] for i in kept]
        words = unverified_words(smaller)
        assert words == "" if len(kept) == 12 else words.startswith(f"{12 - len(kept)} of 12 held-out prompts")


def test_a_comparisonwithout_unverified_responses_stays(rng: np.random.Generator) -> None:
    whole = random_comparison(rng, 0.0)
    assert without_unverified(whole) is whole
    assert unverified_words(whole) == ""


def test_nothing_can_be_compared_if_no_prompt_is_left(rng: np.random.Generator) -> None:
    with pytest.raises(UserError, match="for each held-out prompt some responses could not be verified"):
        without_unverified(random_comparison(rng, 1.0))
