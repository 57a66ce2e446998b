"""The model of several ranks: rank 0 reads the weights, and every other rank makes the same model without them.

In: a function that loads the model. Out: on every rank the model with its parameters on the meta device, ready to be
sharded, and on rank 0 its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.blueprint import Blueprint
from brorl.model.settings import LoraSettings
from brorl.training.ranks import Ranks

T = TypeVar("T")


def load_on_first_rank(
    ranks: Ranks,
    load: Callable[[], tuple[PreTrainedModel, T]],
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, dict[str, Tensor], T]:
    """Load a model on rank 0 and make it without weights on the others; collective.

    Args:
        ranks: The processes that share the model.
        load: Loads the model into the memory of the CPU, and returns it with facts about it that all ranks need.
        lora: The adapters with which it is loaded.
        gradient_checkpointing: The setting with which it is loaded.

    Returns:
        The model with its parameters on the meta device, its weights by name (none on the other ranks), and the facts.

    Raises:
        FirstRankError: On the other ranks, if rank 0 cannot load the model.
    """
    loaded: list[PreTrainedModel] = []

    def work() -> tuple[Blueprint, T]:
        model, facts = load()
        loaded.append(model)
        return Blueprint.of(model, lora, gradient_checkpointing), facts

    blueprint, facts = ranks.of_first(work)
    if not loaded:
        return blueprint.build(), {}, facts
    [model] = loaded
    return model, blueprint.take_weights(model), facts
