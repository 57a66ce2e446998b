"""The decoder layers of a model, compiled once for all layers of a kind and for passes of all lengths.

The model's own modules are traced, with adapters and everything else in them. The weights of a layer are inputs of its
graph, and so are the lengths and the mask of a pass. A layer that cannot be one graph is an error: `hook_check` finds
it before the run. PyTorch keeps the kernels on disk for later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.model.compiled import compiled
from brorl.model.logits import replaced_forward

_CHECKPOINTING = "forward_with_checkpointing"  # the wrapper of a layer's forward pass in transformers


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the decoder layers of a model as compiled graphs inside the block, in packed passes."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                checkpoints = module.gradient_checkpointing
                stack.enter_context(replaced_forward(module, partial(_run, module, checkpoints)))
                stack.enter_context(_without_checkpointing(module))
        yield


@contextmanager
def _without_checkpointing(layer: Any) -> Iterator[None]:
    """Checkpoint the graph alone: some versions of transformers run the module again, with its own forward pass."""
    before = layer.gradient_checkpointing
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        layer.gradient_checkpointing = before


def _run(layer: Any, checkpoints: bool, *inputs: Any, **named: Any) -> Any:
    """Run a layer; a pass that the ranks of a sharded model make to keep in step has no context, and runs as it is."""
    if named.get("brorl_context") is None:
        return type(layer).forward(layer, *inputs, **named)
    forward = compiled(_plain_forward(type(layer)))
    if checkpoints and layer.training:  # the recomputation runs the same graph
        return layer._gradient_checkpointing_func(partial(forward, layer, **named), *inputs)
    return forward(layer, *inputs, **named)


def _plain_forward(kind: Any) -> Callable[..., Any]:
    """Return the forward pass of a class of layers without the wrappers that add gradient checkpointing."""
    forward: Callable[..., Any] = unwrap(
        kind.forward, stop=lambda function: function.__code__.co_name != _CHECKPOINTING
    )
    return forward
