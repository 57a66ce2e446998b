"""Gradient checkpointing under tree attention: decoder layers keep their inputs, and the backward pass runs them again.

Hugging Face's own switch is not enough. A layer looks up its attention when it runs, and the backward pass may run it
again after the block of `tree_attention` has ended. The wrong attention would give a wrong gradient. So the attention
of the forward pass is stored and set again for the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.errors import UserError
from brorl.model.tree_attention import attention


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Make the decoder layers of a causal LM keep only their inputs for the backward pass.

    Memory for activations falls to that of one layer and every layer's input. Each layer is computed twice. Gradients
    are equal up to rounding. Sampling and evaluation do not change.

    Raises:
        UserError: If the architecture has no layers that can be checkpointed.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"the layers of {type(model).__name__} cannot be checkpointed; set engine.gradient_checkpointing: "
            "false, and lower engine.nodes_per_pass if memory is short"
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _CurrentAttention(model)

    def run(forward: Callable[..., Any], *args: Any) -> Any:
        # Nothing in a layer is random, so no random state is kept.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    for layer in layers:
        layer._gradient_checkpointing_func = run
        layer.gradient_checkpointing = True


class _CurrentAttention(AbstractContextManager[None]):
    """Blocks with a model's current attention implementation, one for each backward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._implementation = model, model.config._attn_implementation
        self._block: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._block = attention(self._model, self._implementation)
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)
