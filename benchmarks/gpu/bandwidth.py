"""The bytes that decoding must read: the weights in every step, and keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flat_responses import flat_work
from transformers import PreTrainedModel

from brorl.model.forward import choose_forward
from brorl.tree import RolloutTree


def tree_keys_read(tree: RolloutTree) -> int:
    """Count the tokens whose keys and values are read to sample a tree: in each step the prompt's, and each row's."""
    inner_F = np.unique(tree.parent[tree.parent >= 0])  # the last token of a response is not fed
    return int((tree.depth[inner_F] + 1).sum()) + int(tree.length.max()) * len(tree.prompt_ids)


def flat_keys_read(num_prompt_tokens: int, lengths: Sequence[int]) -> int:
    """Count these tokens if each response reads its own prompt."""
    return flat_work(num_prompt_tokens, lengths).attended - num_prompt_tokens * (num_prompt_tokens + 1) // 2


def kv_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    return sum(shape.size for shape in choose_forward(model, "tree").kv_shapes) * model.dtype.itemsize
