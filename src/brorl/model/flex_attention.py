"""Attention of a packed pass with PyTorch's FlexAttention: one kernel per layer, with a block mask made from the trees.

Tokens of a pass are in preorder, prompts included. Token q sees token k if k <= q < end[k], the end of k's subtree.
Tokens of depths [0, 1, 2, 1] have ends [4, 3, 3, 4]: the last token sees the first and itself. With a sliding window,
position[q] - position[k] < window must hold too. Blocks of 128 queries and 128 keys are skipped, masked or used whole.
A pass is padded to whole blocks, because other lengths have produced NaN gradients in PyTorch. It has at least two
blocks, because `torch.compile` compiles sizes of 1 separately. The backward pass sums the gradient of a block of keys
in one loop over the blocks of queries that see it, and all queries of a tree see its prompt. Keys with many such blocks
are therefore copied: few blocks of queries see each copy, and the gradients of the copies add up. In a long response,
all earlier keys have many such blocks, so each copy has more queries, and a pass has at most 256 copies. That suffices:
the longest loop then takes half of one GPU multiprocessor's share of the work.

Off CUDA, PyTorch's uncompiled version runs, which has no backward pass.

Dimensions: T tokens with padding, B blocks of 128 tokens, E blocks of keys: the B blocks, then C copies.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from brorl.arrays import BoolArray, IntArray
from brorl.model.compilation import compiled
from brorl.model.device import to_device
from brorl.model.tree_attention import AttentionContext, HooksError, cast_by_autocast
from brorl.tree import subtree_ends

BLOCK = 128
MIN_TOKENS = 2 * BLOCK
QUERIES_PER_COPY = 8  # blocks of queries that see one copy of a block of keys; more if there would be many copies
MAX_COPIES = 256  # about twice as many as a GPU has multiprocessors
_MIN_COPIES = 2  # as for `MIN_TOKENS`: a size of 1 would be compiled separately


def padded_tokens(num_tokens: int) -> int:
    """Return the padded length of a pass over this many tokens."""
    return max(MIN_TOKENS, -(-num_tokens // BLOCK) * BLOCK)


def copied_tokens(num_tokens: int, context: int) -> int:
    """Return about how many tokens' keys a pass copies at most, given the tokens of a prompt plus its response."""
    num_pairs = padded_tokens(num_tokens) // BLOCK * (context // BLOCK + 2)  # a path ends and begins inside of a block
    return BLOCK * min(MAX_COPIES, num_pairs // QUERIES_PER_COPY)


class Blocks(NamedTuple):
    """Four lists of blocks for the kernel: masked keys, whole keys, masked queries, whole queries."""

    number: list[Tensor]  # per list: how many blocks each row lists, int32, shape [1, 1, B] or [1, 1, E]
    # per list: all blocks of each row, listed ones first, int32, [1, 1, B, E] for keys, [1, 1, E, B] for queries
    order: list[Tensor]

    @classmethod
    def of(cls, touched_BE: BoolArray, whole_BE: BoolArray, device: torch.device) -> Blocks:
        """Return the lists, given the pairs of blocks where some query sees some key, and those where all see all."""
        masked_BE = touched_BE & ~whole_BE
        lists = (masked_BE, whole_BE, masked_BE.T, whole_BE.T)
        orders = [np.argsort(~listed, axis=1, kind="stable") for listed in lists]

        def moved(array: IntArray) -> Tensor:
            return to_device(array.astype(np.int32), device)[None, None]

        return cls([moved(listed.sum(1)) for listed in lists], [moved(order) for order in orders])


def block_pairs(end_T: IntArray, position_T: IntArray, window: int | None) -> tuple[BoolArray, BoolArray]:
    """Return which blocks of queries see any key of a block, and which see all of its keys, each of shape [B, B].

    With a window, the first is an upper bound and the second a lower bound, from the smallest and largest positions of
    the blocks.
    """
    key_T = np.arange(end_T.size)
    end_block = end_T // BLOCK
    touched_BB = _count(key_T // BLOCK, -(-end_T // BLOCK)) > 0
    first_whole = -(-key_T // BLOCK)
    whole_BB = _count(first_whole, np.maximum(first_whole, end_block)) == BLOCK
    if window is not None:
        position_BT = position_T.reshape(-1, BLOCK)
        low_B, high_B = position_BT.min(1), position_BT.max(1)
        touched_BB &= low_B[:, None] - high_B < window
        whole_BB &= high_B[:, None] - low_B < window
    return touched_BB, whole_BB


def _count(first_T: IntArray, stop_T: IntArray) -> IntArray:
    """Count, for [q, k], the keys of block k whose range [first, stop) contains query block q; shape [B, B]."""
    num_blocks = first_T.size // BLOCK
    # Each key adds 1 to its first query block and subtracts 1 after its last; running sums give the counts.
    change = np.zeros((num_blocks + 1, num_blocks), np.int64)
    key_block_T = np.arange(first_T.size) // BLOCK
    np.add.at(change, (first_T, key_block_T), 1)
    np.add.at(change, (stop_T, key_block_T), -1)
    counts: IntArray = change.cumsum(0)[:-1]
    return counts


class Copies(NamedTuple):
    """The blocks of keys, followed by the copies. Each field has shape [E]. A query sees only one copy of a block."""

    source: IntArray  # the block that each entry copies; the first B entries are the blocks themselves
    first: IntArray  # the first block of queries that sees the entry
    stop: IntArray  # one past the last block of queries that sees the entry

    @classmethod
    def of(cls, touched_BB: BoolArray) -> Copies:
        """Return the copies, given the blocks of keys that each block of queries sees."""
        num_blocks = len(touched_BB)
        # a block that n blocks see has ceil(n / size) - 1 copies, and the sum of n / size is at most MAX_COPIES
        size = max(QUERIES_PER_COPY, -(-int(touched_BB.sum()) // MAX_COPIES))
        blocks = []
        copies = [(0, 0, 0)] * _MIN_COPIES  # no query sees these
        for block in range(num_blocks):
            edges = [0, *np.flatnonzero(touched_BB[:, block])[size::size].tolist(), num_blocks]
            first, *further = [(block, *pair) for pair in pairwise(edges)]
            blocks.append(first)
            copies += further
        if len(copies) == num_blocks:  # `torch.compile` treats two initially equal sizes as one
            copies.append(copies[0])
        return cls(*np.array(blocks + copies).T)

    def listed(self, pair_BB: BoolArray) -> BoolArray:
        """Convert pairs (block of queries, block of keys) to pairs (block of queries, entry), shape [B, E]."""
        query_B1 = np.arange(len(pair_BB))[:, None]
        listed_BE: BoolArray = pair_BB[:, self.source] & (self.first <= query_B1) & (query_B1 < self.stop)
        return listed_BE


class FlexContext(AttentionContext):
    """The attention in a packed pass. Its tensors are inputs to a compiled layer. All layers are alike.

    The trees come one after another, each in preorder, then padding with position 0; `padded_tokens` returns the
    length. `window` is the model's sliding window in tokens.
    """

    def __init__(self, position_T: IntArray, window: int | None, device: torch.device) -> None:
        self.longest = int(position_T.max()) + 1
        end_T = subtree_ends(position_T)
        pairs = {span: block_pairs(end_T, position_T, span) for span in {None, window}}
        copies = Copies.of(pairs[None][0])
        self._blocks = {
            span: Blocks.of(copies.listed(touched_BB), copies.listed(whole_BB), device)
            for span, (touched_BB, whole_BB) in pairs.items()
        }
        token = (copies.source[:, None] * BLOCK + np.arange(BLOCK)).ravel()  # token of each key
        first, stop = (np.repeat(block_E * BLOCK, BLOCK) for block_E in (copies.first, copies.stop))
        # For each key, the queries that see it and its position; the first keys are the tokens of the pass.
        keys = np.maximum(token, first), np.minimum(end_T[token], stop), position_T[token]
        self._first, self._stop, self._position = (to_device(x.astype(np.int32), device) for x in keys)
        num_blocks = position_T.size // BLOCK
        self._copied = to_device(np.eye(num_blocks, dtype=np.float32)[copies.source[num_blocks:]], device)  # [C, B]

    def mask(self, num_tokens: int, num_keys: int, window: int | None) -> BlockMask:
        """Return the mask for layers with the window, or for those without one. `num_keys` includes the copies."""
        first, stop, position = self._first, self._stop, self._position

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (first[key] <= query) & (query < stop[key])
            return seen if window is None else seen & (position[query] - position[key] < window)

        blocks = self._blocks.get(window)
        if blocks is None:
            raise HooksError("a layer has a different sliding window than its model's config")
        counts, indices = blocks
        return BlockMask(
            seq_lengths=(num_tokens, num_keys),
            kv_num_blocks=counts[0], kv_indices=indices[0], full_kv_num_blocks=counts[1], full_kv_indices=indices[1],
            q_num_blocks=counts[2], q_indices=indices[2], full_q_num_blocks=counts[3], full_q_indices=indices[3],
            BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees,
        )  # fmt: skip

    def of_heads(
        self, _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Return the attention, also soft-capped; see `AttentionContext.of_heads`."""
        num_tokens = query.shape[2]
        device = query.device.type
        torch._check(num_tokens % BLOCK == 0)  # the compiled kernel then needs no bounds checks
        query, key, value = cast_by_autocast(query, key, value)

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        in_graph = torch.compiler.is_compiling() or device != "cuda"
        kernel: Any = flex_attention if in_graph else compiled(flex_attention)
        with torch.autocast(device, enabled=False):
            key, value = self._with_copies(key), self._with_copies(value)
            torch._check(key.shape[2] % BLOCK == 0)
            output: Tensor = kernel(
                query,
                key,
                value,
                score_mod=None if softcap is None else capped,
                block_mask=self.mask(num_tokens, key.shape[2], window),
                scale=scale,
                enable_gqa=True,
            )
        return output.transpose(1, 2)

    def _with_copies(self, x_1KTD: Tensor) -> Tensor:
        """Append the copies of keys or values. Multiplying by zeros and ones sums gradients in a fixed order."""
        blocks = x_1KTD[0].unflatten(1, (-1, BLOCK))
        copies = torch.einsum("cb,kbtd->kctd", self._copied.to(x_1KTD.dtype), blocks).flatten(1, 2)
        return torch.cat([x_1KTD, copies[None]], 2)
