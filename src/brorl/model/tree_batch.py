"""Splits trees into chunks that fit in memory, and lays out each chunk for one packed forward pass.

A chunk is a run of consecutive distinct responses. It owns the nodes that no earlier chunk owns, and computes the few
ancestors of its first response again. Its input nodes are those with children: a response's last token needs no forward
pass. The prompts of a chunk are computed once for many chunks, as a cache, or they are tokens of the chunk, each a path
on top of its tree.

Dimensions: T input tokens, F input nodes, K owned nodes of a chunk, B queries of a tile, U of its keys that some of its
queries do not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.arrays import IntArray
from brorl.model.device import at_least_float32, to_device
from brorl.model.flex_attention import ForestAttention, padded_tokens
from brorl.model.kernels import PackedNodes, attend_stack, kernels_of
from brorl.model.tree_attention import PromptCache, cast_by_autocast
from brorl.tree import RolloutTree, subtree_ends

AttentionChoice = Literal["auto", "tiled"]


@dataclass(frozen=True)
class TreeSlice:
    """The distinct responses [start, stop) of tree number `tree`."""

    tree: int
    start: int
    stop: int


def split_into_chunks(trees: Sequence[RolloutTree], max_nodes: int) -> Iterator[list[TreeSlice]]:
    """Split trees into chunks of consecutive responses, of at most `max_nodes` nodes and as many tokens of prompts.

    Ancestors that a chunk computes again count. A single response with more tokens is one chunk.
    """
    chunk: list[TreeSlice] = []
    nodes = prompts = 0
    for number, tree in enumerate(trees):
        new_L = np.diff(tree.leaf, prepend=-1).tolist()
        path_L = tree.length.tolist()
        start, prompt = 0, len(tree.prompt_ids)
        if prompts + prompt > max_nodes and chunk:
            yield chunk
            chunk, nodes, prompts = [], 0, 0
        prompts += prompt
        for leaf in range(tree.num_responses):
            if nodes + new_L[leaf] > max_nodes and (leaf > start or chunk):
                yield [*chunk, TreeSlice(number, start, leaf)] if leaf > start else chunk
                chunk, start, nodes, prompts = [], leaf, path_L[leaf] - new_L[leaf], prompt
            nodes += new_L[leaf]
        chunk.append(TreeSlice(number, start, tree.num_responses))
    if chunk:
        yield chunk


@dataclass(frozen=True)
class ChunkInputs:
    """The input nodes of one slice, ancestors first, in preorder."""

    node_F: IntArray  # their indices in the tree, shape [F]
    owned: slice  # the range of tree nodes that the slice owns

    @classmethod
    def of(cls, tree: RolloutTree, responses: TreeSlice) -> ChunkInputs:
        """Find the input nodes of a slice of a tree."""
        begin = int(tree.leaf[responses.start - 1]) + 1 if responses.start else 0
        stop = int(tree.leaf[responses.stop - 1]) + 1
        has_child = tree.parent[begin + 1 : stop] == np.arange(begin, stop - 1)
        inner = begin + np.flatnonzero(has_child)
        above = int(tree.parent[begin]) if begin < stop else -1
        node_F = np.concatenate([tree.path(above), inner]) if above >= 0 else inner
        return cls(node_F, slice(begin, stop))


class TreeBatch:
    """The layout of one chunk: its input tokens, their attention, and the nodes whose log-probs it computes.

    Args:
        trees: P trees.
        offsets: Number of nodes in the trees before each tree, shape [P].
        slices: The slices of the chunk.
        device: The device of the model.
        with_prompts: Whether the chunk computes the prompts of its slices. It is then padded for `ForestAttention`.
            Otherwise it computes no first tokens after prompts.

    Attributes:
        token_T: Token ids of the input tokens, shape [T].
        position_T: Their positions, counted from the prompt's first token, shape [T].
        logit_rows: Input tokens whose logits are needed, shape [R].
        length_R: Tokens of the response down to each of them, shape [R].
        target_row: For each owned node, the entry of `logit_rows` that predicts it, shape [K].
        target_token: Its token id, shape [K].
        target_index: Its number among the nodes of all trees, shape [K].
    """

    def __init__(
        self,
        trees: Sequence[RolloutTree],
        offsets: IntArray,
        slices: Sequence[TreeSlice],
        device: torch.device,
        *,
        with_prompts: bool = False,
    ) -> None:
        tokens, positions, prompts, depths = [], [], [], []
        rows, targets, indices = [], [], []
        num_inputs = 0
        for responses in slices:
            tree = trees[responses.tree]
            inputs = ChunkInputs.of(tree, responses)
            owned = np.arange(inputs.owned.start, inputs.owned.stop)
            prompt = np.array(tree.prompt_ids if with_prompts else (), np.int64)
            if not with_prompts:
                owned = owned[tree.parent[owned] >= 0]
            parent_K = tree.parent[owned]
            row_K = np.where(parent_K < 0, -1, np.searchsorted(inputs.node_F, parent_K))
            rows.append(num_inputs + prompt.size + row_K)
            targets.append(tree.token[owned])
            indices.append(offsets[responses.tree] + owned)
            tokens += [prompt, tree.token[inputs.node_F]]
            depths += [np.arange(prompt.size) - prompt.size, tree.depth[inputs.node_F]]
            positions += [len(tree.prompt_ids) + depth for depth in depths[-2:]]
            prompts.append(np.full(prompt.size + inputs.node_F.size, responses.tree))
            num_inputs += prompt.size + inputs.node_F.size

        row_K = np.concatenate(rows)
        logit_rows = np.unique(row_K)
        padding = (0, padded_tokens(num_inputs) - num_inputs if with_prompts else 0)
        self._position_T = np.pad(np.concatenate(positions), padding)
        self.token_T = to_device(np.pad(np.concatenate(tokens), padding), device)
        self.position_T = to_device(self._position_T, device)
        self.logit_rows = to_device(logit_rows, device)
        self.target_row = to_device(np.searchsorted(logit_rows, row_K), device)
        self.target_token = to_device(np.concatenate(targets), device)
        self.target_index = to_device(np.concatenate(indices), device)
        self._prompt_T, self._depth_T = np.concatenate(prompts), np.concatenate(depths)
        self.length_R = to_device(self._depth_T[logit_rows] + 1, device)

    def context(self, cache: PromptCache, attention: AttentionChoice = "auto") -> TreeContext:
        """Return the attention of the input nodes, given the prompts' keys and values."""
        first, stop = int(self._prompt_T[0]), int(self._prompt_T[-1]) + 1
        return TreeContext(cache.select(slice(first, stop)), self._prompt_T - first, self._depth_T, attention)

    def forest(self, window: int | None) -> ForestAttention:
        """Return the attention of the tokens of a chunk with prompts, given the model's sliding window."""
        return ForestAttention(self._position_T, window, self.token_T.device)


class TreeContext:
    """Attention of input nodes to their prompt and to their ancestors: by the compiled kernels, or else in tiles.

    Args:
        prompts: Keys and values of the prompts.
        prompt_F: Prompt of each input node, shape [F].
        depth_F: Depth of each input node, 0 for the first token after the prompt, shape [F].
        attention: Whether the kernels are used where they can be.
    """

    def __init__(
        self, prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray, attention: AttentionChoice = "auto"
    ) -> None:
        self.longest = int(prompts.key[0].shape[2]) + int(depth_F.max()) + 1
        self._prompts = prompts
        self._prompt_F, self._depth_F = prompt_F, depth_F
        self._choice = attention
        self._attend: Callable[..., Tensor] | None = None  # needs the number of heads and the dtype

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Return the attention to the prompt and to the path; see `AttentionContext.attend`."""
        if self._attend is None:
            self._attend = self._made(query_THD, value_TKD)
        inputs = cast_by_autocast(query_THD, key_TKD, value_TKD, self._prompts.key[layer], self._prompts.value[layer])
        with torch.autocast(query_THD.device.type, enabled=False):
            return self._attend(*inputs)

    def _made(self, query_THD: Tensor, value_TKD: Tensor) -> Callable[..., Tensor]:
        """Return the attention, given queries, keys and values, and the prompts' keys and values."""
        compiled = kernels_of(query_THD) if query_THD.shape[2] == value_TKD.shape[2] else None
        if self._choice == "auto" and compiled is not None and not torch.is_autocast_enabled("cpu"):
            return partial(attend_stack, compiled, PackedNodes(self._prompt_F, self._depth_F, self._prompts.length))
        return partial(_attend_in_tiles, _tiles(self._prompts, self._prompt_F, self._depth_F, query_THD.shape[1]))


SCORES_PER_TILE = 1 << 25
_MAX_QUERIES = 256  # more queries than this read too many keys that they do not see


@dataclass(frozen=True)
class Tile:
    """A run of consecutive nodes of one prompt, and the keys that they read.

    These are the prompt, ancestors of the first node, and nodes of the tile. Scores exist for one tile only.
    """

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


def _tiles(prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray, num_heads: int) -> list[Tile]:
    """Return the tiles of the input nodes of a chunk, given the prompt and the depth of each, shape [F]."""
    lengths = prompts.length.tolist()
    longest = max(lengths) + int(depth_F.max()) + 1
    room = SCORES_PER_TILE // num_heads  # B (longest + B) scores of a head
    queries = max(1, min(_MAX_QUERIES, (isqrt(longest**2 + 4 * room) - longest) // 2))
    end_F = subtree_ends(depth_F)
    on_path = np.zeros(int(depth_F.max()) + 1, np.int64)  # the last node so far at each depth
    edges = np.flatnonzero(np.diff(prompt_F, prepend=-1))
    tiles = []
    for first, last in zip(edges.tolist(), [*edges[1:].tolist(), prompt_F.size], strict=True):
        for start in range(first, last, queries):
            stop = min(start + queries, last)
            key = np.concatenate([on_path[: depth_F[start]], np.arange(start, stop)])
            on_path[depth_F[start:stop]] = np.arange(start, stop)  # numpy keeps the last of repeated indices
            seen_by_all = (key <= start) & (end_F[key] >= stop)
            node_U = key[key.size if seen_by_all.all() else int(np.argmin(seen_by_all)) :]
            contiguous = int(key[-1] - key[0]) + 1 == key.size
            keys = slice(int(key[0]), stop) if contiguous else to_device(key, prompts.device)
            unseen = (to_device(array, prompts.device) for array in (node_U, end_F[node_U]))
            prompt = int(prompt_F[start])
            tiles.append(Tile(prompt, lengths[prompt], start, stop, keys, *unseen))
    return tiles


def _attend_in_tiles(tiles: list[Tile], *inputs: Tensor) -> Tensor:
    """Return the attention, given queries, keys and values, and the prompts' keys and values."""
    output: Tensor = _AttendInTiles.apply(tiles, *inputs)  # type: ignore[no-untyped-call]
    return output


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


class _AttendInTiles(torch.autograd.Function):
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
