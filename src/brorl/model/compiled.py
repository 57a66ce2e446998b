"""Functions of tensors as compiled graphs, on devices where PyTorch generates kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

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
