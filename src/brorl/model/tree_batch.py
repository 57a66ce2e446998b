"""Splits trees into chunks that fit in memory, and lays out each chunk for one packed forward pass.

A chunk is a run of consecutive distinct responses. It owns the nodes that no earlier chunk owns, and computes the few
ancestors of its first response again. Its input nodes are those with children: a response's last token needs no forward
pass. They form chains (a node, its first child, that child's first child, ...). A chain of at most W nodes is a row of
queries. The keys of the row are the path from the prompt to the end of the chain.

Dimensions: F input nodes, C chains, W queries per chain, T longest path, K owned nodes of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor

from brorl.model.chain_attention import ChainAttention, split_into_chains
from brorl.model.device import to_device
from brorl.model.flex_attention import FlexAttention
from brorl.model.kernels import PackedNodes, kernels_of
from brorl.model.stack_attention import StackAttention
from brorl.model.tiled_attention import TiledAttention
from brorl.model.tree_attention import PromptCache, cast_by_autocast
from brorl.tree import IntArray, RolloutTree

AttentionChoice = Literal["auto", "tiled", "flex"]
MAX_CHAIN_SCORES = 1 << 26  # of a layer, all heads; more are computed in tiles
_KEYS_PER_NODE = 64  # a chunk gathers at most this many keys per owned node, on average


@dataclass(frozen=True)
class TreeSlice:
    """The distinct responses [start, stop) of tree number `tree`."""

    tree: int
    start: int
    stop: int


def split_into_chunks(trees: Sequence[RolloutTree], max_nodes: int) -> Iterator[list[TreeSlice]]:
    """Split trees into chunks of consecutive responses that own at most about `max_nodes` nodes.

    A single response longer than that is one chunk.
    """
    chunk: list[TreeSlice] = []
    room, keys = max_nodes, 0
    for number, tree in enumerate(trees):
        new_L = np.diff(tree.leaf, prepend=-1)
        path_L = tree.length
        start = 0
        for leaf in range(tree.num_responses):
            keys += int(path_L[leaf])
            full = new_L[leaf] > room or keys > max_nodes * _KEYS_PER_NODE
            if full and (leaf > start or chunk):
                yield [*chunk, TreeSlice(number, start, leaf)] if leaf > start else chunk
                chunk, start, room, keys = [], leaf, max_nodes, int(path_L[leaf])
            room -= int(new_L[leaf])
        chunk.append(TreeSlice(number, start, tree.num_responses))
    if chunk:
        yield chunk


@dataclass(frozen=True)
class ChunkInputs:
    """The input nodes of one slice, ancestors first, in preorder."""

    node_F: IntArray  # their indices in the tree, shape [F]
    parent_F: IntArray  # their parents as positions in `node_F`, shape [F]; -1 for the first token after the prompt
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
        parent_F = np.searchsorted(node_F, tree.parent[node_F])
        return cls(node_F, np.where(tree.parent[node_F] >= 0, parent_F, -1), slice(begin, stop))


class TreeBatch:
    """The layout of one chunk: its input nodes, their attention, and the nodes whose log-probs it computes.

    Args:
        trees: P trees.
        offsets: Number of nodes in the trees before each tree, shape [P].
        slices: The slices of the chunk.
        cache: Keys and values of the P prompts.

    Attributes:
        token_F: Token ids of the input nodes, shape [F].
        position_F: Their positions, counted from the prompt's first token, shape [F].
        logit_rows: Input nodes whose logits are needed, shape [R].
        length_R: Tokens of the response down to each of them, shape [R].
        target_row: For each owned node below the first level, the entry of `logit_rows` that predicts it, shape [K].
        target_token: Its token id, shape [K].
        target_index: Its number among the nodes of all trees, shape [K].
    """

    def __init__(
        self, trees: Sequence[RolloutTree], offsets: IntArray, slices: Sequence[TreeSlice], cache: PromptCache
    ) -> None:
        device = cache.device
        tokens, positions, prompts, parents, depths = [], [], [], [], []
        rows, targets, indices = [], [], []
        num_inputs = 0
        for responses in slices:
            tree = trees[responses.tree]
            inputs = ChunkInputs.of(tree, responses)
            owned = np.arange(inputs.owned.start, inputs.owned.stop)
            owned = owned[tree.parent[owned] >= 0]
            rows.append(num_inputs + np.searchsorted(inputs.node_F, tree.parent[owned]))
            targets.append(tree.token[owned])
            indices.append(offsets[responses.tree] + owned)
            tokens.append(tree.token[inputs.node_F])
            depths.append(tree.depth[inputs.node_F])
            positions.append(len(tree.prompt_ids) + depths[-1])
            prompts.append(np.full(inputs.node_F.size, responses.tree))
            parents.append(np.where(inputs.parent_F >= 0, inputs.parent_F + num_inputs, -1))
            num_inputs += inputs.node_F.size

        row_K = np.concatenate(rows)
        logit_rows = np.unique(row_K)
        self.token_F = to_device(np.concatenate(tokens), device)
        self.position_F = to_device(np.concatenate(positions), device)
        self.logit_rows = to_device(logit_rows, device)
        self.target_row = to_device(np.searchsorted(logit_rows, row_K), device)
        self.target_token = to_device(np.concatenate(targets), device)
        self.target_index = to_device(np.concatenate(indices), device)
        self._prompt_F = np.concatenate(prompts)
        self._depth_F, self._parent_F = np.concatenate(depths), np.concatenate(parents)
        self.length_R = to_device(self._depth_F[logit_rows] + 1, device)

    def context(self, cache: PromptCache, attention: AttentionChoice = "auto") -> TreeContext:
        """Return the attention of the input nodes, given the prompts' keys and values."""
        first, stop = int(self._prompt_F[0]), int(self._prompt_F[-1]) + 1
        prompts = cache.select(slice(first, stop))
        return TreeContext(prompts, self._prompt_F - first, self._depth_F, self._parent_F, attention)


NodeAttention = StackAttention | ChainAttention | TiledAttention | FlexAttention


class TreeContext:
    """Attention of input nodes to their prompt and to their ancestors: by kernels, chains, tiles or FlexAttention.

    With `auto`, the compiled kernels are used where they can be, else chains or tiles. Chains are the faster of the
    two. Their scores, of all layers, are in memory until the backward pass. Above `MAX_CHAIN_SCORES` per layer the
    nodes attend by tiles.

    Args:
        prompts: Keys and values of the prompts.
        prompt_F: Prompt of each input node, shape [F].
        depth_F: Depth of each input node, 0 for the first token after the prompt, shape [F].
        parent_F: Position of each node's parent among the input nodes, -1 for none, shape [F].
        attention: How the nodes attend.
    """

    def __init__(
        self,
        prompts: PromptCache,
        prompt_F: IntArray,
        depth_F: IntArray,
        parent_F: IntArray,
        attention: AttentionChoice = "auto",
    ) -> None:
        prompt_tokens = int(prompts.key[0].shape[2])
        self.longest = prompt_tokens + int(depth_F.max()) + 1
        self._prompts = prompts
        self._prompt_F, self._depth_F, self._parent_F = prompt_F, depth_F, parent_F
        start_C, _, width = split_into_chains(parent_F)
        self._scores_per_head = start_C.size * width * (int(depth_F.max()) + 1) + depth_F.size * prompt_tokens
        self._choice = attention
        self._attention: NodeAttention | None = None  # needs the number of heads and the dtype

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        """Return the attention to the prompt and to the path; see `AttentionContext.attend`."""
        if self._attention is None:
            self._attention = self._made(query_THD, value_TKD)
        inputs = cast_by_autocast(query_THD, key_TKD, value_TKD, self._prompts.key[layer], self._prompts.value[layer])
        with torch.autocast(query_THD.device.type, enabled=False):
            return self._attention.attend(*inputs)

    def _made(self, query_THD: Tensor, value_TKD: Tensor) -> NodeAttention:
        num_heads = query_THD.shape[1]
        kernels = kernels_of(query_THD) if query_THD.shape[2] == value_TKD.shape[2] else None
        match self._choice:
            case "flex":
                return FlexAttention(self._prompts, self._prompt_F, self._depth_F)
            case "auto" if kernels is not None and not torch.is_autocast_enabled("cpu"):
                nodes = PackedNodes(self._prompt_F, self._depth_F, self._prompts.length)
                return StackAttention(kernels, nodes)
            case "auto" if self._scores_per_head * num_heads <= MAX_CHAIN_SCORES:
                return ChainAttention(self._prompts, self._prompt_F, self._depth_F, self._parent_F)
            case "auto" | "tiled":
                return TiledAttention(self._prompts, self._prompt_F, self._depth_F, num_heads)
            case _:
                assert_never(self._choice)
