"""Every architecture is either refused by the check of hooks, or sampled, scored and differentiated exactly."""

import numpy as np
import pytest
import torch

from architectures import EXACT, GROUPED, HEADS_OF_8, HYBRIDS, PATHS, REFUSED, tiny
from brorl.errors import UserError
from brorl.model.flat_path import CacheError, FlatForward
from brorl.model.forward import check_hooks, check_model_cache, check_sliding_window, choose_forward
from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.tree_attention import HooksError, KVShape, PromptContext, kv_shapes
from brorl.model.tree_path import TreeForward
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.slot_attention import SlotCache
from engine_checks import ragged_prompts
from path_checks import assert_exact, assert_greedy_equals_generate
from small_models import mostly_slow


@pytest.mark.parametrize("name", mostly_slow(PATHS, "llama", "gpt2", "bloom without hooks", "mamba without hooks"))
def test_every_model_is_sampled_and_differentiated_exactly(name: str, rng: np.random.Generator) -> None:
    """On the chosen path: models that pass the check of hooks, and models that go through their own forward pass."""
    model_type, settings, has_hooks = PATHS[name]
    model = tiny(model_type, settings, torch.float64)
    forward = choose_forward(model)
    assert isinstance(forward, TreeForward if has_hooks else FlatForward)
    # Some models compute norms, routers, states or rotations in float32, whatever their dtype. Qwen3-Next and Qwen3.5
    # have two algorithms for states besides, one for a token and one for a sequence: up to 4e-4 in 269 trials.
    of_two = model_type in ("qwen3_next", "qwen3_5_text")
    assert_exact(model, forward, rng, 2e-3 if of_two else 1e-5 if has_hooks else 1e-4)


OWN_SHAPES = ["deepseek_v2", "deepseek_v3", "jetmoe", "gemma4_text", "smollm3"]
OWN_CACHES = [f"{name} without hooks" for name in [*HYBRIDS, "mamba", "gpt_oss", "mistral", "bloom"]]


@pytest.mark.parametrize(
    "name", mostly_slow([*OWN_SHAPES, *OWN_CACHES], "jetmoe", "mamba without hooks", "bloom without hooks")
)
def test_greedy_equals_generate(name: str, rng: np.random.Generator) -> None:
    """With keys, values or layers of unusual shapes, and with the model's own cache."""
    model_type, settings, _ = PATHS[name]
    model = tiny(model_type, settings)
    assert_greedy_equals_generate(model, choose_forward(model), [*ragged_prompts(rng, 3), [*range(1, 13)]])


def test_shapes_of_keys_and_values() -> None:
    latent, repeated, mixed = (tiny(name, EXACT[name]) for name in ("deepseek_v3", "jetmoe", "gemma4_text"))
    assert list(kv_shapes(latent)) == [KVShape(4, 8 + 4, 6)] * 2
    assert list(kv_shapes(repeated)) == [KVShape(2 * 2, 8, 8)] * 2  # as often as a token has experts
    assert list(kv_shapes(mixed)) == [KVShape(2, 8, 8), KVShape(2, 16, 16)]
    assert KVShape(4, 12, 6).size == 4 * 12 + 4 * 6


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3", "qwen3_moe", "gemma4_text"])
def test_memory_is_planned_with_the_shapes_that_decoding_has(model_type: str) -> None:
    """The predicted keys and values of rows, found without weights, are what the engine reserves for them."""
    model = tiny(model_type, EXACT[model_type])
    rows, length = 50, 16

    def planned(max_new_tokens: int) -> int:  # prompts so long that what else changes with the length does not count
        settings = MemorySettings("float32", 1 << 40, nodes_per_pass=64)
        return predict_memory(model.config, settings, Workload(100, max_new_tokens, num_rows=rows)).sampling.num_bytes

    shapes = kv_shapes(model)
    cache = SlotCache(model, shapes, RowMemory.of(model, shapes, 1 << 40, rows, length))
    cache.start(0)
    reserved = sum(store.nbytes for store in cache._stores)
    assert planned(2 * length) - planned(length) == reserved


def test_memory_of_the_flat_path_is_planned_with_the_heads_of_keys_and_values() -> None:
    model = tiny("qwen3", EXACT["qwen3"])
    rows, length = 50, 16
    settings = MemorySettings("float32", 1 << 40, nodes_per_pass=64, forward="flat")
    shorter, longer = (
        predict_memory(model.config, settings, Workload(100, tokens, num_rows=rows)).sampling.num_bytes
        for tokens in (length, 2 * length)
    )
    assert longer - shorter == rows * length * sum(kv.size for kv in kv_shapes(model)) * 4


@pytest.mark.parametrize("model_type", REFUSED)
def test_architectures_that_are_refused_by_name(model_type: str) -> None:
    settings, reason = REFUSED[model_type]
    model = tiny(model_type, settings)
    model.train()
    implementation = model.config._attn_implementation
    with pytest.raises(HooksError, match=reason) as caught:
        check_hooks(model)
    assert model_type.replace("_", "") in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert model.training
    assert model.config._attn_implementation == implementation


def test_a_model_without_attention_is_refused_before_its_weights_are_read() -> None:
    config = tiny("mamba", REFUSED["mamba"][0]).config
    tree, flat = (
        MemorySettings("float32", 1 << 30, nodes_per_pass=64, forward=forward) for forward in ("tree", "auto")
    )
    with pytest.raises(
        HooksError, match="MambaForCausalLM cannot be hooked: its layers carry a state from token to token"
    ):
        predict_memory(config, tree, Workload())
    assert predict_memory(config, flat, Workload()).total_bytes > 1 << 30


def test_a_model_that_ignores_positions_is_refused() -> None:
    """One sequence from position 0 looks right with any positions; two prompts in one row do not."""
    model = tiny("llama", GROUPED)
    forward = model.model.forward

    def counting_from_zero(**arguments: object) -> object:
        return forward(**{**arguments, "position_ids": None})

    model.model.forward = counting_from_zero
    with pytest.raises(HooksError, match="log-probs change"):
        check_hooks(model)


def test_damaged_weights_are_named_as_such() -> None:
    model = tiny("llama", GROUPED)
    with torch.no_grad():
        model.lm_head.weight[3, 4] = float("nan")
    for check in (check_hooks, check_model_cache, choose_forward):
        with pytest.raises(UserError, match="LlamaForCausalLM gives logits that are not finite") as raised:
            check(model)
        assert not isinstance(raised.value, HooksError | CacheError)  # no other path is tried


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_a_prompt_beyond_a_window_is_checked(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type, {**HEADS_OF_8, "sliding_window": 16}, torch.float64)
    check_sliding_window(model)
    monkeypatch.setattr(PromptContext, "_mask", lambda *_: None)
    with pytest.raises(HooksError, match="its logits change beyond its sliding window"):
        check_sliding_window(model)


def test_the_check_of_a_cache_takes_few_logits() -> None:
    """A few positions are enough: logits of a prompt beyond a window would take gigabytes with a large vocabulary."""
    model = tiny("mistral", {**GROUPED, "sliding_window": 16})
    positions = []
    model.lm_head.register_forward_hook(lambda *inputs_and_output: positions.append(inputs_and_output[2].shape[1]))
    check_model_cache(model, context=100)
    assert len(positions) == 3 * (
        1 + 1 + 4
    )  # prompts of three lengths: all at once, then with the cache token by token
    assert max(positions) == 5
