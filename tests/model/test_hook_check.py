"""Every architecture is either refused by the check of hooks, or sampled, scored and differentiated exactly."""

import warnings

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from brorl.errors import UserError
from brorl.model.flat_path import CacheError, FlatForward
from brorl.model.forward import check_hooks, check_own_cache, check_window, choose_forward
from brorl.model.memory_prediction import MemorySettings, Workload, predict_memory
from brorl.model.tree_attention import HooksError, KVShape, PromptContext, kv_shapes
from brorl.model.tree_path import TreeForward
from brorl.rollout.native.decoder import RowMemory
from brorl.rollout.native.slot_attention import SlotCache
from path_checks import assert_exact, assert_greedy_equals_generate
from small_models import mostly_slow

END = 0
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # keys of 8 + 4 numbers, values of 6
    **SIZES, "intermediate_size": 48, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, **EXPERTS,
}  # fmt: skip
JETMOE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 48,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
EXACT = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 6},
    "mistral": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {**SIZES, "intermediate_size": 48},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": HEADS_OF_8,
    "gemma2": {**HEADS_OF_8, "attn_logit_softcapping": None},
    "gemma3_text": HEADS_OF_8,
    "gemma4_text": {  # heads of 8 and of 16, layer by layer
        **HEADS_OF_8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 17,
    },
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "qwen3_moe": {**GROUPED, "num_experts": 4, **EXPERTS},
    "deepseek_v2": {**LATENT, "n_group": 1},
    "deepseek_v3": LATENT,
    "jetmoe": JETMOE,  # hands keys and values repeated to its attention
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
}  # fmt: skip
REFUSED = {
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "its layers carry a state from token"),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "not all of its layers are attention"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "cannot be hooked"),
    "falcon": (SIZES, "cannot be hooked"),
    "bert": ({**SIZES, "intermediate_size": 48, "is_decoder": False}, "log-probs change"),
    "gemma2": ({**HEADS_OF_8, "attn_logit_softcapping": 50.0}, "softcap"),
    "mistral": ({**GROUPED, "sliding_window": 8}, "sliding window of 8"),
    "gpt_oss": ({**HEADS_OF_8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}, "s_aux"),
    "diffllama": (GROUPED, "calls its attention more than once"),
    "stablelm": (GROUPED, "does not pass the arguments of its forward pass to its attention"),
    "doge": (GROUPED, "an attention mask"),
}


HYBRIDS = {
    "mamba2": {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1,
        "expand": 2, "chunk_size": 8,
    },
    "qwen3_next": {
        **HEADS_OF_8, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "nemotron_h": {
        **HEADS_OF_8, "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
    },
    "falcon_h1": {**HEADS_OF_8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "jamba": {**GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "qwen3_5_text": {
        **HEADS_OF_8, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        **GROUPED, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
}  # fmt: skip
UNREACHABLE = {name: settings for name, (settings, _) in REFUSED.items() if name != "bert"} | HYBRIDS
PATHS = {name: (name, settings, True) for name, settings in EXACT.items()}
PATHS |= {f"{name} without hooks": (name, settings, False) for name, settings in UNREACHABLE.items()}


def tiny(model_type: str, settings: dict, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **{"vocab_size": 17, **ids, **settings})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.25)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if dtype == torch.float64 and any(name.endswith("experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # the others have no float64
    return model.to(dtype).eval()


def ragged_prompts(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(1, 17, n).tolist() for n in (5, 1, 9)]


@pytest.mark.parametrize("name", mostly_slow(PATHS, "llama", "gpt2", "bloom without hooks", "mamba without hooks"))
def test_every_model_is_sampled_and_differentiated_exactly(name: str, rng: np.random.Generator) -> None:
    """On the path that is chosen: what passes the check of hooks, and what goes through the model as it is."""
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
    """Where keys, values or layers have shapes of their own, and with the model's own cache."""
    model_type, settings, _ = PATHS[name]
    model = tiny(model_type, settings)
    assert_greedy_equals_generate(model, choose_forward(model), [*ragged_prompts(rng), [*range(1, 13)]])


def test_shapes_of_keys_and_values() -> None:
    latent, repeated, mixed = (tiny(name, EXACT[name]) for name in ("deepseek_v3", "jetmoe", "gemma4_text"))
    assert list(kv_shapes(latent)) == [KVShape(4, 8 + 4, 6)] * 2
    assert list(kv_shapes(repeated)) == [KVShape(2 * 2, 8, 8)] * 2  # as often as a token has experts
    assert list(kv_shapes(mixed)) == [KVShape(2, 8, 8), KVShape(2, 16, 16)]
    assert KVShape(4, 12, 6).size == 4 * 12 + 4 * 6


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3", "qwen3_moe", "gemma4_text"])
def test_memory_is_planned_with_the_shapes_that_decoding_has(model_type: str) -> None:
    """The rows' keys and values of the plan, found without weights, are those that the engine reserves for them."""
    model = tiny(model_type, EXACT[model_type])
    rows, length = 50, 16

    def planned(max_new_tokens: int) -> int:  # prompts so long that what else changes with the length does not count
        settings = MemorySettings("float32", 1 << 40, nodes_per_pass=64)
        return predict_memory(model.config, settings, Workload(100, max_new_tokens, num_rows=rows)).sampling.num_bytes

    shapes = kv_shapes(model)
    cache = SlotCache(model, shapes, RowMemory.of(model, shapes, 1 << 40, rows, length))
    cache.start(0)
    reserved = cache.num_bytes
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


def test_an_encoder_decoder_is_refused() -> None:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=17, **sizes))
    with pytest.raises(HooksError, match="T5ForConditionalGeneration cannot be hooked"):
        check_hooks(model)


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
    for check in (check_hooks, check_own_cache, choose_forward):
        with pytest.raises(UserError, match="LlamaForCausalLM gives logits that are not finite") as raised:
            check(model)
        assert not isinstance(raised.value, HooksError | CacheError)  # no other path is tried


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_a_prompt_beyond_a_window_is_checked(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type, {**HEADS_OF_8, "sliding_window": 16}, torch.float64)
    check_window(model)
    monkeypatch.setattr(PromptContext, "_mask", lambda *_: None)
    with pytest.raises(HooksError, match="its logits change beyond its sliding window"):
        check_window(model)


def test_the_check_of_a_cache_takes_few_logits() -> None:
    """Those of a few positions: with a large vocabulary, logits of a prompt beyond a window would take gigabytes."""
    model = tiny("mistral", {**GROUPED, "sliding_window": 16})
    positions = []
    model.lm_head.register_forward_hook(lambda *inputs_and_output: positions.append(inputs_and_output[2].shape[1]))
    check_own_cache(model, context=100)
    assert len(positions) == 3 * (
        1 + 1 + 4
    )  # prompts of three lengths: all at once, then with the cache token by token
    assert max(positions) == 5
