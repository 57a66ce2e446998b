"""Attention of long chunks in tiles of queries, with bounded memory and exact gradients.

A tile is a run of consecutive nodes of one prompt. Nodes are in preorder, so a node of the tile attends to the prompt,
to ancestors of the tile's first node, and to nodes of the tile. Scores exist for one tile only, at most 2^25 of them,
and the backward pass computes them again. Nothing is approximated: one softmax per query covers all of its keys.

Dimensions: F nodes, B queries of a tile, U of its keys that some of its queries do not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.arrays import IntArray
from brorl.model.device import at_least_float32, to_device
from brorl.model.tree_attention import PromptCache
from brorl.tree import subtree_ends

SCORES_PER_TILE = 1 << 25
_MAX_QUERIES = 256  # more queries than this read too many keys that they do not see


@dataclass(frozen=True)
class Tile:
    """A run of consecutive nodes of one prompt, and the keys that they read."""

    prompt: int  # the prompt
    prompt_length: int  # its tokens
    start: int  # first node
    stop: int  # node after the last
    key: Tensor | slice  # nodes whose keys are read, ascending: ancestors of the first node, then the tile
    unseen_node: Tensor  # those of them that some query does not see; they are the last of `key`. Shape [U].
    unseen_end: Tensor  # the end of the subtree of each, shape [U]

    def unseen(self) -> Tensor:
        """Return whether each query does not see each of the last U keys, shape [B, U]."""
        query_B = torch.arange(self.start, self.stop, device=self.unseen_node.device)[:, None]
        return (self.unseen_node > query_B) | (self.unseen_end <= query_B)


class TiledAttention:
    """The attention of the input nodes of a chunk.

    Args:
        prompts: Keys and values of the prompts.
        prompt_F: Prompt of each node, ascending, shape [F].
        depth_F: Depth of each node, 0 for the first token after the prompt, shape [F].
        num_heads: Query heads.
    """

    def __init__(self, prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray, num_heads: int) -> None:
        lengths = prompts.length.tolist()
        longest = max(lengths) + int(depth_F.max()) + 1
        room = SCORES_PER_TILE // num_heads  # B (longest + B) scores of a head
        queries = max(1, min(_MAX_QUERIES, (isqrt(longest**2 + 4 * room) - longest) // 2))
        self._tiles = list(_tiles(prompt_F, depth_F, lengths, queries, prompts.device))

    def attend(self, *inputs: Tensor) -> Tensor:
        """Return the attention, given queries, keys and values, and the prompts' keys and values."""
        output: Tensor = _Attend.apply(self._tiles, *inputs)  # type: ignore[no-untyped-call]
        return output


def _tiles(
    prompt_F: IntArray, depth_F: IntArray, lengths: list[int], queries: int, device: torch.device
) -> Iterator[Tile]:
    """Yield the tiles of at most `queries` nodes."""
    end_F = subtree_ends(depth_F)
    on_path = np.zeros(int(depth_F.max()) + 1, np.int64)  # the last node so far at each depth
    edges = np.flatnonzero(np.diff(prompt_F, prepend=-1))
    for first, last in zip(edges.tolist(), [*edges[1:].tolist(), prompt_F.size], strict=True):
        for start in range(first, last, queries):
            stop = min(start + queries, last)
            key = np.concatenate([on_path[: depth_F[start]], np.arange(start, stop)])
            on_path[depth_F[start:stop]] = np.arange(start, stop)  # numpy keeps the last of repeated indices
            seen_by_all = (key <= start) & (end_F[key] >= stop)
            num_seen = int(np.argmin(seen_by_all)) if not seen_by_all.all() else key.size
            node_U = key[num_seen:]
            contiguous = int(key[-1] - key[0]) + 1 == key.size
            prompt = int(prompt_F[start])
            yield Tile(
                prompt,
                lengths[prompt],
                start,
                stop,
                slice(int(key[0]), stop) if contiguous else to_device(key, device),
                to_device(node_U, device),
                to_device(end_F[node_U], device),
            )


class _TileInputs(NamedTuple):
    """The keys, values and attention weights of a tile."""

    query: Tensor  # [K, B * G, D]
    key: Tensor  # [K, S + n, D]
    value: Tensor  # [K, S + n, E]
    weight: Tensor  # [K, B * G, S + n], float32 at least

    @classmethod
    def of(cls, tile: Tile, inputs: tuple[Tensor, ...]) -> _TileInputs:
        """Compute the attention weights of a tile."""
        query_THD, key_TKD, value_TKD, prompt_key, prompt_value = inputs
        key, value = (
            torch.cat([prompt[tile.prompt, :, : tile.prompt_length], own[tile.key].transpose(0, 1)], 1)
            for prompt, own in ((prompt_key, key_TKD), (prompt_value, value_TKD))
        )
        query = _by_key_head(query_THD[tile.start : tile.stop], key.shape[0])
        score = query @ key.transpose(1, 2)
        score = score.to(at_least_float32(score.dtype))
        num_unseen = tile.unseen_node.numel()
        if num_unseen:
            of_queries = score.unflatten(1, (tile.stop - tile.start, -1))[..., -num_unseen:]  # [K, B, G, U]
            of_queries.masked_fill_(tile.unseen()[:, None], float("-inf"))
        return cls(query, key, value, score.softmax(-1))


def _by_key_head(x_BHD: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, D] -> [K, B * G, D]."""
    x_BKGD: Tensor = x_BHD.unflatten(1, (num_kv_heads, -1))
    return x_BKGD.transpose(0, 1).flatten(1, 2)


def _by_query(x_KQD: Tensor, num_queries: int) -> Tensor:
    """[K, B * G, D] -> [B, H, D]."""
    x_KBGD: Tensor = x_KQD.unflatten(1, (num_queries, -1))
    return x_KBGD.transpose(0, 1).flatten(1, 2)


class _Attend(torch.autograd.Function):
    """Attention tile by tile; the backward pass computes the weights of a tile again."""

    @staticmethod
    def forward(ctx: Any, tiles: list[Tile], *inputs: Tensor) -> Tensor:
        query_THD, _, value_TKD, *_ = inputs
        output = query_THD.new_empty(*query_THD.shape[:2], value_TKD.shape[2], dtype=value_TKD.dtype)
        for tile in tiles:
            _, _, value, weight = _TileInputs.of(tile, inputs)
            output[tile.start : tile.stop] = _by_query(weight.to(value.dtype) @ value, tile.stop - tile.start)
        ctx.tiles = tiles
        ctx.save_for_backward(*inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output = ctx.saved_tensors
        with torch.autocast(output.device.type, enabled=False):
            grads = _gradients(ctx.tiles, tuple(inputs), output, grad_output)
        return None, *(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


def _gradients(tiles: list[Tile], inputs: tuple[Tensor, ...], output: Tensor, grad_output: Tensor) -> list[Tensor]:
    """Return the gradients of queries, keys, values, and of the prompts' keys and values, in float32 at least."""
    grads = [torch.zeros_like(x, dtype=at_least_float32(x.dtype)) for x in inputs]
    grad_query, grad_key, grad_value, grad_prompt_key, grad_prompt_value = grads
    for tile in tiles:
        query, key, value, weight = _TileInputs.of(tile, inputs)
        rows = slice(tile.start, tile.stop)
        grad_rows = _by_key_head(grad_output[rows].to(value.dtype), key.shape[0])
        inner = (grad_rows.to(weight.dtype) * _by_key_head(output[rows], key.shape[0])).sum(-1, keepdim=True)
        of_value = weight.to(value.dtype).transpose(1, 2) @ grad_rows
        grad_score = (grad_rows @ value.transpose(1, 2)).to(weight.dtype)
        grad_score = grad_score.sub_(inner).mul_(weight).to(key.dtype)
        grad_query[rows] = _by_query(grad_score @ key, tile.stop - tile.start).to(grad_query.dtype)
        of_key = grad_score.transpose(1, 2) @ query
        for of_all, own, prompt in ((of_key, grad_key, grad_prompt_key), (of_value, grad_value, grad_prompt_value)):
            prompt[tile.prompt, :, : tile.prompt_length] += of_all[:, : tile.prompt_length]
            of_own = of_all[:, tile.prompt_length :].transpose(0, 1).to(own.dtype)
            if isinstance(tile.key, slice):
                own[tile.key] += of_own
            else:
                own.index_add_(0, tile.key, of_own)
    return grads
