"""Live diagnostics against plain loops, plain transformers, and runs that do without them."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import brorl.training.diagnostics as diagnostics_module
from brorl.algorithms.groups import Group
from brorl.algorithms.settings import RewardShaping
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.runs.step_record import StepRecord, to_json
from brorl.sampling import SamplingParams
from brorl.training.coverage import leaving_mass, measure_coverage, unsampled_correct_at
from brorl.training.diagnostics import Diagnostics, coverage_record
from brorl.training.learner import TreeLearner
from brorl.training.settings import DiagnosticsSettings
from brorl.tree import RolloutTree
from brorl.verdict import Verdict
from brorl.verification.grade import Grader
from exact_model import ExactModel
from learner_support import learn
from recipes import recipe
from run_support import SMALL, command, metrics_without_times
from small_models import plain_logprobs, small_model

EOS, TEMPERATURE = 0, 0.8
SETTINGS = recipe(learning_rate=3e-2, temperature=TEMPERATURE, max_new_tokens=4)


class LengthVerifier:
    """Calls a response of an even number of characters correct."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:  # noqa: ARG002
        right = len(response) % 2 == 0
        return Verdict(right, float(right), None, "correct" if right else "odd", 0.0)


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + t) for t in tokens)


def group_of(tree: RolloutTree, correct_L: np.ndarray, name: str = "p") -> Group:
    return Group(Prompt(name, "text", tree.prompt_ids, "ref", "letters"), tree, correct_L, correct_L.astype(float))


def groups_of(rng: np.random.Generator, sizes: Sequence[int]) -> list[Group]:
    """Groups drawn from exact models, some responses of each called correct."""
    groups = []
    for i, size in enumerate(sizes):
        model = ExactModel.random(rng, vocabulary=4, max_length=3, concentration=0.6)
        responses, p = zip(*model.responses(), strict=True)
        tree = model.tree([responses[j] for j in rng.choice(len(p), size, p=p)])
        groups.append(group_of(tree, rng.random(tree.num_responses) < 0.5, f"p{i}"))
    return groups


def diagnostics(model: PreTrainedModel, every: int = 5, rollouts: int = 9, **changes: Any) -> Diagnostics:
    engine = NativeEngine(model, EOS)
    checks = DiagnosticsSettings(held_out_check_every=every, held_out_rollouts=rollouts)
    config = recipe(SETTINGS, diagnostics=checks, seed=3, **changes)
    grader = Grader({"letters": LengthVerifier()}, decode, RewardShaping())
    return Diagnostics(config, engine, TreeLearner(model, config), grader)


def sampled_groups(model: PreTrainedModel, rng: np.random.Generator, num_prompts: int = 3) -> list[Group]:
    prompts = [rng.integers(1, 17, rng.integers(1, 6)).tolist() for _ in range(num_prompts)]
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=4)
    trees = NativeEngine(model, EOS).sample(SampleTask(prompts, 12, sampling, seed=1))
    return [group_of(t, np.array([len(r) % 2 == 0 for r, _ in t.responses()]), f"p{i}") for i, t in enumerate(trees)]


# --- coverage ---------------------------------------------------------------------------------------------------------


def test_pooled_numbers_are_means_over_the_prompts(rng: np.random.Generator) -> None:
    groups = groups_of(rng, [20, 20, 20])
    record = coverage_record(groups)
    measured = [measure_coverage(g.tree, g.correct_L) for g in groups]
    pooled, prompts = record.pooled, record.prompts
    names = ("p_pos", "p_neg", "unsampled", "a_2", "b_2", "s_r", "entropy", "duplicate_rate")
    for name in (*names, "q_pos", "unsampled_correct", "u_pos_2", "u_neg_2"):
        assert getattr(pooled, name) == pytest.approx(np.mean([getattr(m, name) for m in measured]), rel=1e-12), name
    for name in (*names[:-1], "q_pos", "unsampled_correct", "u_pos_2", "u_neg_2", "num_rollouts", "num_distinct"):
        assert getattr(prompts, name) == pytest.approx([getattr(m, name) for m in measured], rel=1e-3), name
    assert [*prompts.id] == ["p0", "p1", "p2"]
    assert [*prompts.num_correct] == [g.num_correct for g in groups]
    for n, value in (pooled.unsampled_correct_at or {}).items():
        value_of_groups = [unsampled_correct_at(g.tree, g.correct_L, [n])[0] for g in groups]
        assert value == pytest.approx(np.mean(value_of_groups), rel=1e-12)
        assert prompts.unsampled_correct_at[n] == pytest.approx(value_of_groups, rel=1e-3)
    for last, value in pooled.escape_probability_at.items():
        value_of_groups = [leaving_mass(g.tree)[last // 2 : last].sum() for g in groups]
        assert value == pytest.approx(np.mean(value_of_groups), abs=1e-12)
        assert prompts.escape_probability_at[last] == pytest.approx(value_of_groups, rel=1e-3)
    assert json.loads(json.dumps(to_json(StepRecord(step=1, coverage=record))))["coverage"]["prompts"]["p_pos"] == [
        *prompts.p_pos
    ]


def test_coupling_is_the_third_term_of_theorem_1_over_the_first_two(rng: np.random.Generator) -> None:
    groups = groups_of(rng, [25, 25])
    first_two = third = 0.0
    for group in groups:
        m = measure_coverage(group.tree, group.correct_L)
        x = group.num_correct / 25
        r_c, r_w, q = 1 - x, -x, min(m.q_pos, 1)
        s_r = r_c * m.p_pos + r_w * m.p_neg
        first_two += (r_c - s_r) * (1 - q) * m.a_2 + (s_r - r_w) * q * m.b_2
        third += s_r * (q * m.u_neg_2 - (1 - q) * m.u_pos_2)
    assert coverage_record(groups).pooled.coupling == pytest.approx(third / first_two)


def test_informative_share_at_smaller_n_is_the_mean_over_all_subsets(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics_module, "SUBSET_SIZES", (2, 3, 5, 64))
    groups = groups_of(rng, [7, 7, 7])
    found = coverage_record(groups).pooled.mixed_fraction_at
    assert list(found) == [2, 3, 5, 7]
    for n, fraction in found.items():
        is_mixed = []
        for group in groups:
            outcomes = np.repeat(group.correct_L, group.tree.leaf_count)
            is_mixed += [0 < sum(subset) < n for subset in combinations(outcomes.tolist(), n)]
        assert fraction == pytest.approx(np.mean(is_mixed), abs=1e-12)


def test_where_all_responses_are_unique_nothing_is_estimated(rng: np.random.Generator) -> None:
    sequences = [(1, *rng.permutation(np.arange(2, 12)).tolist(), EOS) for _ in range(5)]
    assert len(set(sequences)) == 5
    unique = RolloutTree.from_responses((1,), sequences, [[-3.0] * 12] * 5)
    group = group_of(unique, np.arange(5) < 2)
    pooled = coverage_record([group, group]).pooled
    assert pooled.groups_all_unique == 2
    names = ("q_pos", "unsampled_correct", "u_pos_2", "u_neg_2", "coupling", "unsampled_correct_at")
    assert [getattr(pooled, n) for n in names] == [None] * 6
    assert pooled.unsampled == pytest.approx(1)
    mixed = coverage_record([group, *groups_of(rng, [60])]).pooled
    assert mixed.groups_all_unique == 1
    assert all(getattr(mixed, n) is not None for n in names)


# --- held-out check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_the_held_out_check_equals_plain_transformers_before_and_after_the_update(
    rng: np.random.Generator, recompute: bool
) -> None:
    model = small_model(seed=int(rng.integers(1000)))
    measure = diagnostics(model, old_logprobs="recompute" if recompute else "engine")
    groups = sampled_groups(model, rng)
    held_out = measure.hold_out(5, groups)
    assert [g.tree.num_rollouts for g in held_out] == [9, 9, 9]
    responses = [[r for r, _ in g.tree.responses()] for g in held_out]

    def logprobs() -> list[list[float]]:
        with torch.no_grad():
            return [
                [float(lp.sum()) for lp in plain_logprobs(model, [g.prompt.token_ids] * len(rs), rs, TEMPERATURE)]
                for g, rs in zip(held_out, responses, strict=True)
            ]

    before = logprobs()
    learn(measure.learner, groups, [rng.normal(size=g.tree.num_responses) for g in groups], seed=0)
    after = logprobs()
    _, check = measure.record(groups, groups, held_out)
    assert check is not None

    means = []
    for seen, group, old, new in zip(groups, held_out, before, after, strict=True):
        b = (seen.num_correct + 0.5) / 13
        terms = [
            (len(r) % 2 == 0 and bool(done)) - b
            for (r, _), done in zip(group.tree.responses(), group.tree.finished, strict=True)
        ]
        values = [t * (np.exp(n - o) - 1) for t, o, n in zip(terms, old, new, strict=True)]
        means.append(np.average(values, weights=group.tree.leaf_count))
    assert check.change == pytest.approx(np.mean(means), rel=1e-7)
    assert abs(check.change) > 1e-4
    assert check.num_rollouts == 27


def test_held_out_rollouts_are_fresh(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1000)), scale=0.1)
    groups = sampled_groups(model, rng)
    held_out = diagnostics(model, rollouts=12).hold_out(5, groups)
    assert [g.prompt for g in held_out] == [g.prompt for g in groups]
    assert any(a.tree != b.tree for a, b in zip(held_out, groups, strict=True))
    later = diagnostics(model, rollouts=12).hold_out(10, groups)
    assert any(a.tree != b.tree for a, b in zip(held_out, later, strict=True))


def test_held_out_checks_come_when_they_are_due(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1000)))
    groups = sampled_groups(model, rng)
    measure = diagnostics(model, rollouts=2)
    due = [step for step in range(1, 16) if measure.hold_out(step, groups)]
    assert due == [5, 10, 15]
    assert not diagnostics(model, every=0).hold_out(5, groups)


@pytest.mark.parametrize("kept", [{"top_p": 0.9, "top_k": 3}, {"top_k": 2}])
def test_the_diagnostics_are_those_of_the_policy_among_the_kept_tokens(
    kept: dict[str, Any], rng: np.random.Generator
) -> None:
    """Sampled many times, 2 tokens miss nothing; before an update the held-out weights are 1."""
    model = small_model(seed=int(rng.integers(1000)))
    measure = diagnostics(model, max_new_tokens=2, **kept)
    sampling = measure.config.sampling.params
    trees = NativeEngine(model, EOS).sample(SampleTask([[1, 2], [3]], 3000, sampling, seed=int(rng.integers(1 << 60))))
    groups = [group_of(t, np.array([len(r) % 2 == 0 for r, _ in t.responses()]), f"p{i}") for i, t in enumerate(trees)]
    coverage, check = measure.record(groups, groups, measure.hold_out(5, groups))
    assert coverage is not None
    assert check is not None
    assert coverage.pooled.unsampled < 0.01
    accuracy = np.mean([g.num_correct / 3000 for g in groups])
    assert coverage.pooled.p_pos == pytest.approx(accuracy, abs=0.05)
    assert check.change == pytest.approx(0, abs=1e-9)
    assert check.effective_fraction == pytest.approx(1)


@pytest.mark.slow
def test_training_is_the_same_bit_by_bit_whether_it_is_certified_or_not(tmp_path: Path) -> None:
    runs = []
    for every in (0, 1):
        path = tmp_path / str(every)
        outcome = command(
            "train", *SMALL, "--steps=3", f"--diagnostics.held_out_check_every={every}", "--output_dir", path
        )
        assert outcome.code == 0, outcome.err
        records = metrics_without_times(path)
        assert [r["step"] for r in records if "held_out_check" in r] == ([1, 2, 3] if every else [])
        assert all("coverage" in r for r in records[1:])
        runs.append([{k: v for k, v in r.items() if k != "held_out_check"} for r in records])
        runs.append((path / "checkpoints" / "step-000003" / "model.safetensors").read_bytes())
    assert runs[0] == runs[2]
    assert runs[1] == runs[3]
