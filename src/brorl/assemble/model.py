"""The model of a run, from its settings."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brorl.activity import Observe, Phase, unobserved
from brorl.assemble.settings import build_lora
from brorl.config.settings import TrainConfig
from brorl.model.load import check_vocabulary, choose_device, load_model

_DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_model(
    config: TrainConfig, source: str, tokenizer: PreTrainedTokenizerBase, observe: Observe = unobserved
) -> PreTrainedModel:
    """Load the model to train.

    Args:
        config: The run's settings.
        source: Name or folder of the model or checkpoint.
        tokenizer: Its tokenizer.
        observe: Receives the phase.

    Raises:
        UserError: If it cannot be loaded.
    """
    observe(Phase("loading", "model"))
    lora = build_lora(config)
    keeps_float32 = config.dtype == "bfloat16" and not lora
    model = load_model(
        source,
        choose_device(config.device),
        torch.float32 if keeps_float32 else _DTYPE[config.dtype],
        lora,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )
    check_vocabulary(source, model, tokenizer)
    return model


def build_sampling_model(config: TrainConfig, source: str) -> PreTrainedModel:
    """Load a model that only samples, in the format of the computation, for weights that a learner publishes.

    Args:
        config: The run's settings.
        source: Name or folder of the model.

    Raises:
        UserError: If it cannot be loaded.
    """
    return load_model(source, choose_device(config.device), _DTYPE[config.dtype], build_lora(config))
