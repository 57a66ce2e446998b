"""Splits trees into chunks that fit in memory, and lays out each chunk for one forward pass over packed tokens.

A chunk is a run of consecutive distinct responses. It owns the nodes that no earlier chunk owns, and recomputes the few
ancestors of its first response. Its input nodes are those with children: a response's last token needs no forward pass.
Given nodes are inputs only. Prompts are either a cache, computed once for many chunks, or part of the chunk: a path
above each tree. Dimensions: T input tokens, F input nodes, K owned nodes of a chunk, B queries of a tile, A nodes whose
keys they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brorl.activity import Echo
from brorl.arrays import FloatArray, IntArray
from brorl.errors import OutOfMemoryError, first_line
from brorl.model.device import to_device
from brorl.model.flex_attention import BLOCK, few_sizes_multiple, padded_tokens
from brorl.model.kernels import NodeStack, attend_stack, kernels_of
from brorl.model.logits import MAX_LOGITS
from brorl.model.tree_attention import AttentionContext, PromptCache, cast_by_autocast
from brorl.tree import RolloutTree

AttentionChoice = Literal["auto", "tiled"]


@dataclass(frozen=True)
class TreeSlice:
    """The distinct responses [start, stop) of tree number `tree`."""

    tree: int
    start: int
    stop: int


def split_into_chunks(trees: Sequence[RolloutTree], max_nodes: int) -> Iterator[list[TreeSlice]]:
    """Split trees into chunks of consecutive responses, with at most `max_nodes` nodes and as many prompt tokens.

    Recomputed ancestors count toward the limit. A response with more tokens gets its own chunk.
    """
    chunk: list[TreeSlice] = []
    nodes = chunk_prompt_tokens = 0
    for index, tree in enumerate(trees):
        prompt_tokens = len(tree.prompt_ids)
        if chunk_prompt_tokens + prompt_tokens > max_nodes and chunk:
            yield chunk
            chunk, nodes, chunk_prompt_tokens = [], 0, 0
        chunk_prompt_tokens += prompt_tokens
        start = 0
        while True:
            # With the tree's responses up to number i, the chunk has `nodes + tree.leaf[i] + 1` nodes.
            stop = int(np.searchsorted(tree.leaf, max_nodes - nodes))
            stop = max(stop, start if chunk else start + 1)
            if stop >= tree.num_responses:
                break
            yield [*chunk, TreeSlice(index, start, stop)] if stop > start else chunk
            chunk, start, chunk_prompt_tokens = [], stop, prompt_tokens
            nodes = int(tree.total_length[stop] - tree.leaf[stop]) - 1
        chunk.append(TreeSlice(index, start, tree.num_responses))
        nodes += int(tree.leaf[-1]) + 1
    if chunk:
        yield chunk


def prompt_groups(trees: Sequence[RolloutTree], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of trees whose prompts together have at most about `max_tokens` tokens."""
    start, tokens = 0, 0
    for i, tree in enumerate(trees):
        tokens += len(tree.prompt_ids)
        if tokens > max_tokens and i > start:
            yield start, i
            start, tokens = i, len(tree.prompt_ids)
    yield start, len(trees)


def padded_ranges(lengths: Sequence[int], most_tokens: int) -> list[IntArray]:
    """Split rows into ranges of at most `most_tokens` tokens, including padding. A longer row gets its own range."""
    starts, longest = [0], 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if (index + 1 - starts[-1]) * longest > most_tokens and index > starts[-1]:
            starts.append(index)
            longest = length
    return [np.arange(a, b) for a, b in pairwise([*starts, len(lengths)])]


def tree_costs(tree: RolloutTree, cost_per_position: float) -> FloatArray:
    """Return the cost of each distinct response with tree attention, in tokens, shape [L]. Shared tokens count once.

    The first response pays for the prompt. `cost_per_position` is the cost of attending to one token, relative to the
    other work per token.
    """
    prompt_tokens = len(tree.prompt_ids)
    before_M = prompt_tokens + tree.depth
    up_to_M = np.cumsum(1.0 + cost_per_position * before_M)
    cost_L = np.diff(up_to_M[tree.leaf], prepend=0.0)
    cost_L[0] += prompt_tokens + cost_per_position * prompt_tokens * (prompt_tokens - 1) / 2
    return np.maximum(cost_L, 1e-9)  # two responses can end at the same node; the second then adds nothing


def num_tree_tokens(trees: Sequence[RolloutTree]) -> int:
    """Return the number of tokens in a pass with tree attention: prompt tokens, plus nodes with children."""
    return sum(len(tree.prompt_ids) + np.unique(tree.parent[tree.parent >= 0]).size for tree in trees)


def input_nodes(tree: RolloutTree, responses: TreeSlice) -> tuple[IntArray, IntArray]:
    """Return the input nodes of a slice, ancestors first, in preorder, and the nodes that it owns.

    Responses 5 7 and 5 8 9 have nodes 0 to 3. A slice of only the second has inputs [0, 2] (5 and 8) and owns [2, 3].
    """
    begin = int(tree.leaf[responses.start - 1]) + 1 if responses.start else 0
    stop = int(tree.leaf[responses.stop - 1]) + 1
    has_child = tree.parent[begin + 1 : stop] == np.arange(begin, stop - 1)
    ancestors = np.flatnonzero(tree.end[: begin if begin < stop else 0] > begin)
    return np.concatenate([ancestors, begin + np.flatnonzero(has_child)]), np.arange(begin, stop)


class ChunkLayout:
    """The layout of one chunk: its input tokens, their attention, and the nodes whose log-probs it computes.

    A chunk that contains its prompts (`with_prompts`) is padded for `FlexContext`; with `few_sizes`, so that few
    different lengths occur. Other chunks omit the first tokens after the prompts. `offsets` holds the number of nodes
    before each tree.

    Attributes:
        multiple: The length of a chunk with prompts is a multiple of this.
        token_T, position_T: Input tokens, and their positions from the prompt's first token.
        end_T: The end of each token's subtree: token i and its descendants are the slice [i, end[i]).
        logit_rows: Input tokens whose logits are needed, shape [R]; `length_R` response tokens lead up to each.
        target_row: For each owned, sampled node, the entry of `logit_rows` that predicts it, shape [K].
        target_token, target_index: Its token id, and its index among the nodes of all trees, shape [K].
    """

    def __init__(
        self,
        trees: Sequence[RolloutTree],
        offsets: IntArray,
        slices: Sequence[TreeSlice],
        *,
        with_prompts: bool = False,
        few_sizes: bool = False,
    ) -> None:
        tokens, positions, prompts, depths, ends = [], [], [], [], []
        rows, targets, indices = [], [], []
        num_inputs = 0
        for responses in slices:
            tree = trees[responses.tree]
            node_F, owned = input_nodes(tree, responses)
            num_before = np.bincount(node_F + 1, minlength=tree.num_nodes + 1).cumsum()  # inputs before each node
            prompt = np.array(tree.prompt_ids if with_prompts else (), np.int64)
            owned = owned[~tree.given[owned]]
            if not with_prompts:
                owned = owned[tree.parent[owned] >= 0]
            first = num_inputs + prompt.size  # the input token of the first node
            rows.append(first - 1 + num_before[tree.parent[owned] + 1])
            targets.append(tree.token[owned])
            indices.append(offsets[responses.tree] + owned)
            tokens += [prompt, tree.token[node_F]]
            depths += [np.arange(prompt.size) - prompt.size, tree.depth[node_F]]
            positions += [len(tree.prompt_ids) + depth for depth in depths[-2:]]
            prompts.append(np.full(prompt.size + node_F.size, responses.tree))
            num_inputs = first + node_F.size
            ends += [np.full(prompt.size, num_inputs), first + num_before[tree.end[node_F]]]

        row_K = np.concatenate(rows)
        needed_T = np.zeros(num_inputs, np.bool_)
        needed_T[row_K] = True
        self.multiple = few_sizes_multiple(num_inputs) if few_sizes else BLOCK
        num_tokens = padded_tokens(num_inputs, self.multiple) if with_prompts else num_inputs
        padding = np.zeros(num_tokens - num_inputs, np.int64)
        self.position_T = np.concatenate([*positions, padding])
        self.token_T = np.concatenate([*tokens, padding])
        self.logit_rows = np.flatnonzero(needed_T)
        self.target_row = (needed_T.cumsum() - 1)[row_K]
        self.target_token = np.concatenate(targets)
        self.target_index = np.concatenate(indices)
        self._prompt_T, self._depth_T = np.concatenate(prompts), np.concatenate(depths)
        self.end_T = np.concatenate([*ends, np.arange(num_inputs, num_tokens) + 1])
        self.length_R = self._depth_T[self.logit_rows] + 1

    def tree_context(self, cache: PromptCache, attention: AttentionChoice = "auto") -> TreeContext:
        """Return the attention of the input nodes, given the prompts' keys and values."""
        first, stop = int(self._prompt_T[0]), int(self._prompt_T[-1]) + 1
        return TreeContext(
            cache.select(slice(first, stop)), self._prompt_T - first, self._depth_T, self.end_T, attention
        )


class TreeContext(AttentionContext):
    """Attention of input nodes to their prompt and their ancestors, computed by the C kernels or else in tiles.

    `prompt_F` is the prompt of each input node, and `depth_F` its depth, 0 for the first token after the prompt.
    `end_F` is the end of its subtree among the input nodes.
    """

    def __init__(
        self,
        prompts: PromptCache,
        prompt_F: IntArray,
        depth_F: IntArray,
        end_F: IntArray,
        attention: AttentionChoice = "auto",
    ) -> None:
        self.longest = int(prompts.key[0].shape[2]) + int(depth_F.max()) + 1
        self._prompts = prompts
        self._prompt_F, self._depth_F, self._end_F = prompt_F, depth_F, end_F
        self._choice = attention
        self._attend: Callable[..., Tensor] | None = None  # chosen at the first layer, based on its heads and dtype

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, _window: int | None = None, /
    ) -> Tensor:
        """Return the attention to the prompt and to the path; see `AttentionContext.attend`."""
        if self._attend is None:
            self._attend = self._choose_attention(query_THD, value_TKD)
        inputs = cast_by_autocast(query_THD, key_TKD, value_TKD, self._prompts.key[layer], self._prompts.value[layer])
        with torch.autocast(query_THD.device.type, enabled=False):
            return self._attend(*inputs)

    def _choose_attention(self, query_THD: Tensor, value_TKD: Tensor) -> Callable[..., Tensor]:
        """Choose the function that computes attention from queries, keys, values, and the prompts' keys and values."""
        compiled = kernels_of(query_THD) if query_THD.shape[2] == value_TKD.shape[2] else None
        if self._choice == "auto" and compiled is not None and not torch.is_autocast_enabled("cpu"):
            return partial(attend_stack, compiled, NodeStack(self._prompt_F, self._depth_F, self._prompts.length))
        nodes = self._prompt_F, self._depth_F, self._end_F
        return partial(_attend_in_tiles, list(_tiles(self._prompts, *nodes, query_THD.shape[1])))


SCORES_PER_TILE = 1 << 25
_MAX_QUERIES = 256  # with more, a tile reads too many keys that only a few of its queries see


class _Tile(NamedTuple):
    """A run of consecutive nodes of one prompt. Only one tile's scores are in memory at a time."""

    prompt: int  # number of the prompt
    prompt_length: int  # tokens of the prompt
    start: int  # first node
    stop: int  # node after the last
    key_A: Tensor  # nodes whose keys are read, ascending: ancestors of the first node, then the tile
    end_A: Tensor  # end of the subtree of each of these nodes

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *prompts: Tensor) -> Tensor:
        """Return the attention of the tile's nodes, shape [B, H, E]."""
        prompt_keys, prompt_values = prompts
        key = self._with_prompt(prompt_keys, key_TKD)
        value = self._with_prompt(prompt_values, value_TKD)
        node_B1 = torch.arange(self.start, self.stop, device=self.key_A.device)[:, None]
        seen = torch.nn.functional.pad(
            (self.key_A <= node_B1) & (node_B1 < self.end_A), (self.prompt_length, 0), value=True
        )
        query = query_THD[self.start : self.stop].transpose(0, 1)[None]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=1.0, enable_gqa=True
        )
        return output[0].transpose(0, 1)

    def _with_prompt(self, prompts: Tensor, own_TKD: Tensor) -> Tensor:
        """Return the keys or values of the prompt, followed by those of the nodes that are read."""
        nodes_KAD = own_TKD.index_select(0, self.key_A).transpose(0, 1)
        return torch.cat([prompts[self.prompt, :, : self.prompt_length], nodes_KAD], 1)[None]


def _tiles(
    prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray, end_F: IntArray, num_heads: int
) -> Iterator[_Tile]:
    """Yield the tiles of a chunk's input nodes, given each node's prompt, depth and end of its subtree, shape [F]."""
    lengths = prompts.length.tolist()
    longest = max(lengths) + int(depth_F.max()) + 1 + _MAX_QUERIES
    queries = max(1, min(_MAX_QUERIES, SCORES_PER_TILE // (num_heads * longest)))
    on_path = np.zeros(int(depth_F.max()) + 1, np.int64)  # latest node at each depth
    edges = np.flatnonzero(np.diff(prompt_F, prepend=-1))
    for first, last in zip(edges.tolist(), [*edges[1:].tolist(), prompt_F.size], strict=True):
        for start in range(first, last, queries):
            stop = min(start + queries, last)
            key_A = np.concatenate([on_path[: depth_F[start]], np.arange(start, stop)])
            on_path[depth_F[start:stop]] = np.arange(start, stop)  # for repeated indices, numpy keeps the last
            prompt = int(prompt_F[start])
            arrays = (to_device(array, prompts.device) for array in (key_A, end_F[key_A]))
            yield _Tile(prompt, lengths[prompt], start, stop, *arrays)


def _attend_in_tiles(tiles: list[_Tile], *inputs: Tensor) -> Tensor:
    """Return the attention for the inputs of `_Tile.attend`. With gradients, the backward pass recomputes it."""
    if not torch.is_grad_enabled():
        return torch.cat([tile.attend(*inputs) for tile in tiles])
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(tile.attend, *inputs) for tile in tiles])


_DEFAULT_NODES = 1024
_DEFAULT_NODES_ON_CUDA = 16384  # a chunk starts hundreds of kernels per layer, regardless of its size


def default_max_nodes(model: PreTrainedModel, *, whole_logits: bool = False, device: str | None = None) -> int:
    """Return the maximum nodes per chunk: 1024, or 16384 on CUDA; fewer for whole logits of a large vocabulary."""
    nodes = _DEFAULT_NODES_ON_CUDA if (device or model.device.type) == "cuda" else _DEFAULT_NODES
    vocabulary: int = model.config.get_text_config().vocab_size
    return max(128, min(nodes, MAX_LOGITS // vocabulary)) if whole_logits else nodes


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory, so all ranks restart the work."""


class PassSync:
    """Keeps the passes of all ranks in step. This base class is for a single process, which has nothing to sync."""

    def finish(self) -> None:
        """When this rank's work is done, make the passes that other ranks still need."""

    def fail(self) -> None:
        """Report that this rank ran out of memory."""

    def any(self, failed: bool) -> bool:
        """Return whether work failed on any rank."""
        return failed


T = TypeVar("T")

MIN_NODES = 16
_MESSAGES = ("can't allocate memory", "DefaultCPUAllocator")  # on the CPU; CUDA has its own error class


class ChunkSize:
    """The maximum number of nodes in a forward pass. It only ever shrinks, and affects memory use but not results.

    All ranks halve it together. `retries` counts the halvings since it was last reset to 0. `free` frees memory that
    passes of the current size keep.
    """

    def __init__(
        self, initial: int, echo: Echo, passes: PassSync | None = None, free: Callable[[], None] = lambda: None
    ) -> None:
        self.initial = self.value = initial
        self.retries = 0
        self._echo = echo
        self._passes = passes or PassSync()
        self._free = free

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads `value`. If memory runs out, restart it with half the nodes."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
                on_this_rank = not isinstance(error, PeerOutOfMemoryError)
            # After the handler, the failed pass and its tensors are freed.
            if on_this_rank:
                self._passes.fail()
            self._halve(reason)

    def once(self, work: Callable[[], object]) -> None:
        """Do work that cannot be restarted, and raise an error if memory runs out on any rank."""
        reason = None
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        if self._passes.any(reason is not None):
            raise OutOfMemoryError(too_little_memory(self.value, reason or "on another rank"))

    def restrict(self, value: int) -> None:
        """Shrink to the size that an earlier part of the run ended with."""
        self.value = min(self.value, value)

    def _halve(self, reason: str) -> None:
        self._free()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if self.value <= MIN_NODES:
            raise OutOfMemoryError(too_little_memory(self.value, reason))
        half = max(MIN_NODES, self.value // 2)
        self._echo(f"out of memory with {self.value} tree nodes per pass; retrying with engine.nodes_per_pass: {half}")
        self.value = half
        self.retries += 1


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch ran out of memory, on a device or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in _MESSAGES)


def too_little_memory(nodes: int, reason: str) -> str:
    """Return the out-of-memory message, including the settings that save memory."""
    return (
        f"out of memory while training with {nodes} tree nodes per pass ({reason}), with no more retries; lower "
        "engine.nodes_per_pass if it is set, switch on engine.gradient_checkpointing or reference.offload, set "
        "optimizer.states: 8bit or host, train adapters (lora.rank), lower engine.memory_gib, or choose a smaller model"
    )
