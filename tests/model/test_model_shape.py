"""Sizes of models against hand computations from their published configs, and against a counted forward pass."""

from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from brorl.errors import UserError
from brorl.model.model_shape import PUBLISHED, ModelShape

QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


@cache
def qwen3_06b() -> ModelShape:
    return ModelShape.of(QWEN3_06B, "test")


def test_qwen3_06b_by_hand() -> None:
    shape = qwen3_06b()
    attention = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 2 * 128
    layer = attention + 3 * 1024 * 3072 + 2 * 1024
    total = 28 * layer + 151_936 * 1024 + 1024
    assert shape.parameters == shape.matmul_parameters == total == 596_049_920
    assert shape.kv_bytes == 28 * 2 * 8 * 128 * 2 == 114_688
    assert shape.attention_flops == 28 * 2 * 2 * 16 * 128
    assert shape.weight_bytes == 2 * total


def test_the_papers_model_by_hand() -> None:
    """1.78 billion weights; the input embedding of 151,936 x 1,536 is a lookup."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    known = PUBLISHED["nvidia/Nemotron-Research-Reasoning-Qwen-1.5B"]
    found = ModelShape.of(config, known.source)
    assert found == known
    assert known.parameters - known.matmul_parameters == 151_936 * 1536
    assert known.kv_bytes == 28_672


def test_operations_of_a_forward_pass_are_those_that_torch_counts() -> None:
    """2 per weight and token, and attention over the whole context; norms and biases are not matrix products."""
    config = Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    shape = ModelShape.of(config, "test")
    tokens = 40
    model = AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    matmul = tokens * (shape.matmul_flops - 2 * vectors)
    attention = tokens * shape.attention_flops * tokens  # eager attention computes masked scores, too
    rotary = counter.get_total_flops() - matmul - attention
    assert 0 <= rotary <= 0.001 * counter.get_total_flops()


def test_a_token_uses_some_experts() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, tie_word_embeddings=True,
    )  # fmt: skip
    shape = ModelShape.of(config, "test")
    experts = 2 * 8 * 3 * 32 * 16
    assert shape.parameters - shape.matmul_parameters == experts * 6 // 8


def test_a_shape_from_numbers() -> None:
    shape = ModelShape.from_numbers(
        {
            "parameters": 596_049_920,
            "layers": 28,
            "hidden": 1024,
            "heads": 16,
            "head_dim": 128,
            "kv_heads": 8,
            "vocabulary": 151_936,
        }
    )
    known = qwen3_06b()
    assert (shape.kv_bytes, shape.attention_flops, shape.weight_bytes) == (
        known.kv_bytes, known.attention_flops, known.weight_bytes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"parameters": 1e9}, "--model-shape is missing layers, hidden, kv_heads and vocabulary"),
        ({"parameters": 1e9, "depth": 3}, "'depth' is not one of parameters, layers"),
        ({"parameters": 0, "layers": 1, "hidden": 1, "kv_heads": 1, "vocabulary": 1}, "parameters must be a number"),
    ],
)
def test_what_is_not_a_shape(numbers: dict[str, float], said: str) -> None:
    with pytest.raises(UserError) as error:
        ModelShape.from_numbers(numbers)
    assert said in str(error.value)
