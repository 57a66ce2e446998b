"""Sizes of models against hand computations from their published configs."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from brorl.model.model_shape import ModelShape

QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


def test_qwen3_06b_by_hand() -> None:
    with torch.device("meta"):
        shape = ModelShape.of_model(AutoModelForCausalLM.from_config(QWEN3_06B))
    attention = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 2 * 128
    layer = attention + 3 * 1024 * 3072 + 2 * 1024
    total = 28 * layer + 151_936 * 1024 + 1024
    assert shape == ModelShape(total, 28, 1024, 3072, 16, 128, 151_936)
    assert total == 596_049_920
