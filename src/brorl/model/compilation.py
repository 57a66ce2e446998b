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

from brorl.model.kernels import keep_compiled_code
from brorl.model.logits import replaced_forward

_MAX_GRAPHS = 64  # graphs per function; torch's default is 8, and one more would be an error
_CACHES_FUNCTIONS = "autograd_cache_allow_custom_autograd_functions"  # keep graphs with an autograd function, too
_KERNEL_OPTIONS = {
    # Kernels of norms are fused in short passes too, and short and long passes share graphs.
    "triton.mix_order_reduction_non_strict_mode": True,
    # Generated code does not check the sizes and strides of its inputs and buffers again: guards have checked inputs.
    "size_asserts": False,
    "alignment_asserts": False,
}


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into one graph for tensors of all sizes. Float arguments become constants.

    Raise an error where `torch.compile` would leave part of the function uncompiled. Later runs find the graph in the
    user's cache folder; see `keep_compiled_code`.
    """
    keep_compiled_code()
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
    from torch._functorch import config as graphs
    from torch._inductor import config as kernels  # slow to import

    options = {name: value for name, value in _KERNEL_OPTIONS.items() if hasattr(kernels, name)}
    caching = {_CACHES_FUNCTIONS: True} if hasattr(graphs, _CACHES_FUNCTIONS) else {}
    token = _compiles.set(True)
    try:
        # newer torch versions rename cache_size_limit to recompile_limit
        limits = torch._dynamo.config.patch(cache_size_limit=_MAX_GRAPHS, specialize_float=True)
        with limits, graphs.patch(caching), kernels.patch(options):
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
                forward, checkpoints = compiled(_plain_forward(type(module))), module.gradient_checkpointing
                stack.enter_context(replaced_forward(module, partial(_run, module, forward, checkpoints)))
                if checkpoints:
                    stack.enter_context(_without_checkpointing(module))
        yield


@contextmanager
def _without_checkpointing(layer: Any) -> Iterator[None]:
    """Checkpoint only the graph: some versions of transformers would rerun the module's own forward."""
    layer.gradient_checkpointing = False
    try:
        yield
    finally:
        layer.gradient_checkpointing = True


def _run(layer: Any, forward: Callable[..., Any], checkpoints: bool, *inputs: Any, **named: Any) -> Any:
    """Run a layer, compiled if its pass has a context. Passes without one keep sharded ranks in step."""
    if named.get("brorl_context") is None:
        return type(layer).forward(layer, *inputs, **named)
    if checkpoints and layer.training:  # the recomputation runs the same graph
        return layer._gradient_checkpointing_func(partial(forward, layer, **named), *inputs)
    return forward(layer, *inputs, **named)


def _plain_forward(kind: Any) -> Callable[..., Any]:
    """Return the forward pass of a class of layers without the wrappers that add gradient checkpointing."""
    forward: Callable[..., Any] = unwrap(
        kind.forward, stop=lambda function: function.__code__.co_name != _CHECKPOINTING
    )
    return forward
