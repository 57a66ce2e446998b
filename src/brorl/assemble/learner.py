"""The learner of a run: in one process, or one rank of several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from brorl.activity import Observe, Phase, unobserved
from brorl.assemble.inputs import ModelInputs, RunInputs
from brorl.assemble.settings import autocasts, build_learner_settings, build_lora
from brorl.config.settings import TrainConfig
from brorl.model.flex_attention import check_flex_device
from brorl.model.forward import FlatForward, Forward, TreeForward, choose_forward
from brorl.model.hook_check import check_flex
from brorl.model.load import check_vocabulary, choose_device, end_tokens, load_model
from brorl.model.sharding import shard
from brorl.training.ranks import ALONE, Ranks
from brorl.training.tree_learner import TreeLearner


def build_model(
    config: TrainConfig,
    ready: ModelInputs | RunInputs,
    observe: Observe = unobserved,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the model to train.

    Args:
        config: The run's settings.
        ready: Source and tokenizer of the model.
        observe: Receives the phase.
        device: The device of its weights; None for that of the settings.
    """
    observe(Phase("loading", "model"))
    lora = build_lora(config)
    dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16 if lora else torch.float32}
    model = load_model(
        ready.source,
        device or choose_device(config.device),
        dtype[config.dtype],
        lora,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )
    check_vocabulary(ready.source, model, ready.tokenizer)
    return model


def build_forward(
    config: TrainConfig,
    ready: ModelInputs | RunInputs,
    model: PreTrainedModel,
    say: Callable[[str], None] = lambda _: None,
) -> TreeForward | FlatForward:
    """Choose how trees go through the model.

    Args:
        config: The run's settings.
        ready: The longest context of the run.
        model: The model, before it is sharded.
        say: Receives a line if the flat path runs.

    Raises:
        UserError: If `engine.attention` cannot run with this model or on the device of the settings.
    """
    attention = config.engine.attention
    forward = choose_forward(model, config.engine.forward, ready.context, attention)
    if attention == "flex":
        check_flex_device(choose_device(config.device), config.dtype)
        if isinstance(forward, TreeForward) and model.device.type == "cuda":  # a model is sharded from the CPU
            check_flex(model, autocast=autocasts(config))
    if isinstance(forward, FlatForward):
        say(f"the flat path runs, because {forward.reason}: each distinct response goes through the model separately")
    return forward


def build_learner(
    config: TrainConfig,
    model: PreTrainedModel,
    forward: Forward,
    stop_token_ids: tuple[int, ...],
    say: Callable[[str], None] = lambda _: None,
    observe: Observe = unobserved,
    ranks: Ranks = ALONE,
) -> TreeLearner:
    """Make the learner, or one rank of it.

    Args:
        config: The run's settings.
        model: The model, the same on every rank. Several ranks shard it, on the device of the settings.
        forward: How trees go through the model.
        stop_token_ids: Tokens that end a response.
        say: Receives lines for the user.
        observe: Receives the activity of the learner.
        ranks: The processes that share the learner.
    """
    settings = build_learner_settings(config, stop_token_ids, forward)
    if ranks.size > 1:
        shard(model, choose_device(config.device), settings.autocast)
    return TreeLearner(model, settings, say, observe, ranks)


def build_rank(
    config: TrainConfig,
    ready: ModelInputs | RunInputs,
    ranks: Ranks,
    say: Callable[[str], None] = lambda _: None,
    observe: Observe = unobserved,
) -> TreeLearner:
    """Load the model and make one rank of the learner; every rank calls it.

    Args:
        config: The run's settings.
        ready: The run's inputs; `source` is a checkpoint to continue from, or the model to start from.
        ranks: The processes that share the learner, after `join`.
        say: Receives lines for the user.
        observe: Receives the activity of the learner.

    Raises:
        UserError: If the model does not fit.
    """
    device = torch.device("cpu") if ranks.size > 1 else None  # sharding moves one layer at a time
    model = build_model(config, ready, observe, device)
    forward = build_forward(config, ready, model, say)
    return build_learner(config, model, forward, end_tokens(model, ready.tokenizer), say, observe, ranks)
