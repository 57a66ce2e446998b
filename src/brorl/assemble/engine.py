"""The engine of a run, an evaluation or a plan: made here, from `engine.kind`."""

from __future__ import annotations

from typing import assert_never

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl.activity import Observe, unobserved
from brorl.assemble.settings import build_lora
from brorl.config.settings import TrainConfig
from brorl.model.forward import FlatForward, TreeForward
from brorl.model.load import choose_device, end_tokens, load_model
from brorl.rollout.engine import Engine
from brorl.rollout.native.engine import NativeEngine


def build_engine(
    config: TrainConfig,
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forward: TreeForward | FlatForward,
    observe: Observe = unobserved,
) -> Engine:
    """Make the engine.

    Args:
        config: The settings.
        source: Name or folder that the model was loaded from.
        model: The model that is trained or evaluated. The native engine samples with it, or with a copy in bfloat16 if
            the model computes in bfloat16 and keeps float32 weights.
        tokenizer: Its tokenizer, which defines the end tokens.
        forward: How rows go through the model.
        observe: Receives the progress of sampling.
    """
    match config.engine.kind:
        case "native":
            has_copy = config.dtype == "bfloat16" and model.dtype != torch.bfloat16
            sampler = load_model(source, choose_device(config.device), torch.bfloat16) if has_copy else model
            memory_bytes = int(config.engine.memory_gib * 2**30)
            return NativeEngine(sampler, end_tokens(model, tokenizer), memory_bytes, observe=observe, forward=forward)
        case _:
            assert_never(config.engine.kind)


def build_sampling_model(config: TrainConfig, source: str) -> PreTrainedModel:
    """Load a model that only samples, in the format of the computation; a learner may publish its weights to it.

    Args:
        config: The settings.
        source: Name or folder of the model.

    Raises:
        UserError: If it cannot be loaded.
    """
    dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[config.dtype]
    return load_model(source, choose_device(config.device), dtype, build_lora(config))
