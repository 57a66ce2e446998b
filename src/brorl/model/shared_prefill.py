"""Prefill of prompts that share prefixes: each distinct prefix goes through the model once.

Transcripts with tools share their prompt and their earlier turns, and the prompts of a data set can share a system
prompt. The prompts of a prefill are then treated as the responses of a tree without a prompt. Its nodes are the packed
tokens, and their keys and values are copied to every prompt that contains them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from brorl.arrays import IntArray
from brorl.model.chunks import TreeContext
from brorl.model.device import to_device
from brorl.model.tree_attention import ModelPass, PromptCache, PromptContext, prefill
from brorl.tree import RolloutTree

_MAX_DISTINCT = 2 / 3  # of all tokens; above it, smaller products barely make up for the extra attention calls


def shared_prefill(model_pass: ModelPass, prompts: Sequence[tuple[int, ...]]) -> tuple[PromptCache, Tensor]:
    """Compute the same as `prefill`, up to rounding; exactly the same if few tokens are shared.

    The padding of the keys and values is finite, but not zero.
    """
    tree = RolloutTree.from_responses((), prompts)
    if tree.num_nodes > _MAX_DISTINCT * sum(map(len, prompts)):
        return prefill(model_pass, list(prompts))
    index_of = {prompt: index for index, prompt in enumerate(sorted({*prompts}))}  # in the order of the leaves
    number_P = np.array([index_of[prompt] for prompt in prompts])
    context = _TreeOfPrompts(tree, number_P, model_pass.device)
    arrays = np.array(tree.token), tree.depth, tree.leaf[number_P]
    token_T, position_T, last_P = (to_device(array, model_pass.device) for array in arrays)
    logits_PV = model_pass.row_logits(token_T, position_T, context, last_P).whole()
    return context.cache(), logits_PV


class _TreeOfPrompts(PromptContext):
    """Causal attention within P prompts, as nodes of a tree. `number_P` indexes the response of each prompt."""

    def __init__(self, tree: RolloutTree, number_P: IntArray, device: torch.device) -> None:
        length_P = tree.total_length[number_P]
        super().__init__(length_P, device)
        start_P = (tree.total_length.cumsum() - tree.total_length)[number_P]
        place_PS = start_P[:, None] + np.minimum(np.arange(self.longest), length_P[:, None] - 1)
        node_PS = tree.response_nodes()[place_PS]  # the padding repeats the last token
        self._node = to_device(node_PS.ravel(), device)
        self._ragged = True
        self._real_index = to_device(np.unique(node_PS, return_index=True)[1], device)
        self._nodes = np.zeros_like(tree.depth), tree.depth, tree.end
        self._tree: TreeContext | None = None

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, window: int | None = None, /
    ) -> Tensor:
        """Attend from each node to its path. A layer with a shorter window computes every prompt separately."""
        if window is not None and window < self.longest:
            return super().attend(layer, query_THD, key_TKD, value_TKD, window)
        self._stored(layer, key_TKD, value_TKD)
        if self._tree is None:
            # The tree's prompt is empty, so none of these keys and values are read. Tiles use all threads; the
            # C kernels would use one per key-value head.
            none = PromptCache(self._key, self._value, np.zeros(1, np.int64))
            self._tree = TreeContext(none, *self._nodes, "tiled")
        return self._tree.attend(layer, query_THD, key_TKD, value_TKD)

    def _padded(self, x_TKD: Tensor) -> Tensor:
        x_PSKD: Tensor = x_TKD.index_select(0, self._node).unflatten(0, self._shape)
        return x_PSKD.transpose(1, 2)
