"""FlexAttention by its definition, with a dense mask. On a CPU it has gradients, and its operators can be recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: Any,
) -> Tensor:
    """Replace `flex_attention`. The whole blocks of a mask only save time, so only its function is read."""
    assert score_mod is None
    assert enable_gqa
    assert kernel_options is None
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    rows, columns = (torch.arange(x.shape[2], device=query.device) for x in (query, key))
    seen = block_mask.mask_mod(zero, zero, rows[:, None], columns)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    return scores.softmax(3) @ value
