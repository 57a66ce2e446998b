"""Attention of the nodes of a chunk with the compiled kernels, for float32 on a CPU.

In preorder the ancestors of a node are a stack, so a node attends to its prompt and to the stack. Nothing is padded or
masked. The backward pass computes the scores again, so that memory grows with the nodes and not with their paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.model.kernels import Kernels, PackedNodes


class StackAttention:
    """Attention of nodes to their prompts and paths.

    Args:
        kernels: The compiled kernels.
        nodes: The nodes.
    """

    def __init__(self, kernels: Kernels, nodes: PackedNodes) -> None:
        self.kernels = kernels
        self.nodes = nodes

    def attend(self, *inputs: Tensor) -> Tensor:
        """Return the attention, given queries, keys and values, and the prompts' keys and values."""
        output: Tensor = _Attend.apply(self, *(x.contiguous() for x in inputs))  # type: ignore[no-untyped-call]
        return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: StackAttention, *inputs: Tensor) -> Tensor:
        out, lse = attention.kernels.attend_nodes(attention.nodes, *inputs)
        ctx.attention = attention
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FHD: Tensor) -> tuple[Tensor | None, ...]:
        attention: StackAttention = ctx.attention
        *inputs, out, lse = ctx.saved_tensors
        return None, *attention.kernels.attend_nodes_backward(attention.nodes, tuple(inputs), out, lse, grad_FHD)
