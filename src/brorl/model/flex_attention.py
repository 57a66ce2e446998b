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

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from brorl.arrays import IntArray
from brorl.model.compilation import compiled
from brorl.model.tree_attention import AttentionContext, HooksError, cast_by_autocast

BLOCK = 128
MIN_TOKENS = 2 * BLOCK
QUERIES_PER_COPY = 8  # blocks of queries that see one copy of a block of keys; more if there would be many copies
MAX_COPIES = 256  # about twice as many as a GPU has multiprocessors


def padded_tokens(num_tokens: int, multiple: int = BLOCK) -> int:
    """Return the padded length of a pass over this many tokens, a multiple of BLOCK and of `multiple`."""
    return max(MIN_TOKENS, -(-num_tokens // multiple) * multiple)


def few_sizes_multiple(num_tokens: int) -> int:
    """Return the multiple to which the sizes of a pass are rounded up so that few different ones occur.

    It is an eighth of the power of two below, so padding adds at most an eighth, but at least a block.
    """
    return BLOCK * max(1, (1 << (num_tokens // BLOCK).bit_length()) // 16)


def copied_tokens(num_tokens: int, context: int) -> int:
    """Return about how many tokens' keys a pass copies at most, given the tokens of a prompt plus its response."""
    num_pairs = padded_tokens(num_tokens) // BLOCK * (context // BLOCK + 2)  # a path ends and begins inside of a block
    return BLOCK * min(MAX_COPIES, num_pairs // QUERIES_PER_COPY)


class Copies(NamedTuple):
    """The blocks of keys, followed by the copies. Each field has shape [E]. A query sees only one copy of a block."""

    source: IntArray  # the block that each entry copies; the first B entries are the blocks themselves
    first: IntArray  # the first block of queries that sees the entry
    stop: IntArray  # one past the last block of queries that sees the entry

    @classmethod
    def of(cls, stop_B: IntArray, multiple: int) -> Copies:
        """Return the copies, whose number is a multiple. Block b is seen by the queries of blocks b to `stop_B[b]`."""
        block_B = np.arange(stop_B.size)
        seen_B = stop_B - block_B  # blocks of queries
        # a block that n blocks see has ceil(n / size) - 1 copies, and the sum of n / size is at most MAX_COPIES
        size = max(QUERIES_PER_COPY, -(-int(seen_B.sum()) // MAX_COPIES))
        num_runs_B = -(-seen_B // size)
        source = np.repeat(block_B, num_runs_B)
        number = np.arange(source.size) - np.repeat(num_runs_B.cumsum() - num_runs_B, num_runs_B)
        first = source + size * number
        runs = np.stack([source, first, np.minimum(first + size, stop_B[source])])
        num_copies = source.size - stop_B.size
        # at least one: `torch.compile` would treat equal numbers of tokens and keys as one
        num_padded = -(-max(1, num_copies) // multiple) * multiple
        unseen = np.zeros((3, num_padded - num_copies), np.int64)  # no query sees these
        return cls(*np.concatenate([runs[:, number == 0], unseen, runs[:, number > 0]], axis=1))


@dataclass(frozen=True)
class FlexLayout:
    """The attention of a packed pass in the host's memory."""

    longest: int  # tokens of the longest context that a token attends to
    window: int | None  # the model's sliding window in tokens
    arrays: tuple[IntArray, ...]  # the arguments of `FlexContext`

    @classmethod
    def of(cls, position_T: IntArray, end_T: IntArray, window: int | None, multiple: int = 1) -> FlexLayout:
        """Lay out tokens: trees one after another, each in preorder, then padding with position 0.

        `padded_tokens` returns the length, and `end_T` is the end of each token's subtree. The number of copies is a
        multiple of `multiple`.
        """
        end_BT, position_BT = end_T.reshape(-1, BLOCK), position_T.reshape(-1, BLOCK)
        copies = Copies.of(-(-end_BT.max(1) // BLOCK), multiple)
        token = (copies.source[:, None] * BLOCK + np.arange(BLOCK)).ravel()  # token of each key
        first, stop = (np.repeat(block_E * BLOCK, BLOCK) for block_E in (copies.first, copies.stop))
        keys = np.stack([np.maximum(token, first), np.minimum(end_T[token], stop), position_T[token]])
        # All keys of a block are seen by the blocks of queries after it that lie in the subtrees of all these keys.
        first_whole = np.maximum(copies.first, copies.source + 1)
        stop_whole = np.minimum(copies.stop, (end_BT.min(1) // BLOCK)[copies.source])
        entries = np.stack([copies.source, copies.first, copies.stop, first_whole, stop_whole])
        blocks = np.stack([position_BT.min(1), position_BT.max(1)])
        return cls(int(position_T.max()) + 1, window, (keys.astype(np.int32), entries, blocks))


def block_lists(touched_BE: Tensor, whole_BE: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the kernel reads, given the pairs of blocks where some query sees some key, and those where all do.

    Each list is for masked keys, whole keys, masked queries and whole queries. The first has how many blocks each row
    lists, shape [1, 1, B] or [1, 1, E]. The second has all blocks of each row, listed ones first, shape [1, 1, B, E]
    for keys and [1, 1, E, B] for queries. All are int32.
    """
    masked_BE = touched_BE & ~whole_BE
    lists = [listed[None, None].contiguous() for listed in (masked_BE, whole_BE, masked_BE.T, whole_BE.T)]
    counts = [listed.sum(3, dtype=torch.int32) for listed in lists]
    orders = [listed.argsort(dim=3, descending=True, stable=True).int() for listed in lists]
    return counts, orders


def _attend(options: str, *inputs: Tensor, **named: Any) -> Tensor:
    """Call FlexAttention with kernel options such as `bwd_BLOCK_M1=32 bwd_BLOCK_N1=64`."""
    # A graph would have numbers as inputs. It has a string as a constant, and so the numbers in it.
    numbers = {name: int(number) for name, number in (option.split("=") for option in options.split())}
    kernel: Any = flex_attention
    output: Tensor = kernel(*inputs, kernel_options=numbers or None, **named)
    return output


class FlexContext(AttentionContext):
    """The attention in a packed pass. Its tensors are inputs to a compiled layer. All layers are alike.

    Args:
        layout: The layout.
        key_3X: For each key, the first query that sees it, one past the last, and its position, int32.
        entry_5E: For each entry, the block that it copies, then the blocks of queries [first, stop) that see some of
            its keys, and those that see all of its keys.
        position_2B: The smallest and the largest position in each block.
        options: The kernel's options; see `choose_flex_options`.
    """

    def __init__(
        self, layout: FlexLayout, key_3X: Tensor, entry_5E: Tensor, position_2B: Tensor, *, options: str = ""
    ) -> None:
        self.longest = layout.longest
        self._options = options
        # a compiled layer would be compiled again for views in other places
        self._first, self._stop, self._position = (row.clone() for row in key_3X)
        source_E, first_touched_E, stop_touched_E, first_whole_E, stop_whole_E = entry_5E
        block_B = torch.arange(position_2B.shape[1], device=source_E.device)
        block_B1 = block_B[:, None]
        self._key_token = (source_E[:, None] * BLOCK + torch.arange(BLOCK, device=source_E.device)).flatten()
        touched_BE = (first_touched_E <= block_B1) & (block_B1 < stop_touched_E)
        whole_BE = (first_whole_E <= block_B1) & (block_B1 < stop_whole_E)
        self._lists: dict[int | None, tuple[list[Tensor], list[Tensor]]] = {None: block_lists(touched_BE, whole_BE)}
        if layout.window is not None:  # the lists are bounds, from the positions of the blocks
            low_B, high_B = position_2B
            touched_BE = touched_BE & (low_B[:, None] - high_B[source_E] < layout.window)
            whole_BE = whole_BE & (high_B[:, None] - low_B[source_E] < layout.window)
            self._lists[layout.window] = block_lists(touched_BE, whole_BE)

    def mask(self, num_tokens: int, num_keys: int, window: int | None) -> BlockMask:
        """Return the mask for layers with the window, or for those without one. `num_keys` includes the copies."""
        first, stop, position = self._first, self._stop, self._position

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen: Tensor = (first[key] <= query) & (query < stop[key])
            return seen if window is None else seen & (position[query] - position[key] < window)

        lists = self._lists.get(window)
        if lists is None:
            raise HooksError("a layer has a different sliding window than its model's config")
        counts, indices = lists
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
        attend = _attend if in_graph else compiled(_attend)
        # PyTorch caches no graph with this block, and in a graph all inputs have autocast's dtype anyway.
        with nullcontext() if torch.compiler.is_compiling() else torch.autocast(device, enabled=False):
            key, value = self._with_copies(key), self._with_copies(value)
            torch._check(key.shape[2] % BLOCK == 0)
            output: Tensor = attend(
                self._options,
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
        """Append the copies of keys or values. The result is [T, K, D] in memory, as products read and write it."""
        x_TKD = x_1KTD.transpose(1, 2).flatten(0, 1)
        copied: Tensor = _Copied.apply(x_TKD, self._key_token)  # type: ignore[no-untyped-call]
        return copied[None].transpose(1, 2)


class _Copied(torch.autograd.Function):
    """The keys or values of tokens, in whole blocks. Multiplying by zeros and ones sums gradients in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TKD: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        ctx.shape = x_TKD.shape
        return x_TKD[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        [token] = ctx.saved_tensors
        copied_E = token[::BLOCK]
        first_B = torch.arange(0, ctx.shape[0], BLOCK, device=token.device)
        is_copied_BE = (first_B[:, None] == copied_E).to(grad.dtype)
        grad_EX = grad.reshape(copied_E.shape[0], -1)  # X numbers per block
        return (is_copied_BE @ grad_EX).view(ctx.shape), None
