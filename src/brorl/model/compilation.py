"""Compiles functions, and the decoder layers of a model in packed passes.

On CUDA, the attention and the decoder layers run as compiled graphs, each shared by all layers of a kind and all pass
lengths. If that fails, the error reaches `forward.check_packed`, which catches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.model.logits import replaced_forward

_MAX_GRAPHS = 64  # graphs per function; torch's default is 8, and one more would be an error
# With this option, kernels of norms are fused in short passes too, and short and long passes share graphs.
_FUSES_ALWAYS = "triton.mix_order_reduction_non_strict_mode"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into one graph for tensors of all sizes. Float arguments become constants.

    Raise an error where `torch.compile` would leave part of the function uncompiled.
    """
    graph: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)

    def call(*inputs: Any, **named: Any) -> Any:
        if _compiles.get():
            return graph(*inputs, **named)
        with compiler_settings():
            return graph(*inputs, **named)

    return call


_compiles: ContextVar[bool] = ContextVar("compiles", default=False)  # whether this thread has set up the compiler


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Configure the compiler for the duration of the block.

    Outside such a block, each graph call does so itself, which is slower.
    """
    from torch._inductor import config as kernels  # slow to import

    fusion = {_FUSES_ALWAYS: True} if hasattr(kernels, _FUSES_ALWAYS) else {}
    token = _compiles.set(True)
    try:
        # newer torch versions rename cache_size_limit to recompile_limit
        with torch._dynamo.config.patch(cache_size_limit=_MAX_GRAPHS, specialize_float=True), kernels.patch(fusion):
            yield
    finally:
        _compiles.reset(token)


_CHECKPOINTING = "forward_with_checkpointing"  # the wrapper of a layer's forward pass in transformers


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the decoder layers of a model as compiled graphs inside the block, in packed passes."""
    with ExitStack() as stack:
        stack.enter_context(compiler_settings())
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                checkpoints = module.gradient_checkpointing
                stack.enter_context(replaced_forward(module, partial(_run, module, checkpoints)))
                stack.enter_context(_without_checkpointing(module))
        yield


@contextmanager
def _without_checkpointing(layer: Any) -> Iterator[None]:
    """Checkpoint only the graph: some versions of transformers would rerun the module's own forward."""
    before = layer.gradient_checkpointing
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        layer.gradient_checkpointing = before


def _run(layer: Any, checkpoints: bool, *inputs: Any, **named: Any) -> Any:
    """Run a layer, compiled if its pass has a context. Passes without one keep sharded ranks in step."""
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
