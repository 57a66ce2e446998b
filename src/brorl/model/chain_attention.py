"""Attention of the nodes of a chunk, chain by chain.

A chain is a run of nodes in which each is the parent of the next. The queries of a chain attend to its prompt and to
the path from the prompt to its end, with one softmax. The attention weights are kept for the backward pass, which
gathers the keys and values again.

Dimensions: F nodes, C chains, W queries per chain, T longest path, S longest prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.model.device import at_least_float32, to_device
from brorl.model.tree_attention import Grouping, PromptCache
from brorl.tree import IntArray


class ChainAttention:
    """Attention of nodes to their prompts and paths; arguments of `TreeContext`."""

    def __init__(self, prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray, parent_F: IntArray) -> None:
        start_C, length_C, width = split_into_chains(parent_F)
        path_CT = _paths(start_C, length_C, depth_F, parent_F)
        offset_W = np.arange(width)
        query_CW = start_C[:, None] + np.minimum(offset_W, length_C[:, None] - 1)
        chain_F = np.repeat(np.arange(start_C.size), length_C)
        cell_F = chain_F * width + np.arange(depth_F.size) - start_C[chain_F]
        unseen_CWT = np.arange(path_CT.shape[1]) > depth_F[query_CW][:, :, None]

        device = prompts.device
        self._grid = query_CW.shape
        self._is_grid = query_CW.size == depth_F.size  # all chains have the same length
        self._query, self._path, self._cell_F = (
            to_device(array, device) for array in (query_CW.ravel(), path_CT.ravel(), cell_F)
        )
        self.grouping = Grouping(prompt_F[start_C], prompts.length.size, device)
        bias = torch.zeros(unseen_CWT.shape, dtype=at_least_float32(prompts.key[0].dtype), device=device)
        self.path_bias = bias.masked_fill_(to_device(unseen_CWT, device), float("-inf"))[:, :, None]
        self.prompt_bias = prompts.bias

    def attend(self, *inputs: Tensor) -> Tensor:
        """Return the attention, given queries, keys and values, and the prompts' keys and values."""
        output: Tensor = _Attend.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return output

    def by_chain(self, x_FHD: Tensor, num_kv_heads: int) -> Tensor:
        """Return the rows of queries, [F, H, D] -> [K, C, W * G, D]; padding repeats the last query of its chain."""
        rows = x_FHD if self._is_grid else x_FHD.index_select(0, self._query)
        x_CWKGD: Tensor = rows.unflatten(0, self._grid).unflatten(2, (num_kv_heads, -1))
        return x_CWKGD.permute(2, 0, 1, 3, 4).flatten(2, 3)

    def by_node(self, x_KCRD: Tensor) -> Tensor:
        """Return the rows of nodes, [K, C, W * G, D] -> [F, H, D]."""
        x_KCWGD = x_KCRD.unflatten(2, (self._grid[1], -1))
        rows: Tensor = x_KCWGD.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)
        return rows if self._is_grid else rows.index_select(0, self._cell_F)

    def of_cells(self, x_FHD: Tensor, num_kv_heads: int) -> Tensor:
        """Return the rows of queries as `by_chain` does, with 0 for padding."""
        if not self._is_grid:
            cells = x_FHD.new_zeros(self._query.numel(), *x_FHD.shape[1:])
            x_FHD = cells.index_copy_(0, self._cell_F, x_FHD)
        x_CWKGD: Tensor = x_FHD.unflatten(0, self._grid).unflatten(2, (num_kv_heads, -1))
        return x_CWKGD.permute(2, 0, 1, 3, 4).flatten(2, 3)

    def paths(self, x_FKD: Tensor) -> Tensor:
        """Return the rows of paths, [F, K, D] -> [K * C, T, D]."""
        x_CTKD: Tensor = x_FKD.index_select(0, self._path).unflatten(0, (self._grid[0], -1))
        return x_CTKD.permute(2, 0, 1, 3).flatten(0, 1)

    def sum_over_paths(self, x_KCTD: Tensor, num_nodes: int, num_kv_heads: int) -> Tensor:
        """Add up the rows of each node over the paths through it, [K * C, T, D] -> [F, K, D]."""
        rows: Tensor = x_KCTD.unflatten(0, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(0, 1)
        return rows.new_zeros(num_nodes, *rows.shape[1:]).index_add_(0, self._path, rows)


class _Attend(torch.autograd.Function):
    """One softmax over the scores of the prompt, S of them, and of the path, T."""

    @staticmethod
    def forward(ctx: Any, layout: ChainAttention, *inputs: Tensor) -> Tensor:
        query_FHD, key_FKD, value_FKD, prompt_key, prompt_value = inputs
        num_kv_heads, num_prompt = key_FKD.shape[1], prompt_key.shape[2]
        query = layout.by_chain(query_FHD, num_kv_heads)
        of_path = query.flatten(0, 1) @ layout.paths(key_FKD).transpose(1, 2)
        score = of_path.new_empty(
            *query.shape[:3], num_prompt + of_path.shape[2], dtype=at_least_float32(of_path.dtype)
        )
        of_prompt = layout.grouping.spread(query) @ prompt_key.permute(1, 0, 3, 2)
        if layout.prompt_bias is not None:
            of_prompt += layout.prompt_bias
        score[..., :num_prompt] = layout.grouping.gather(of_prompt)
        by_query = (num_kv_heads, *layout.path_bias.shape[:2], -1, of_path.shape[2])  # [K, C, W, G, T]
        torch.add(of_path.view(by_query), layout.path_bias, out=score[..., num_prompt:].view(by_query))
        weight = torch.softmax(score, -1, out=score).to(value_FKD.dtype)
        of_prompt = layout.grouping.spread(weight[..., :num_prompt]) @ prompt_value.transpose(0, 1)
        output = layout.grouping.gather(of_prompt).flatten(0, 1)
        output = torch.baddbmm(output, weight[..., num_prompt:].flatten(0, 1), layout.paths(value_FKD))
        ctx.layout = layout
        ctx.save_for_backward(*inputs, weight)
        return layout.by_node(output.unflatten(0, (num_kv_heads, -1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FHD: Tensor) -> tuple[Tensor | None, ...]:
        layout: ChainAttention = ctx.layout
        *inputs, weight = ctx.saved_tensors
        with torch.autocast(weight.device.type, enabled=False):
            grads = _gradients(layout, tuple(inputs), weight, grad_FHD.to(weight.dtype))
        return None, *grads


def _gradients(
    layout: ChainAttention, inputs: tuple[Tensor, ...], weight: Tensor, grad_FHD: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values, and of the prompts' keys and values."""
    query_FHD, key_FKD, value_FKD, prompt_key, prompt_value = inputs
    (num_nodes, num_kv_heads), num_prompt = key_FKD.shape[:2], prompt_key.shape[2]
    grouping = layout.grouping
    query = layout.by_chain(query_FHD, num_kv_heads)
    grad = layout.of_cells(grad_FHD, num_kv_heads)
    grad_grid = grouping.spread(grad, zero_padding=True)
    grad_prompt_value = grouping.spread(weight[..., :num_prompt]).transpose(2, 3) @ grad_grid
    of_path = weight[..., num_prompt:].flatten(0, 1).transpose(1, 2) @ grad.flatten(0, 1)
    grad_value = layout.sum_over_paths(of_path, num_nodes, num_kv_heads)

    grad_weight = torch.empty_like(weight)
    grad_weight[..., :num_prompt] = grouping.gather(grad_grid @ prompt_value.permute(1, 0, 3, 2))
    grad_weight[..., num_prompt:].flatten(0, 1).copy_(grad.flatten(0, 1) @ layout.paths(value_FKD).transpose(1, 2))
    grad_score = torch._softmax_backward_data(grad_weight, weight, -1, weight.dtype)
    of_prompt = grouping.spread(grad_score[..., :num_prompt], zero_padding=True)
    of_path = grad_score[..., num_prompt:].flatten(0, 1)
    grad_query = grouping.gather(of_prompt @ prompt_key.transpose(0, 1)).flatten(0, 1)
    grad_query = torch.baddbmm(grad_query, of_path, layout.paths(key_FKD)).view_as(query)
    grad_key = layout.sum_over_paths(of_path.transpose(1, 2) @ query.flatten(0, 1), num_nodes, num_kv_heads)
    grad_prompt_key = of_prompt.transpose(2, 3) @ grouping.spread(query)
    return (
        layout.by_node(grad_query),
        grad_key,
        grad_value,
        grad_prompt_key.transpose(0, 1),
        grad_prompt_value.transpose(0, 1),
    )


def split_into_chains(parent_F: IntArray) -> tuple[IntArray, IntArray, int]:
    """Split preorder nodes into chains; return their first nodes [C], lengths [C], and the largest length W.

    Chains longer than the power of two above the mean length are split, which bounds the padding.
    """
    num_nodes = parent_F.size
    start = np.flatnonzero((parent_F < 0) | (parent_F != np.arange(num_nodes) - 1))
    length = np.diff(np.append(start, num_nodes))
    limit = 1 << max(2, int(np.ceil(length.mean()) - 1).bit_length())
    count = -(-length // limit)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start_C = np.repeat(start, count) + within * limit
    length_C = np.minimum(limit, np.repeat(length, count) - within * limit)
    return start_C, length_C, int(length_C.max())


def _paths(start_C: IntArray, length_C: IntArray, depth_F: IntArray, parent_F: IntArray) -> IntArray:
    """Return the nodes from the prompt to the end of each chain, padded with 0, shape [C, T]."""
    chain_F = np.repeat(np.arange(start_C.size), length_C)
    path_CT = np.zeros((start_C.size, int(depth_F.max()) + 1), np.int64)
    above_C = parent_F[start_C]
    starts, lengths, depths = start_C.tolist(), length_C.tolist(), depth_F[start_C].tolist()
    for row, (start, length, depth, above) in enumerate(zip(starts, lengths, depths, above_C.tolist(), strict=True)):
        if above >= 0:
            path_CT[row, :depth] = path_CT[chain_F[above], :depth]
        path_CT[row, depth : depth + length] = np.arange(start, start + length)
    return path_CT
