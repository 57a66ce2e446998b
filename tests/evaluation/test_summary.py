"""Summaries of an evaluation against plain loops."""

from itertools import combinations

import numpy as np
import pytest

from brorl.algorithms.groups import Group
from brorl.evaluation.pass_at_k import mean_with_interval
from brorl.evaluation.summary import PromptResult, count, default_ks, summarize, summarize_all
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import Verdict

N = 6


def results(rng: np.random.Generator) -> list[PromptResult]:
    return [
        PromptResult(
            prompt_id=f"p{i}",
            data_set=("one", "one", "two")[i % 3],
            domain=("math", "countdown")[i // 3 % 2],
            num_samples=N,
            num_correct=int(rng.integers(0, N + 1)),
            num_truncated=int(rng.integers(0, N + 1)),
            num_distinct=int(rng.integers(1, N + 1)),
            sampled_tokens=int(rng.integers(N, 100)),
            unique_tokens=int(rng.integers(1, 7)),
            verifier_timeouts=int(rng.integers(0, 2)),
            verifier_failures=int(rng.integers(0, 2)),
        )
        for i in range(12)
    ]


def test_every_number_by_data_set_domain_and_over_all_prompts(rng: np.random.Generator) -> None:
    given = results(rng)
    found = summarize_all(given, (1, 2, 5), {"one": 2.5, "two": 0.5})
    assert list(found.by_data_set) == ["one", "two"]
    assert list(found.by_domain) == ["countdown", "math"]
    groups = [(found.overall, given, 3.0)]
    groups += [
        (s, [r for r in given if r.data_set == n], t)
        for (n, s), t in zip(found.by_data_set.items(), (2.5, 0.5), strict=True)
    ]
    groups += [(s, [r for r in given if r.domain == n], None) for n, s in found.by_domain.items()]
    for summary, rows, seconds in groups:
        assert summary.seconds == seconds
        assert (summary.num_prompts, summary.num_samples) == (len(rows), N)
        for k in (1, 2, 5):
            fractions = []
            for row in rows:
                outcomes = [i < row.num_correct for i in range(N)]
                subsets = [any(chosen) for chosen in combinations(outcomes, k)]
                fractions.append(sum(subsets) / len(subsets))
            assert summary.pass_at[k].value == pytest.approx(sum(fractions) / len(fractions))
            alone = mean_with_interval(np.array(fractions))
            assert (summary.pass_at[k].low, summary.pass_at[k].high) == pytest.approx((alone.low, alone.high))
        total = dict.fromkeys(("solved", "tokens", "unique", "cut", "timeouts", "failures", "distinct"), 0)
        for row in rows:
            total["solved"] += row.num_correct > 0
            total["tokens"] += row.sampled_tokens
            total["unique"] += row.unique_tokens
            total["cut"] += row.num_truncated
            total["timeouts"] += row.verifier_timeouts
            total["failures"] += row.verifier_failures
            total["distinct"] += row.num_distinct
        assert summary.solved == total["solved"]
        assert summary.tokens_per_response == pytest.approx(total["tokens"] / (N * len(rows)))
        assert summary.truncation_rate == pytest.approx(total["cut"] / (N * len(rows)))
        assert (summary.sampled_tokens, summary.unique_tokens) == (total["tokens"], total["unique"])
        assert (summary.verifier_timeouts, summary.verifier_failures) == (total["timeouts"], total["failures"])
        assert summary.num_distinct == total["distinct"]


def test_counts_of_a_tree_are_those_of_its_rollouts(rng: np.random.Generator) -> None:
    rollouts = [rng.integers(2, 4, rng.integers(1, 4)).tolist() for _ in range(40)]
    finished = [bool(rng.integers(0, 2)) for _ in rollouts]
    tree = RolloutTree.from_responses((9,), rollouts, finished=finished)
    reasons = ["correct", "wrong answer", "timeout", "out of memory", "verifier raised ValueError: x"]
    reason_of = {}
    for (tokens, _), done in zip(tree.responses(), tree.finished.tolist(), strict=True):
        reason_of[tokens, done] = str(rng.choice(reasons))
    verdicts = [Verdict(r == "correct", 0.0, None, r, 0.0) for r in reason_of.values()]
    found = count(Group.of_verdicts(Prompt("a:1", "x", (9,), "r", "math", "a"), tree, verdicts))
    every = [reason_of[tuple(r), f] for r, f in zip(rollouts, finished, strict=True)]
    assert found.num_correct == every.count("correct")
    assert found.num_truncated == finished.count(False)
    assert found.num_samples == 40
    assert found.sampled_tokens == sum(map(len, rollouts))
    assert found.unique_tokens == len({tuple(r[:i]) for r in rollouts for i in range(1, len(r) + 1)})
    assert found.num_distinct == len({(tuple(r), f) for r, f in zip(rollouts, finished, strict=True)})
    assert found.verifier_timeouts == list(reason_of.values()).count("timeout")
    assert found.verifier_failures == sum(r.startswith(("out of", "verifier")) for r in reason_of.values())
    assert (found.prompt_id, found.data_set, found.domain) == ("a:1", "a", "math")


def test_default_ks() -> None:
    assert default_ks(512) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert default_ks(5000) == default_ks(512)
    assert default_ks(16) == (1, 2, 4, 8)
    assert default_ks(31) == (1, 2, 4, 8)
    assert default_ks(1) == default_ks(2) == default_ks(3) == (1,)
    assert default_ks(4) == (1, 2)


def test_averages_need_prompts_of_one_number_of_samples(rng: np.random.Generator) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="got no prompt"):
        summarize([], (1,), None)
    one, other, *_ = results(rng)
    with pytest.raises(ValueError, match=r"got \[6, 7\]"):
        summarize([one, replace(other, num_samples=7)], (1,), None)
