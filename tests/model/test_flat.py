"""The flat path: any causal LM is sampled, scored and differentiated exactly, and agrees with the tree path."""

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from architectures import END, EXACT, GROUPED, HYBRIDS, REFUSED, tiny
from brorl.errors import UserError
from brorl.model.chunks import num_tree_tokens
from brorl.model.context_limit import attention_limit, carries_state, position_limit
from brorl.model.flat_path import (
    CacheError,
    FlatForward,
    ModelCache,
    flat_chunk_logprobs,
    num_flat_tokens,
    split_into_rows,
)
from brorl.model.forward import ForwardChoice, check_packed, choose_forward
from brorl.model.logprobs import by_tree
from brorl.model.tree_attention import HooksError
from brorl.model.tree_path import TreeForward, tree_logprobs
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams
from brorl.tree import RolloutTree
from engine_checks import ragged_prompts
from small_models import flattened_logprobs, mostly_slow, random_tree, rollouts, small_model

FLAT = FlatForward("a test")


def flat_logprobs(model: PreTrainedModel, trees: list[RolloutTree], **options: Any) -> list[torch.Tensor]:
    return by_tree(list(flat_chunk_logprobs(model, trees, **options)), trees)


@pytest.mark.parametrize("model_type", mostly_slow(["llama", "qwen3_moe", "deepseek_v3", "gemma2"]))
def test_both_paths_draw_the_same_rollouts(model_type: str, rng: np.random.Generator) -> None:
    """With plenty of memory, and with room for a few rows."""
    model = tiny(model_type, EXACT[model_type], torch.float64)
    sampling = SamplingParams(0.9, 0.95, max_new_tokens=6)
    prompts, seed = ragged_prompts(rng, 3), int(rng.integers(1 << 60))
    expected = NativeEngine(model, END).sample(SampleTask(prompts, 32, sampling, seed))
    for memory_bytes in (1 << 30, 40_000):
        engine = NativeEngine(model, END, memory_bytes, forward=choose_forward(model, "flat"))
        for tree, other in zip(engine.sample(SampleTask(prompts, 32, sampling, seed)), expected, strict=True):
            assert tree.responses() == other.responses()
            np.testing.assert_allclose(tree.logprob, other.logprob, rtol=1e-5, atol=1e-5)


def test_rows_hold_every_response_once_within_the_limit(rng: np.random.Generator) -> None:
    trees = [random_tree(rng, num_rollouts=int(rng.integers(1, 30))) for _ in range(4)]
    limit = int(rng.integers(1, 200))
    chunks = list(split_into_rows(trees, limit))
    assert [row for chunk in chunks for row in chunk] == [
        (index, leaf) for index, tree in enumerate(trees) for leaf in range(tree.num_responses)
    ]
    for chunk in chunks:
        longest = max(len(trees[tree].prompt_ids) + int(trees[tree].length[leaf]) - 1 for tree, leaf in chunk)
        assert len(chunk) == 1 or len(chunk) * longest <= limit


def test_the_tokens_of_both_paths(rng: np.random.Generator) -> None:
    tree = RolloutTree.from_responses([1, 2, 3], [[4, 5, 0], [4, 5, 0], [4, 6, 0], [0]])
    assert num_flat_tokens([tree]) == (3 + 2) + (3 + 2) + 3
    assert num_tree_tokens([tree]) == 3 + 3  # the prompt; 4, 5 and 6
    assert "has 13 tokens; with tree attention it would have 6 (2.2 times fewer)" in FLAT.cost_line([tree])
    assert TreeForward().cost_line([tree]) is None
    trees = [random_tree(rng) for _ in range(5)]
    assert num_flat_tokens(trees) >= num_tree_tokens(trees)


def test_a_window_that_bites_needs_the_flat_path() -> None:
    model = tiny("mistral", {**GROUPED, "sliding_window": 16})
    assert isinstance(choose_forward(model, context=16), TreeForward)
    wide = choose_forward(model, context=17)
    assert isinstance(wide, FlatForward)
    assert wide.reason == "its sliding window has 16 tokens, and a context 17"
    everything = tiny("mistral", {**GROUPED, "sliding_window": None})
    assert isinstance(choose_forward(everything, context=10**6), TreeForward)


@pytest.mark.parametrize(("choice", "kind"), [("flat", FlatForward), ("auto", TreeForward), ("tree", TreeForward)])
def test_positions_that_depend_on_the_batch_are_refused(choice: ForwardChoice, kind: type) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = small_model(rope_parameters=rope, max_position_embeddings=32)
    assert isinstance(choose_forward(model, choice, 32), kind)
    message = (
        r"scales its positions \(dynamic\) by the longest row of a batch beyond 32 tokens, and a context has up to 33"
    )
    with pytest.raises(UserError, match=rf"{message}; lower sampling\.max_new_tokens or data\.max_prompt_tokens"):
        choose_forward(model, choice, 33)


LLAMA4 = {
    **GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"], "attn_temperature_tuning": False,
}  # fmt: skip


@pytest.mark.parametrize("scaled", mostly_slow([True, False]))
def test_chunked_attention_is_the_models_own_beyond_its_chunk(scaled: bool, rng: np.random.Generator) -> None:
    """Against the flattened batch: sampling over the end of a chunk, from prompts within it and beyond, and scoring.

    A layer without rotations that scales its queries does so by their place in the forward pass.
    """
    no_rotation = {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 4} if scaled else {}
    model = tiny("llama4_text", {**LLAMA4, **no_rotation})
    assert isinstance(choose_forward(model, context=16), FlatForward if scaled else TreeForward)
    forward = choose_forward(model, context=35)
    assert isinstance(forward, FlatForward)
    assert forward.reason == "its chunk of attention has 16 tokens, and a context 35"
    prompts = [rng.integers(1, 17, n).tolist() for n in (14, 3, 28)]
    engine = NativeEngine(model, END, forward=forward)
    trees = engine.sample(SampleTask(prompts, 6, SamplingParams(max_new_tokens=7), seed=int(rng.integers(1 << 60))))
    for tree, rows, scored in zip(trees, flattened_logprobs(model, trees), flat_logprobs(model, trees), strict=True):
        for (_, path), expected in zip(rollouts(tree), rows, strict=True):
            np.testing.assert_allclose(tree.logprob[path], expected.detach(), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(scored.detach()[path], expected.detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(HooksError, match="Llama4ForCausalLM has a chunk of attention of 16 tokens"):
        check_packed(model, TreeForward(packed=True))
    if not scaled:
        with pytest.raises(HooksError, match="has a chunk of attention of 16 tokens, but this context has"):
            tree_logprobs(model, trees)


def test_longrope_is_refused_beyond_the_length_where_it_depends_on_the_batch(rng: np.random.Generator) -> None:
    """The log-probs of a row of 15 tokens change beside a row of 20, and both paths refuse contexts of that length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    model = tiny("phi3", {**GROUPED, **lengths, "rope_parameters": rope})
    short, long = (rng.integers(1, 17, n) for n in (15, 20))
    rows = torch.from_numpy(np.stack([np.pad(short, (0, 5)), long]))
    alone, beside = (model(ids, use_cache=False).logits[0, :15] for ids in (rows[:1, :15], rows))
    assert not torch.allclose(alone, beside, rtol=1e-2, atol=1e-2)
    assert isinstance(choose_forward(model, context=16), TreeForward)
    for choice in ("auto", "tree", "flat"):
        with pytest.raises(
            UserError, match=r"scales its positions \(longrope\) .* beyond 16 tokens, and a context has"
        ):
            choose_forward(model, choice, 17)


@pytest.mark.parametrize("key", ["sliding_window", "attention_chunk_size", "index_topk", "window_size"])
def test_every_span_of_attention_in_a_config_is_a_limit(key: str, rng: np.random.Generator) -> None:
    tokens = int(rng.integers(2, 10**6))
    span = attention_limit(PreTrainedConfig(**{key: tokens, "max_position_embeddings": 10**6}))
    assert span is not None
    assert span.tokens == tokens
    kinds = ["full_attention", "sliding_attention"]
    both = PreTrainedConfig(sliding_window=tokens, attention_chunk_size=1, layer_types=kinds, num_hidden_layers=2)
    assert attention_limit(both) == ("sliding window", tokens)
    both.layer_types = ["full_attention"] * 2
    assert attention_limit(both) is None


def test_rotations_of_each_type_of_layer_are_read(rng: np.random.Generator) -> None:
    short = int(rng.integers(2, 1000))
    plain = {"rope_type": "default", "rope_theta": 1e4}
    scaled = {"rope_type": "longrope", "original_max_position_embeddings": short, "rope_theta": 1e4}
    config = PreTrainedConfig(rope_parameters={"sliding_attention": plain, "full_attention": scaled})
    assert position_limit(config) == ("longrope", short)
    assert position_limit(PreTrainedConfig(rope_parameters=plain)) is None


def test_a_cache_that_is_wrong_beyond_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets one token too many; within the window it is right."""
    model = tiny("mistral", {**GROUPED, "sliding_window": 16})
    update = DynamicSlidingWindowLayer.update

    def forgetful(self: DynamicSlidingWindowLayer, *arguments: Any, **options: Any) -> Any:
        keys, values = update(self, *arguments, **options)
        if self.get_seq_length() >= 16:
            self.values = self.values * 0.5
        return keys, values

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", forgetful)
    assert isinstance(choose_forward(model, "flat", 16), FlatForward)
    with pytest.raises(CacheError, match="its logits change when it decodes with its cache after 14 tokens"):
        choose_forward(model, "flat", 17)


def test_a_state_beside_attention_needs_the_flat_path_however_small_it_is() -> None:
    """Its part in the logits is below the tolerance of the check of tree attention, and packed passes refuse it too."""
    model = tiny("falcon_h1", HYBRIDS["falcon_h1"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mamba.out_proj" in name:
                weight *= 1e-5
    forward = choose_forward(model)
    assert isinstance(forward, FlatForward)
    assert forward.reason.startswith(
        "FalconH1ForCausalLM cannot be hooked: its layers carry a state from token to token ("
    )
    with pytest.raises(HooksError, match="layers of FalconH1ForCausalLM carry a state from token to token"):
        check_packed(model, TreeForward(packed=True))


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_layers_with_states_are_read_from_the_config(model_type: str) -> None:
    assert carries_state(tiny(model_type, HYBRIDS[model_type]).config)


@pytest.mark.slow
def test_layers_of_attention_carry_no_state() -> None:
    assert not any(carries_state(tiny(model_type, settings).config) for model_type, settings in EXACT.items())


def test_the_choice_of_the_path() -> None:
    llama, mamba = tiny("llama", GROUPED), tiny("mamba", REFUSED["mamba"][0])
    assert choose_forward(llama, "flat") == FlatForward("engine.forward: flat")
    with pytest.raises(HooksError, match=r"set engine\.forward: auto"):
        choose_forward(mamba, "tree")
    with pytest.raises(HooksError):
        NativeEngine(mamba, END)


def test_a_model_whose_cache_is_wrong_is_refused(rng: np.random.Generator) -> None:
    model = tiny("bloom", REFUSED["bloom"][0])
    forward = model.forward

    def forgetful(**arguments: object) -> object:
        output = forward(**arguments)
        if arguments.get("past_key_values") is not None or arguments.get("cache") is not None:
            output.logits = output.logits + float(rng.uniform(1, 2)) * torch.arange(17)
        return output

    model.forward = forgetful
    model.forward.__signature__ = signature(forward)
    with pytest.raises(CacheError, match=r"BloomForCausalLM cannot take the flat path: its logits change when it dec"):
        choose_forward(model)


def test_a_model_without_a_cache_is_refused() -> None:
    model = tiny("rwkv", {"hidden_size": 32, "num_hidden_layers": 2})
    with pytest.raises(CacheError, match="cannot take the flat path: its forward pass takes no cache; choose another"):
        choose_forward(model)


def test_the_memory_of_a_cache_is_that_of_its_tensors(rng: np.random.Generator) -> None:
    model = tiny("llama", GROUPED)
    rows, length = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    cache = ModelCache(model, torch.from_numpy(rng.integers(1, 17, (rows, length))))
    assert cache.num_bytes >= 2 * 2 * rows * 2 * length * 8 * 4  # layers, keys and values, heads, dimension, float32
    assert cache.num_bytes < 2 * (2 * 2 * rows * 2 * length * 8 * 4)
