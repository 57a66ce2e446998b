"""Adaptive rollouts: who gets more, what becomes of the draws, and that a killed run goes on bitwise."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from brorl.algorithms.groups import Group
from brorl.algorithms.settings import RewardShaping
from brorl.assemble.learner import build_learner_settings
from brorl.assemble.run import build_rollouts_per_prompt
from brorl.config.reading import dump_yaml, make_config, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.model.forward import TreeForward
from brorl.prompts.prompt import Prompt
from brorl.prompts.stream import PromptStream
from brorl.runs.checkpoint import SourceState
from brorl.sampling import SamplingParams
from brorl.theory.allocation import AdaptiveAllocation
from brorl.training.collect import Collector
from brorl.training.source import Batch, NoMixedGroupsError
from brorl.tree import RolloutTree
from brorl.verification.grade import Grader
from brorl.verification.verifier import Verdict
from run_support import SMALL, assert_same_run, command, metrics_without_times

RIGHT, END = 7, 0
Rng = np.random.Generator


class CoinEngine:
    """Each prompt has a pass rate; draws depend on the seed alone. Remembers every rollout by prompt and call."""

    def __init__(self, pass_rates: Sequence[float]) -> None:
        self.version = 0
        self.pass_rates = pass_rates
        self.calls: list[tuple[int, int, list[int]]] = []  # rollouts, seed and prompts of each call
        self.rollouts: dict[int, list[list[tuple[int, ...]]]] = {}

    def sample(
        self, prompts: Sequence[Sequence[int]], num_rollouts: int, sampling: SamplingParams, seed: int
    ) -> list[RolloutTree]:
        assert sampling == SamplingParams(max_new_tokens=4)
        chance = np.random.default_rng(seed)
        self.calls.append((num_rollouts, seed, [p[0] for p in prompts]))
        return [self._tree(prompt[0], num_rollouts, chance) for prompt in prompts]

    def _tree(self, prompt: int, num_rollouts: int, chance: Rng) -> RolloutTree:
        right = chance.random(num_rollouts) < self.pass_rates[prompt]
        filler = chance.integers(1, 4, num_rollouts)
        drawn = [(RIGHT, int(f), END) if r else (int(f), END) for r, f in zip(right, filler, strict=True)]
        self.rollouts.setdefault(prompt, []).append(drawn)
        return tree_of(prompt, drawn)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError(f"collecting loads no weights, not {weights} of version {version}")


class CountingVerifier:
    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        self.asked[prompt.id, response] += 1
        correct = response.startswith(str(RIGHT))
        return Verdict(correct, 1.0 if correct else 0.0, response, "", 0.0)


def tree_of(prompt: int, drawn: Sequence[tuple[int, ...]]) -> RolloutTree:
    logprobs = [[-0.1 * token for token in r] for r in drawn]
    return RolloutTree.from_responses((prompt,), drawn, logprobs, [len(r) < 3 or r[1] < 3 for r in drawn])


def collector(
    engine: CoinEngine, *, pilot: int = 4, maximum: int = 64, mean: int = 12, per_step: int = 8, **changes: Any
) -> Collector:
    prompts = [Prompt(f"p{i}", str(i), (i,), "", "coins") for i in range(len(engine.pass_rates))]
    made = Collector(
        engine=engine,
        stream=PromptStream(prompts, seed=0),
        grader=Grader({"coins": CountingVerifier()}, lambda tokens: " ".join(map(str, tokens)), RewardShaping()),
        sampling=SamplingParams(max_new_tokens=4),
        rollouts_per_prompt=pilot,
        prompts_per_step=per_step,
        dynamic_sampling=True,
        max_tries=100,
        seed=0,
        adaptive=AdaptiveAllocation(maximum, mean),
    )
    return replace(made, **changes)


def collect(one: Collector, step: int) -> tuple[list[Group], list[Group], Batch]:
    """Return the groups of a step, those that wait afterwards, and everything that was sampled."""
    batch = one.next_batch(step)
    return batch.groups, list(one.state().carried), batch


def collected_once(rng: Rng, **settings: Any) -> tuple[CoinEngine, Collector, Batch, list[Group]]:
    """One step over prompts that are all different, many of them hard, some easy, some impossible."""
    pass_rates = np.where(rng.random(600) < 0.2, rng.integers(0, 2, 600), rng.beta(0.3, 1.5, 600))
    engine = CoinEngine(pass_rates.tolist())
    one = collector(engine, **settings)
    groups, surplus, batch = collect(one, 1)
    assert len({g.prompt.id for g in batch.sampled_groups}) == len(batch.sampled_groups)
    return engine, one, batch, groups + surplus


def test_a_group_holds_every_rollout_that_its_prompt_was_given(rng: Rng) -> None:
    engine, _, batch, kept = collected_once(rng, per_step=30)
    assert len(batch.sampled_groups) == len(engine.rollouts) == len(batch.sampled)
    num_calls = [len(engine.rollouts[g.prompt.token_ids[0]]) for g in batch.sampled_groups]
    assert 0 < sum(calls > 1 for calls in num_calls) == batch.summary()["groups_widened"] < len(num_calls)
    for group, verdicts in ((p.group, p.verdicts) for p in batch.sampled if p.group):
        calls = engine.rollouts[group.prompt.token_ids[0]]
        drawn = [rollout for call in calls for rollout in call]
        assert group.tree == tree_of(group.prompt.token_ids[0], drawn)
        correct = [
            done and r[0] == RIGHT for (r, _), done in zip(group.tree.responses(), group.tree.finished, strict=True)
        ]
        assert group.correct_L.tolist() == correct == [v.correct for v in verdicts]
        assert group.reward_L.tolist() == [float(c) for c in correct]
        for (response, _), done, verdict in zip(group.tree.responses(), group.tree.finished, verdicts, strict=True):
            assert verdict.extracted == (" ".join(map(str, response)) if done else None)
    assert kept == [g for g in batch.sampled_groups if 0 < g.num_correct < g.tree.num_rollouts]


def test_no_response_of_a_prompt_is_verified_twice(rng: Rng) -> None:
    _, one, batch, _ = collected_once(rng, per_step=30)
    verifier = one.grader.verifiers["coins"]
    assert isinstance(verifier, CountingVerifier)
    assert set(verifier.asked.values()) == {1}
    assert len(verifier.asked) == sum(int(g.tree.finished.sum()) for g in batch.sampled_groups)


def is_right(rollout: tuple[int, ...]) -> bool:
    return rollout[0] == RIGHT and rollout[1] < 3  # an answer that was cut off is not correct


def test_only_groups_with_one_outcome_are_widened_and_within_the_limits(rng: Rng) -> None:
    engine, _, batch, _ = collected_once(rng, per_step=30, maximum=48)
    rounds: list[list[tuple[int, int, list[int]]]] = []
    for call in engine.calls:
        if call[2][0] not in {p for r in rounds for c in r for p in c[2]}:
            rounds.append([])  # a pilot
        rounds[-1].append(call)
    assert sum(map(len, rounds)) == batch.rounds == len(engine.calls)
    assert len({seed for _, seed, _ in engine.calls}) == len(engine.calls)
    for (pilot, _, prompts), *later in rounds:
        assert pilot == 4
        spent = sum(size * len(members) for size, _, members in later)
        assert spent <= len(prompts) * (12 - 4)
        assert {p for _, _, members in later for p in members} <= set(prompts)
    for calls in engine.rollouts.values():
        for i in range(1, len(calls)):
            before = [is_right(r) for call in calls[:i] for r in call]
            assert len(set(before)) == 1
            assert len(calls[i]) <= len(before)
        assert sum(map(len, calls)) <= 48


def test_summary_counts_what_was_widened(rng: Rng) -> None:
    engine, _, batch, _ = collected_once(rng, per_step=20)
    sizes = {p: [len(c) for c in calls] for p, calls in engine.rollouts.items()}
    mixed = {p: len({is_right(r) for c in calls for r in c}) == 2 for p, calls in engine.rollouts.items()}
    widened = [p for p, s in sizes.items() if len(s) > 1]
    total = sum(sum(s) for s in sizes.values())
    expected = {
        "adaptive": True,
        "pilot_rollouts": 4,
        "groups": len(sizes),
        "groups_pilot_mixed": sum(len({is_right(r) for r in calls[0]}) == 2 for calls in engine.rollouts.values()),
        "groups_widened": len(widened),
        "groups_widened_mixed": sum(mixed[p] for p in widened),
        "groups_mixed": sum(mixed.values()),
        "samples": total,
        "samples_pilot": 4 * len(sizes),
        "samples_widening": total - 4 * len(sizes),
        "mean_rollouts": pytest.approx(total / len(sizes)),
        "max_rollouts": max(sum(s) for s in sizes.values()),
    }
    summary = batch.summary()
    assert {name: summary[name] for name in expected} == expected
    assert expected["groups_widened_mixed"] > 0
    json.dumps(summary)


def test_fixed_n_has_none_of_it(rng: Rng) -> None:
    engine, _, batch, _ = collected_once(rng, per_step=10, adaptive=None)
    assert {size for size, _, _ in engine.calls} == {4}
    assert not {"adaptive", "pilot_rollouts", "mean_rollouts", "groups_widened"} & set(batch.summary())


def test_a_step_that_lives_on_what_was_carried_has_a_summary(rng: Rng) -> None:
    engine, one, _, kept = collected_once(rng, per_step=8)
    calls = len(engine.calls)
    full = replace(one, prompts_per_step=len(kept))
    full.load_state(SourceState(carried=tuple(kept)))
    groups, _, batch = collect(full, 2)
    assert groups == kept
    assert len(engine.calls) == calls
    assert batch.summary()["mean_rollouts"] == batch.summary()["max_rollouts"] == 0


def test_as_many_groups_become_informative_as_the_pass_rates_say(rng: Rng) -> None:
    """With room in the budget a group stays uninformative only if `maximum` rollouts agree."""
    pass_rates = rng.choice([0.01, 0.03, 0.2, 0.9, 0.99], 500)
    engine = CoinEngine(pass_rates.tolist())
    one = collector(engine, mean=32, maximum=32, per_step=500, dynamic_sampling=False, seed=int(rng.integers(2**32)))
    _, _, batch = collect(one, 1)
    p = pass_rates * 2 / 3  # a third of the right answers is cut off
    chance_G = 1 - (1 - p) ** 32 - p**32
    mixed = sum(0 < g.num_correct < g.tree.num_rollouts for g in batch.sampled_groups)
    assert len(batch.sampled_groups) == 500
    assert abs(mixed - chance_G.sum()) < 6 * np.sqrt((chance_G * (1 - chance_G)).sum())
    sizes = np.array([g.tree.num_rollouts for g in batch.sampled_groups])
    assert set(sizes.tolist()) == {4, 8, 16, 32}


def test_share_of_correct_rollouts_is_biased_as_documented(rng: Rng) -> None:
    """E[k/N] = p (1 + sum over doublings of (1 - p)^n / 2) for a group that doubles until a success."""
    p, doublings = 0.03 * 2 / 3, (4, 8, 16)
    engine = CoinEngine([0.03] * 600)
    one = collector(engine, mean=32, maximum=32, per_step=600, dynamic_sampling=False, seed=int(rng.integers(2**32)))
    _, _, batch = collect(one, 1)
    fractions = [g.num_correct / g.tree.num_rollouts for g in batch.sampled_groups]
    expected = p * (1 + sum((1 - p) ** n for n in doublings) / 2)
    # Second moment: a block of m rollouts that ends at N = n + m (the pilot: n = 0), if nothing came before.
    second = sum(
        (1 - p) ** n * (m * p * (1 - p) + (m * p) ** 2) / (n + m) ** 2 for n, m in ((0, 4), (4, 4), (8, 8), (16, 16))
    )
    sigma = np.sqrt((second - expected**2) / 600)
    assert abs(np.mean(fractions) - expected) < 6 * sigma
    assert expected - p > 8 * sigma  # a fixed N would fail this test


def test_message_when_nothing_is_mixed_names_the_limits_to_raise() -> None:
    with pytest.raises(NoMixedGroupsError, match=r"no rollout was correct.*adaptive\.max_rollouts"):
        collect(collector(CoinEngine([0.0] * 10), max_tries=2), 1)


def config(**overrides: Any) -> TrainConfig:
    return make_config({}, overrides, "test")


def test_settings_of_adaptive_rollouts() -> None:
    given = {"adaptive.pilot_rollouts": 8, "adaptive.max_rollouts": 96}
    adaptive = config(**adaptive_keys(given))
    assert build_rollouts_per_prompt(adaptive) == (8, AdaptiveAllocation(max_rollouts=96, samples_per_prompt=24))
    assert adaptive.samples_per_step == 240
    assert make_config(parse_yaml(dump_yaml(adaptive), "dump"), {}, "dump") == adaptive
    fixed = config(rollouts_per_prompt=5, prompts_per_step=10, **given)  # the other keys have no effect
    assert build_rollouts_per_prompt(fixed) == (5, None)
    assert fixed.samples_per_step == 50
    assert config(rollouts_per_prompt=1e2).rollouts_per_prompt == 100
    assert type(config(rollouts_per_prompt=1e2).rollouts_per_prompt) is int
    assert config().rollouts_per_prompt == 512
    rule = {"optimizer.learning_rate": 1e-4, "optimizer.reference_batch": 60, "optimizer.mini_batches": 1}
    rates = [
        build_learner_settings(config(**c, **rule), (0,), TreeForward()).learning_rate
        for c in (adaptive_keys(given), {})
    ]
    assert rates[0] == pytest.approx(1e-4 * 2)


def adaptive_keys(given: dict[str, Any]) -> dict[str, Any]:
    return {"adaptive.enabled": True, "rollouts_per_prompt": 24, "prompts_per_step": 10, **given}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts_per_prompt": "adaptiv"}, "rollouts_per_prompt: .*whole number, not 'adaptiv'"),
        ({"rollouts_per_prompt": 1}, "rollouts_per_prompt: .*greater than or equal to 2, not 1"),
        ({"rollouts_per_prompt": True}, "rollouts_per_prompt: .*not True"),
        ({"rollouts_per_prompt": 2.5}, "rollouts_per_prompt: .*not 2.5"),
        ({"adaptive.pilot_rollouts": 1}, "adaptive.pilot_rollouts: .*greater than or equal to 2, not 1"),
        (
            {"adaptive.enabled": True, "rollouts_per_prompt": 64, "adaptive.pilot_rollouts": 64},
            "adaptive.pilot_rollouts = 64, rollouts_per_prompt = 64 and",
        ),
        ({"adaptive.enabled": True, "adaptive.max_rollouts": 511}, "adaptive.max_rollouts = 511 must ascend"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*$"):
        config(**settings)


STEPS, EVERY = 4, 2  # a run of 4 steps, and one that ends after 2 and goes on
ADAPTIVE = (
    *(s for s in SMALL if not s.startswith("--rollouts_per_prompt")),
    *("--adaptive.enabled=true", "--rollouts_per_prompt=10", "--adaptive.pilot_rollouts=4"),
    *("--adaptive.max_rollouts=32", f"--checkpoint_every={EVERY}", "--keep_checkpoints=1"),
)


@pytest.mark.slow
def test_a_run_that_is_resumed_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    for seed in range(20):
        reference, settings = tmp_path / f"reference-{seed}", (*ADAPTIVE, f"--seed={seed}")
        outcome = command("train", *settings, f"--steps={STEPS}", "--output_dir", reference)
        assert outcome.code == 0, outcome.err
        assert "N = adaptive 4..32 (on average at most 10) rollouts x 4 prompts" in outcome.said
        records = metrics_without_times(reference)
        if records[EVERY]["kept"]["carried"] and records[EVERY + 1]["sampling"].get("groups_widened_mixed"):
            break
    else:
        raise AssertionError("no seed carries groups over the checkpoint and widens after it")
    for record in records[1:]:
        assert record["sampling"]["adaptive"] is True
        assert record["sampling"]["samples"] <= 10 * record["sampling"]["groups"]
    run = tmp_path / "run"
    assert command("train", *settings, f"--steps={EVERY}", "--output_dir", run).code == 0
    assert command("resume", run, f"--steps={STEPS}").code == 0
    assert_same_run(run, reference)
