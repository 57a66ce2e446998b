"""pass@k of held-out prompts whose verdicts are known beforehand, against counting all subsets."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from brorl.activity import Activity, Stage
from brorl.algorithms.settings import RewardShaping
from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.evaluator import BatchCounts, Evaluator, PromptBatch, evaluation_record
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.grade import Grader
from brorl.verification.verifier import Verifier

SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=4)
SEED = 99
# Responses to each of three prompts; 5 is the right answer, 1 ends, and what does not end is truncated.
ROLLOUTS = [
    [[5, 1], [5, 1], [6, 1], [6, 6, 1], [6, 1], [6, 6, 6, 6]],
    [[6, 1], [6, 1], [6, 1], [6, 1], [6, 1], [6, 1]],
    [[5, 1], [5, 6, 1], [5, 1], [5, 1], [6, 1], [5, 6, 6, 6]],
]
FINISHED = [[r[-1] == 1 for r in rollouts] for rollouts in ROLLOUTS]
CORRECT = [[r[0] == 5 and r[-1] == 1 for r in rollouts] for rollouts in ROLLOUTS]


class FixedEngine:
    def sample(self, task: SampleTask) -> list[RolloutTree]:
        assert [tuple(p) for p in task.prompts] == [(10,), (11,), (12,)]
        assert (task.num_rollouts, task.sampling, task.seed) == (6, SAMPLING, SEED)
        return [
            RolloutTree.from_responses(p, r, finished=f)
            for p, r, f in zip(task.prompts, ROLLOUTS, FINISHED, strict=True)
        ]


class FirstNumberVerifier:
    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        correct = response.startswith(prompt.reference)
        return Verdict(correct, float(correct), None, "correct" if correct else "wrong", 0.0)


def grader(verifier: Verifier, accept_truncated: bool = False) -> Grader:
    shaping = RewardShaping(stop_properly=0.5 if accept_truncated else 0.0)
    return Grader({"first": verifier}, lambda tokens: " ".join(map(str, tokens)), shaping)


PROMPTS = [Prompt(f"p{i}", f"{i}", (10 + i,), "5", "first") for i in range(3)]


BATCH = PromptBatch(tuple(PROMPTS), SEED)


def evaluated(verifier: Verifier, accept_truncated: bool = False, batch: PromptBatch = BATCH) -> BatchCounts:
    return Evaluator(grader(verifier, accept_truncated), SAMPLING, 6).evaluate(FixedEngine(), batch)


def test_a_run_is_evaluated_with_the_tokens_that_it_samples() -> None:
    trained = {"top_p": 0.9, "top_k": 7, "min_new_tokens": 2, "max_new_tokens": 20, "temperature": 0.7}
    rows: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {}),
        ({"top_k": 0, "top_p": 1.0, "min_new_tokens": 0}, {"top_k": 0, "top_p": 1.0, "min_new_tokens": 0}),
        ({"temperature": 0.0, "max_new_tokens": 9, "top_k": 3}, {"temperature": 0.0, "max_new_tokens": 9, "top_k": 3}),
    )
    for own, expected in rows:
        given = {f"sampling.{k}": v for k, v in trained.items()} | {f"evaluation.{k}": v for k, v in own.items()}
        sampling = make_config(read_recipe("quickstart"), given, "quickstart").evaluated_sampling
        assert asdict(sampling) == {"stop_token_ids": ()} | trained | {"temperature": 1.0} | expected


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response() -> None:
    reports: list[Activity] = []
    evaluator = Evaluator(grader(FirstNumberVerifier()), SAMPLING, 6, reports.append)
    result = evaluation_record(evaluator.evaluate(FixedEngine(), BATCH), (1, 2, 3, 6))
    assert result is not None
    assert list(result.pass_at) == [1, 2, 3, 6]
    for k, estimate in result.pass_at.items():
        fractions = [np.mean([any(chosen) for chosen in combinations(verdicts, k)]) for verdicts in CORRECT]
        assert estimate.value == pytest.approx(np.mean(fractions))
        assert estimate.low <= estimate.value <= estimate.high
    assert (result.num_prompts, result.num_samples, result.solved) == (3, 6, 2)
    assert result.truncation_rate == pytest.approx(2 / 18)
    assert result.sampled_tokens == sum(len(r) for rollouts in ROLLOUTS for r in rollouts)
    distinct_prefixes = [{tuple(r[:i]) for r in rollouts for i in range(1, len(r) + 1)} for rollouts in ROLLOUTS]
    assert result.unique_tokens == sum(map(len, distinct_prefixes))
    distinct = sum(len({tuple(r) for r in rollouts}) for rollouts in ROLLOUTS)
    assert reports == [Stage("evaluating"), Stage("evaluating", f"verifying {distinct} distinct responses")]


def test_verifications_that_failed_are_counted_and_truncated_ones_verified_if_asked() -> None:
    class Failing:
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            reasons = ["timeout", "out of memory", "verifier raised ValueError: x", "wrong"]
            return [Verdict(False, 0.0, None, reasons[i % 4], 0.0) for i in range(len(items))]

    distinct = {
        (p, tuple(r), f)
        for p, (rs, fs) in enumerate(zip(ROLLOUTS, FINISHED, strict=True))
        for r, f in zip(rs, fs, strict=True)
    }
    for accept in (False, True):
        texts = {(p, r) for p, r, done in distinct if done or accept}
        reasons = [i % 4 for i in range(len(texts))]
        result = evaluation_record(evaluated(Failing(), accept), (1,))
        assert result is not None
        assert result.verifier_timeouts == reasons.count(0)
        assert result.verifier_failures == reasons.count(1) + reasons.count(2)
    assert any(not done for _, _, done in distinct)


class LosingVerifier(FirstNumberVerifier):
    """Loses some texts of some prompts, always."""

    def __init__(self, lost: set[tuple[str, str]]) -> None:
        self.lost = lost

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        if (prompt.id, response) in self.lost:
            return unverified_verdict("a worker was lost")
        return super().verify(prompt, response)


@pytest.mark.parametrize("accept_truncated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pass_at_k_without_unverified_responses_is_that_of_the_subsets_of_the_others(
    accept_truncated: bool, rng: np.random.Generator
) -> None:
    prompts = tuple(Prompt(f"p{i}", f"{i}", (10 + i,), "5", "first", f"set {i % 2}") for i in range(3))
    for _ in range(10):
        texts = sorted({(f"p{i}", " ".join(map(str, r))) for i, rs in enumerate(ROLLOUTS) for r in rs})
        lost = {pair for pair in texts if rng.random() < 0.4}
        counts = evaluated(LosingVerifier(lost), accept_truncated, PromptBatch(prompts, SEED))
        left = [
            [
                r[0] == 5 and (done or accept_truncated)
                for r, done in zip(rs, fs, strict=True)
                if (f"p{i}", " ".join(map(str, r))) not in lost or not (done or accept_truncated)
            ]
            for i, (rs, fs) in enumerate(zip(ROLLOUTS, FINISHED, strict=True))
        ]
        num_lost = [6 - len(kept) for kept in left]
        assert [prompt.num_unverified for prompt in counts.prompts] == num_lost
        fractions = {
            k: [np.mean([any(s) for s in combinations(kept, k)]) for kept in left if len(kept) >= k] for k in (1, 2, 4)
        }
        result = evaluation_record(counts, (1, 2, 4))
        if not all(fractions.values()):
            assert result is None
            continue
        assert result is not None
        assert result.num_samples == 6
        for k, found in fractions.items():
            assert result.pass_at[k].value == pytest.approx(np.mean(found))
        if sum(num_lost):
            assert result.num_unverified == sum(num_lost)
            assert [*(result.prompts.num_unverified or ())] == num_lost
            assert result.left_out == {k: 3 - len(found) for k, found in fractions.items() if len(found) < 3}
        else:
            assert result.num_unverified is None
            assert result.prompts.num_unverified is None
        assert [*result.prompts.num_correct] == [sum(kept) for kept in left]
        own = [[left[0], left[2]], [left[1]]]
        for name, group in zip(("set 0", "set 1"), own, strict=True):
            if all(any(len(kept) >= k for kept in group) for k in (1, 2, 4)):
                fractions_of = [np.mean([any(s) for s in combinations(kept, 2)]) for kept in group if len(kept) >= 2]
                assert result.by_source[name][2].value == pytest.approx(np.mean(fractions_of))
            else:
                assert name not in result.by_source
