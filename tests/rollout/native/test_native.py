"""The native engine against Hugging Face: generate, a plain forward pass, and itself without any sharing."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.activity import Activity, Decoding
from brorl.errors import DivergedError
from brorl.model.kernels import kernels
from brorl.model.logprobs import NextToken
from brorl.model.tree_attention import HooksError
from brorl.model.tree_path import tree_logprobs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from engine_checks import EOS, assert_same_trees, ragged_prompts, room_for
from small_models import ARCHITECTURES, mostly_slow, plain_logprobs, rollouts, small_model

every_architecture = pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, "llama", "hooked"))


@every_architecture
def test_greedy_equals_generate(architecture: str, rng: np.random.Generator) -> None:
    model = small_model(architecture, seed=int(rng.integers(1 << 30)))
    prompts = ragged_prompts(rng, 8)
    trees = NativeEngine(model, EOS).sample(
        SampleTask(prompts, 3, SamplingParams(temperature=0, max_new_tokens=12), seed=0)
    )
    for prompt, tree in zip(prompts, trees, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        expected = tuple(out[0, len(prompt) :].tolist())
        assert tree.responses() == [(expected, 3)]
        assert tree.finished.tolist() == [expected[-1] == EOS]


@pytest.mark.parametrize("rows", mostly_slow([1, 15, 1000], 1000))
def test_memory_that_was_never_written_has_no_influence(
    rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory may hold anything. Here it holds NaN, and rows that waited come back to slots that grew meanwhile."""
    model = small_model(seed=int(rng.integers(1 << 30)))
    prompts, sampling = ragged_prompts(rng, 3), SamplingParams(max_new_tokens=20)
    expected = NativeEngine(model, EOS).sample(SampleTask(prompts, 12, sampling, seed=9))
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    engine = NativeEngine(model, EOS, memory_bytes=room_for(model, rows, 20, prompts))
    assert_same_trees(engine.sample(SampleTask(prompts, 12, sampling, seed=9)), expected)


@pytest.mark.parametrize("architecture", mostly_slow(["qwen2", "qwen3"], "qwen3"))
def test_log_probs_in_float32_are_those_of_the_model_in_float64(architecture: str, rng: np.random.Generator) -> None:
    """Over several blocks of the cache, forks and ends, prompts of different lengths, and with rows that wait."""
    model = small_model(architecture, seed=int(rng.integers(1 << 30)), dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    prompts, sampling = ragged_prompts(rng, 3), SamplingParams(max_new_tokens=40, temperature=0.8)
    for memory in (1 << 30, room_for(model, 20, 40, prompts)):
        trees = NativeEngine(model, EOS, memory).sample(SampleTask(prompts, 24, sampling, seed=4))
        assert max(tree.depth.max() for tree in trees) > 2 * 16
        with torch.no_grad():
            expected = tree_logprobs(exact, trees, next_token=NextToken(temperature=0.8))
        for tree, logprob in zip(trees, expected, strict=True):
            np.testing.assert_allclose(tree.logprob, logprob.numpy(), rtol=0, atol=2e-5)


def test_every_prefix_is_fed_once_however_many_rollouts_share_it(rng: np.random.Generator) -> None:
    model = small_model(seed=int(rng.integers(1 << 30)), scale=0.4)
    fed = []
    model.get_input_embeddings().register_forward_hook(lambda _m, args, _out: fed.append(args[0].numel()))
    engine = NativeEngine(model, EOS)
    fed.clear()  # the engine tries the hooks when it is made
    prompts = ragged_prompts(rng, 3)
    trees = engine.sample(SampleTask(prompts, 500, SamplingParams(temperature=0.5, max_new_tokens=10), seed=6))
    inner = sum(np.unique(t.parent[t.parent >= 0]).size for t in trees)
    assert sum(fed) == sum(map(len, prompts)) + inner
    assert inner < sum(t.num_sampled_tokens for t in trees) / 3


def test_the_model_is_left_as_it_was(rng: np.random.Generator) -> None:
    model = small_model(attention_dropout=0.3).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    prompts = ragged_prompts(rng, 2)
    trees = NativeEngine(model, EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=4), seed=0))
    assert model.training
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    again = NativeEngine(model.eval(), EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=4), seed=0))
    assert trees == again  # dropout did not touch the sampling


@pytest.mark.parametrize("rows", [5, 10_000])  # that fit into memory: with 5 of them others wait
def test_reports_follow_the_rollouts(rows: int, rng: np.random.Generator) -> None:
    """The last one has all rollouts, and the nodes of the trees; numbers never fall."""
    model = small_model("llama", seed=int(rng.integers(1 << 30)))
    prompts = ragged_prompts(rng, 6)
    reports: list[Activity] = []
    engine = NativeEngine(model, EOS, room_for(model, rows, 9, prompts), observe=reports.append)
    trees = engine.sample(SampleTask(prompts, 7, SamplingParams(max_new_tokens=9), seed=int(rng.integers(1 << 30))))
    assert {type(report) for report in reports} == {Decoding}
    nodes = sum(len(t.token) for t in trees)
    assert (reports[-1].finished, reports[-1].rollouts, reports[-1].tokens) == (6 * 7, 6 * 7, nodes)
    assert max(report.depth for report in reports) == max(int(t.length.max()) for t in trees)
    for before, after in pairwise(reports):
        assert before.finished <= after.finished
        assert before.tokens <= after.tokens
    if rows > 6 * 7:  # one wave: after a depth the rollouts that are no longer than it have ended
        lengths = [len(tokens) for t in trees for tokens, count in t.responses() for _ in range(count)]
        assert [r.finished for r in reports] == [sum(n <= r.depth for n in lengths) for r in reports]
    else:
        assert [r.depth for r in reports] != sorted(r.depth for r in reports)  # rows did wait


def test_an_observer_may_end_the_work_and_the_model_is_left_as_it_was(rng: np.random.Generator) -> None:
    model = small_model("llama", seed=int(rng.integers(1 << 30))).train()
    prompts = ragged_prompts(rng, 4)
    expected = NativeEngine(model, EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=6), seed=3))

    def stop(activity: Activity) -> None:
        if isinstance(activity, Decoding) and activity.depth == 2:
            raise ZeroDivisionError

    engine = NativeEngine(model, EOS, observe=stop)
    with pytest.raises(ZeroDivisionError):
        engine.sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=6), seed=3))
    assert model.training
    assert_same_trees(
        NativeEngine(model, EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=6), seed=3)), expected
    )


def test_load_weights_samples_with_the_new_weights(rng: np.random.Generator) -> None:
    old, new = small_model(seed=1), small_model(seed=2)
    prompts, sampling = ragged_prompts(rng, 2), SamplingParams(max_new_tokens=5)
    expected = NativeEngine(new, EOS).sample(SampleTask(prompts, 30, sampling, seed=0))
    engine = NativeEngine(old, EOS)
    assert engine.sample(SampleTask(prompts, 30, sampling, seed=0)) != expected
    engine.load_weights(new.named_parameters(), version=3)
    assert engine.version == 3
    assert engine.sample(SampleTask(prompts, 30, sampling, seed=0)) == expected


def test_no_prompts_give_no_trees() -> None:
    task = SampleTask([], 4, SamplingParams(max_new_tokens=3), seed=0)
    assert NativeEngine(small_model(), EOS).sample(task) == []


def test_a_sliding_window_is_allowed_until_it_bites_in_the_compiled_kernels(rng: np.random.Generator) -> None:
    """Context of the last fed token: prompt + max_new_tokens - 1. Results equal a plain forward pass."""
    model = small_model("mistral", sliding_window=16, seed=int(rng.integers(1 << 30)))
    engine, prompt = NativeEngine(model, 99), rng.integers(1, 17, 10).tolist()
    for max_new_tokens in (7, 20):
        (tree,) = engine.sample(SampleTask([prompt], 10, SamplingParams(max_new_tokens=max_new_tokens), seed=0))
        with torch.no_grad():
            plain = plain_logprobs(model, [prompt] * tree.num_responses, [r for r, _ in tree.responses()])
        for leaf, expected in zip(tree.leaf, plain, strict=True):
            np.testing.assert_allclose(tree.logprob[tree.path(int(leaf))], expected, rtol=1e-12, atol=1e-12)
        assert sum(1 for _ in rollouts(tree)) == 10
    if kernels() is not None:
        engine = NativeEngine(model.float(), 99)
        engine.sample(SampleTask([prompt], 10, SamplingParams(max_new_tokens=7), seed=0))
        with pytest.raises(HooksError, match=r"MistralAttention has a sliding window of 16 tokens.* 17"):
            engine.sample(SampleTask([prompt], 10, SamplingParams(max_new_tokens=8), seed=0))


def rope_model(rope_type: str, max_position_embeddings: int, **settings: object) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **settings}
    return small_model(rope_parameters=rope, max_position_embeddings=max_position_embeddings)


@pytest.mark.parametrize(
    ("rope_type", "settings"), [("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}), ("yarn", {})]
)
def test_rescaled_positions_equal_a_plain_forward_pass(
    rope_type: str, settings: dict, rng: np.random.Generator
) -> None:
    model = rope_model(rope_type, 64, original_max_position_embeddings=16, **settings)
    prompts = [rng.integers(1, 17, n).tolist() for n in (3, 30)]
    for tree in NativeEngine(model, EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=6), seed=0)):
        for leaf, (response, _) in zip(tree.leaf, tree.responses(), strict=True):
            with torch.no_grad():
                (expected,) = plain_logprobs(model, [tree.prompt_ids], [response])
            np.testing.assert_allclose(tree.logprob[tree.path(int(leaf))], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_are_refused(rope_type: str, rng: np.random.Generator) -> None:
    """Beyond the original length these rescale by the longest position of the batch, for all its prompts alike."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    model = rope_model(rope_type, 16 if rope_type == "dynamic" else 64, **(factors if rope_type == "longrope" else {}))
    prompts = [rng.integers(1, 17, n).tolist() for n in (3, 30)]
    with pytest.raises(HooksError, match=rope_type):
        NativeEngine(model, EOS).sample(SampleTask(prompts, 5, SamplingParams(max_new_tokens=6), seed=0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_diverged_is_an_error_that_names_the_token(value: float) -> None:
    model = small_model("llama", dtype=torch.float32)
    engine = NativeEngine(model, (EOS,))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights["model.norm.weight"][0] = value
    engine.load_weights(weights.items(), version=1)
    with pytest.raises(DivergedError, match=r"the logits of token 1 of a response .* earlier checkpoint"):
        engine.sample(SampleTask([[5, 6]], 8, SamplingParams(max_new_tokens=4), seed=0))
