"""Attention of chunks by PyTorch's FlexAttention: one kernel per layer, with the tree as its block mask.

On CUDA the kernel is compiled, and no scores are stored. Elsewhere PyTorch's uncompiled version runs, which stores all
scores and has no backward pass: it serves the tests.

The keys are the tokens of the prompts, packed, and then the nodes. Nodes are in preorder, so consecutive queries see a
key: two numbers per key are the whole mask, and blocks of 128 queries and 128 keys are skipped, masked or taken whole
without a mask of queries times keys. Queries and keys are padded to whole blocks, because other lengths have given NaN
gradients in PyTorch. Padding queries see the padding keys only. There are at least two blocks of queries, and more
blocks of keys, because `torch.compile` compiles sizes of 1 and equal sizes separately; other sizes share a kernel.

Dimensions: F nodes, S tokens of prompts, T keys with padding, B blocks of queries, C blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from brorl.errors import UserError
from brorl.model.device import to_device
from brorl.model.tree_attention import PromptCache
from brorl.tree import BoolArray, IntArray, subtree_ends

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_MIN_BLOCKS = 2
_MAX_KERNELS = 64  # of a process; the default of `torch.compile` is 8, and one more kernel would be an error


def check_flex_device(device: torch.device, dtype: str) -> None:
    """Reject a device or a dtype without a kernel.

    Raises:
        UserError: With the setting to change.
    """
    if device.type != "cuda":
        raise UserError(
            f"engine.attention: flex needs a CUDA device, and the device is {device.type}, where FlexAttention has no "
            "backward pass; set engine.attention: auto"
        )
    if dtype == "float64":
        raise UserError(
            "engine.attention: flex stores log-sum-exps in float32, and dtype is float64; set engine.attention: auto, "
            "or dtype: float32"
        )


class KeySpans(NamedTuple):
    """The queries that see each key: those from `first` up to, not including, `stop`."""

    first: IntArray  # shape [T]
    stop: IntArray  # shape [T]
    num_queries: int  # queries with padding, a multiple of 128

    @classmethod
    def of(cls, length_P: IntArray, prompt_F: IntArray, depth_F: IntArray) -> KeySpans:
        """Find the spans of the tokens of the prompts, of the nodes and of the padding; see `FlexAttention`."""
        num_nodes = depth_F.size
        edge = np.searchsorted(prompt_F, np.arange(length_P.size + 1))  # the first node of each prompt
        num_queries = _padded(num_nodes)
        first = np.concatenate([np.repeat(edge[:-1], length_P), np.arange(num_nodes)])
        stop = np.concatenate([np.repeat(edge[1:], length_P), subtree_ends(depth_F)])
        padding = (0, max(_padded(first.size + 1), num_queries + _BLOCK) - first.size)
        return cls(
            np.pad(first, padding, constant_values=num_nodes),
            np.pad(stop, padding, constant_values=num_queries),
            num_queries,
        )

    def blocks(self) -> tuple[BoolArray, BoolArray]:
        """Return which blocks have pairs that see each other, and in which all pairs do, each of shape [B, C]."""
        first_block, stop_block = self.first // _BLOCK, self.stop // _BLOCK
        first_whole, stop_touched = -(-self.first // _BLOCK), -(-self.stop // _BLOCK)
        stop_touched = np.where(self.first < self.stop, stop_touched, first_block)
        touched_BC = self._count(first_block, stop_touched)
        whole_BC = self._count(first_whole, np.maximum(first_whole, stop_block))
        return touched_BC > 0, whole_BC == _BLOCK

    def _count(self, first_T: IntArray, stop_T: IntArray) -> IntArray:
        """Count the keys of each block of keys whose range of blocks of queries has each block, shape [B, C]."""
        num_blocks = self.num_queries // _BLOCK
        change = np.zeros((num_blocks + 1, self.first.size // _BLOCK), np.int64)
        of_key = np.arange(self.first.size) // _BLOCK
        np.add.at(change, (first_T, of_key), 1)
        np.add.at(change, (stop_T, of_key), -1)
        counts: IntArray = change.cumsum(0)[:-1]
        return counts

    def mask(self, device: torch.device) -> BlockMask:
        """Return the mask for FlexAttention."""
        from torch.nn.attention.flex_attention import BlockMask

        first, stop = (to_device(x.astype(np.int32), device) for x in (self.first, self.stop))

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first[key] <= query) & (query < stop[key])

        touched_BC, whole_BC = self.blocks()
        masked, whole = _ordered(touched_BC & ~whole_BC, device), _ordered(whole_BC, device)
        return BlockMask.from_kv_blocks(*masked, *whole, BLOCK_SIZE=_BLOCK, mask_mod=sees)


def _padded(length: int) -> int:
    """Return the length of whole blocks that hold some queries or keys."""
    return max(_MIN_BLOCKS, -(-length // _BLOCK)) * _BLOCK


def _ordered(listed_BC: BoolArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of listed blocks, shape [1, 1, B], and all blocks, listed ones first, shape [1, 1, B, C]."""
    count_B, order_BC = listed_BC.sum(1), np.argsort(~listed_BC, axis=1, kind="stable")
    count, order = (to_device(x.astype(np.int32), device)[None, None] for x in (count_B, order_BC))
    return count, order


class FlexAttention:
    """The attention of the input nodes of a chunk.

    Args:
        prompts: Keys and values of the prompts.
        prompt_F: Prompt of each node, ascending, shape [F].
        depth_F: Depth of each node, 0 for the first token after the prompt, shape [F].
    """

    def __init__(self, prompts: PromptCache, prompt_F: IntArray, depth_F: IntArray) -> None:
        spans = KeySpans.of(prompts.length, prompt_F, depth_F)
        real = np.nonzero(np.arange(prompts.length.max()) < prompts.length[:, None])
        self._prompt_S, self._place_S = (to_device(index_S, prompts.device) for index_S in real)
        self._num_nodes, self._num_queries, self._num_keys = depth_F.size, spans.num_queries, spans.first.size
        self._mask = spans.mask(prompts.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, prompt_key: Tensor, prompt_value: Tensor) -> Tensor:
        """Return the attention, given queries, keys and values, and the prompts' keys and values."""
        output: Tensor = _kernel(query.device.type)(
            _joined(self._num_queries, query),
            _joined(self._num_keys, self._packed(prompt_key), key),
            _joined(self._num_keys, self._packed(prompt_value), value),
            block_mask=self._mask,
            scale=1.0,
            enable_gqa=True,
        )
        return output[0, :, : self._num_nodes].transpose(0, 1)

    def _packed(self, x_PKSD: Tensor) -> Tensor:
        """[P, K, S, D] with padding -> [S, K, D] of the tokens of all prompts."""
        return x_PKSD[self._prompt_S, :, self._place_S]


def _joined(length: int, *parts: Tensor) -> Tensor:
    """Join parts of shape [T, H, D] and zeros to a view of shape [1, H, length, D]."""
    padding = parts[0].new_zeros(length - sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return torch.cat([*parts, padding]).transpose(0, 1)[None]


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled on CUDA as one graph of dynamic sizes.

    Where `torch.compile` would fall back to the uncompiled version, which stores all scores, it raises an error.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def kernel(*inputs: Tensor, **options: Any) -> Any:
        with torch._dynamo.config.patch(cache_size_limit=_MAX_KERNELS):  # newer versions: an alias of recompile_limit
            return compiled(*inputs, **options)

    return kernel
