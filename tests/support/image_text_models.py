"""Small random models of images and text, saved by transformers as their makers publish them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from brorl.config.settings import TrainConfig
from brorl.model.forward import Forward
from brorl.model.load import load_model
from brorl.model.sharding import shard
from brorl.training.learner import TreeLearner
from brorl.training.ranks import Ranks, load_on_first_rank
from learner_support import learn

_TEXT = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_STATES = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "spatial_merge_size": 1,
}  # fmt: skip
_QWEN_IDS = {"image_token_id": 22, "video_token_id": 23, "vision_start_token_id": 20, "vision_end_token_id": 21}
IMAGE_TEXT = {
    "gemma3": {
        "text_config": {**_TEXT, "layer_types": ["sliding_attention", "full_attention"]}, "vision_config": _VISION,
        "mm_tokens_per_image": 4, "image_token_index": 22, "boi_token_index": 23, "eoi_token_index": 21,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None}, "image_token_index": 22,
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 8},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_THREE_AXES}, **_QWEN_IDS,
        "vision_config": {**_QWEN_VISION, "window_size": 8, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, **_THREE_AXES}, **_QWEN_IDS,
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_5": {"text_config": {**_TEXT, **_STATES}, "vision_config": _QWEN_VISION, **_QWEN_IDS},
    "llama4": {
        "text_config": {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
        "vision_config": {**_VISION, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                          "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5},
        "image_token_index": 22, "boi_token_index": 23, "eoi_token_index": 21,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **_TEXT}, "projection_dim": 32, "image_token_index": 22,
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    },
}  # fmt: skip


def save_image_text(kind: str, folder: Path, seed: int) -> PreTrainedModel:
    """Save a model of a kind, with every weight random, and a file about its images; return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **IMAGE_TEXT[kind]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(float(parameter.dim() == 1) + 0.25 * noise)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(f'{{"patch_size": {seed}}}')
    return model.eval()


def train_on_ranks(
    ranks: Ranks, source: Path, target: Path, steps: Sequence[Any], settings: TrainConfig, forward: Forward
) -> None:
    """Train a saved model on some ranks, with groups and their advantages for each step, and save it."""
    cpu = torch.device("cpu")
    if ranks.size == 1:
        learner = TreeLearner(load_model(str(source), cpu, torch.float32), settings, forward=forward)
    else:

        def load() -> tuple[PreTrainedModel, None]:
            return load_model(str(source), cpu, torch.float32), None

        model, weights, _ = load_on_first_rank(ranks, load, None, False)
        shard(model, weights, cpu)
        learner = TreeLearner(model, settings, ranks=ranks, forward=forward)
    for seed, (groups, advantages) in enumerate(steps):
        learn(learner, groups, advantages, seed=seed)
    learner.save_pretrained(target)
