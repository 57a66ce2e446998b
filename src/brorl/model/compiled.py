"""Compiled graphs, where PyTorch generates kernels: functions of tensors, and the decoder layers of a model.

A layer is compiled once for all layers of its kind and for passes of all lengths. The weights are inputs of its graph,
and so are the lengths and the mask. One that cannot be one graph is an error: `hook_check` finds it before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.model.logits import replaced_forward

_MAX_GRAPHS = 64  # of a function; the default of `torch.compile` is 8, and one more would be an error
# Kernels of norms are fused in short passes too: else short and long passes have graphs of their own.
_FUSES_ALWAYS = "triton.mix_order_reduction_non_strict_mode"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as one graph for tensors of all sizes; its numbers that are not integers are constants.

    Where `torch.compile` would run a part of the function as it is, it raises an error.
    """
    from torch._inductor import config as kernels  # slow to import

    graph: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)
    fusion = {_FUSES_ALWAYS: True} if hasattr(kernels, _FUSES_ALWAYS) else {}

    def call(*inputs: Any, **named: Any) -> Any:
        # newer versions call the first one recompile_limit
        with (
            torch._dynamo.config.patch(cache_size_limit=_MAX_GRAPHS, specialize_float=True),
            kernels.patch(fusion),
        ):
            return graph(*inputs, **named)

    return call


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
