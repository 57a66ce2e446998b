"""Attention of a packed pass with PyTorch's FlexAttention: one kernel per layer, with a block mask made from the trees.

Tokens of a pass are in preorder, prompts included. Token q sees token k if k <= q < end[k], the end of k's subtree.
Tokens of depths [0, 1, 2, 1] have ends [4, 3, 3, 4]: the last token sees the first and itself. With a sliding window,
position[q] - position[k] < window must hold too. Blocks of 128 queries and 128 keys are skipped, masked or used whole.
A pass is padded to whole blocks, because other lengths have produced NaN gradients in PyTorch. It has at least two
blocks, because `torch.compile` compiles sizes of 1 separately. The backward pass sums the gradient of a block of keys
in one loop over the blocks of queries that see it, and all queries of a tree see its prompt. Keys with many such blocks
are therefore copied: at most 8 blocks of queries see each copy, and the gradients of the copies add up.

Off CUDA, PyTorch's uncompiled version runs, which has no backward pass.

Dimensions: T tokens with padding, B blocks of 128 tokens, E blocks of keys: the B blocks, then C copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from brorl.arrays import IntArray
from brorl.model.compilation import compiled
from brorl.model.device import to_device
from brorl.model.tree_attention import AttentionContext, HooksError, cast_by_autocast

BLOCK = 128
MIN_TOKENS = 2 * BLOCK
QUERIES_PER_COPY = 8  # blocks of queries that see one copy of a block of keys
_MIN_COPIES = 2  # as for `MIN_TOKENS`: a size of 1 would be compiled separately


def padded_tokens(num_tokens: int) -> int:
    """Return the padded length of a pass over this many tokens."""
    return max(MIN_TOKENS, -(-num_tokens // BLOCK) * BLOCK)


class Copies(NamedTuple):
    """The blocks of keys, followed by the copies. Each field has shape [E]. A query sees only one copy of a block."""

    source: IntArray  # the block that each entry copies; the first B entries are the blocks themselves
    first: IntArray  # the first block of queries that sees the entry
    stop: IntArray  # one past the last block of queries that sees the entry

    @classmethod
    def of(cls, stop_B: IntArray) -> Copies:
        """Return the copies. Block b is seen by the blocks of queries from b to before `stop_B[b]`."""
        block_B = np.arange(stop_B.size)
        num_runs_B = -(-(stop_B - block_B) // QUERIES_PER_COPY)
        source = np.repeat(block_B, num_runs_B)
        number = np.arange(source.size) - np.repeat(num_runs_B.cumsum() - num_runs_B, num_runs_B)
        first = source + QUERIES_PER_COPY * number
        runs = np.stack([source, first, np.minimum(first + QUERIES_PER_COPY, stop_B[source])])
        unseen = np.zeros((3, _MIN_COPIES), np.int64)  # no query sees these
        parts = [runs[:, number == 0], unseen, runs[:, number > 0]]
        if _MIN_COPIES + source.size == 2 * stop_B.size:  # `torch.compile` treats two initially equal sizes as one
            parts.append(unseen[:, :1])
        return cls(*np.concatenate(parts, axis=1))


class Blocks(NamedTuple):
    """Four lists of blocks for the kernel: masked keys, whole keys, masked queries, whole queries."""

    number: list[Tensor]  # per list: how many blocks each row lists, int32, shape [1, 1, B] or [1, 1, E]
    # per list: all blocks of each row, listed ones first, int32, [1, 1, B, E] for keys, [1, 1, E, B] for queries
    order: list[Tensor]

    @classmethod
    def of(cls, touched_BE: Tensor, whole_BE: Tensor) -> Blocks:
        """Return the lists, given the pairs of blocks where some query sees some key, and those where all see all."""
        masked_BE = touched_BE & ~whole_BE
        lists = [listed.contiguous() for listed in (masked_BE, whole_BE, masked_BE.T, whole_BE.T)]
        return cls(
            [listed.sum(1, dtype=torch.int32)[None, None] for listed in lists],
            [listed.argsort(dim=1, descending=True, stable=True).int()[None, None] for listed in lists],
        )


def block_pairs(
    copies: Copies, end_T: IntArray, position_T: IntArray, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which blocks of queries see any key of an entry, and which see all of its keys, each of shape [B, E].

    With a window, the first is an upper bound and the second a lower bound, from the smallest and largest positions of
    the blocks.
    """
    source_E = copies.source
    end_BT, position_BT = end_T.reshape(-1, BLOCK), position_T.reshape(-1, BLOCK)
    # All keys of a block are seen by the blocks of queries after it that lie in the subtrees of all these keys.
    first = copies.first, np.maximum(copies.first, source_E + 1)
    stop = copies.stop, np.minimum(copies.stop, (end_BT.min(1) // BLOCK)[source_E])
    first_21E, stop_21E = to_device(np.array([first, stop]), device)[:, :, None]
    query_B1 = torch.arange(len(end_BT), device=device)[:, None]
    touched_BE, whole_BE = (first_21E <= query_B1) & (query_B1 < stop_21E)
    if window is not None:
        low_B, high_B = position_BT.min(1), position_BT.max(1)
        low_B1, high_B1 = (to_device(x_B, device)[:, None] for x_B in (low_B, high_B))
        low_E, high_E = (to_device(x_B[source_E], device) for x_B in (low_B, high_B))
        touched_BE &= low_B1 - high_E < window
        whole_BE &= high_B1 - low_E < window
    return touched_BE, whole_BE


class FlexContext(AttentionContext):
    """The attention in a packed pass. Its tensors are inputs to a compiled layer. All layers are alike.

    The trees come one after another, each in preorder, then padding with position 0; `padded_tokens` returns the
    length. `end_T` is the end of each token's subtree. `window` is the model's sliding window in tokens.
    """

    def __init__(self, position_T: IntArray, end_T: IntArray, window: int | None, device: torch.device) -> None:
        self.longest = int(position_T.max()) + 1
        copies = Copies.of(-(-end_T.reshape(-1, BLOCK).max(1) // BLOCK))
        self._blocks = {
            span: Blocks.of(*block_pairs(copies, end_T, position_T, span, device)) for span in {None, window}
        }
        token = (copies.source[:, None] * BLOCK + np.arange(BLOCK)).ravel()  # token of each key
        first, stop = (np.repeat(block_E * BLOCK, BLOCK) for block_E in (copies.first, copies.stop))
        # For each key, the queries that see it and its position; the first keys are the tokens of the pass.
        keys = np.maximum(token, first), np.minimum(end_T[token], stop), position_T[token]
        self._first, self._stop, self._position = (to_device(x.astype(np.int32), device) for x in keys)
        num_blocks = position_T.size // BLOCK
        source_C1 = to_device(copies.source[num_blocks:], device)[:, None]
        self._copied = (source_C1 == torch.arange(num_blocks, device=device)).float()  # [C, B]

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
