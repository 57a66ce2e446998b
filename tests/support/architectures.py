"""Tiny random models of many architectures, by the path that they take."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
    "stablelm": (GROUPED, "does not pass its forward arguments to its attention"),
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
