"""Splits trees into chunks that fit in memory, and lays out each chunk for one packed forward pass.

A chunk is a run of consecutive distinct responses. It owns the nodes that no earlier chunk owns, and computes the few
ancestors of its first response again. Its input nodes are those with children: a response's last token needs no forward
pass. The prompts of a chunk are computed once for many chunks, as a cache, or they are tokens of the chunk, each a path
on top of its tree.

Dimensions: T input tokens, F input nodes, K owned nodes of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor

from brorl.arrays import IntArray
from brorl.model.device import to_device
from brorl.model.flex_attention import ForestAttention, padded_tokens
from brorl.model.kernels import PackedNodes, kernels_of
from brorl.model.stack_attention import StackAttention
from brorl.model.tiled_attention import TiledAttention
from brorl.model.tree_attention import PromptCache, cast_by_autocast
from brorl.tree import RolloutTree

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
        self._attention: StackAttention | TiledAttention | None = None  # needs the number of heads and the dtype

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Return the attention to the prompt and to the path; see `AttentionContext.attend`."""
        if self._attention is None:
            self._attention = self._made(query_THD, value_TKD)
        inputs = cast_by_autocast(query_THD, key_TKD, value_TKD, self._prompts.key[layer], self._prompts.value[layer])
        with torch.autocast(query_THD.device.type, enabled=False):
            return self._attention.attend(*inputs)

    def _made(self, query_THD: Tensor, value_TKD: Tensor) -> StackAttention | TiledAttention:
        kernels = kernels_of(query_THD) if query_THD.shape[2] == value_TKD.shape[2] else None
        match self._choice:
            case "auto" if kernels is not None and not torch.is_autocast_enabled("cpu"):
                nodes = PackedNodes(self._prompt_F, self._depth_F, self._prompts.length)
                return StackAttention(kernels, nodes)
            case "auto" | "tiled":
                return TiledAttention(self._prompts, self._prompt_F, self._depth_F, query_THD.shape[1])
            case _:
                assert_never(self._choice)
