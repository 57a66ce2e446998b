"""The shape of the keys and values of a token in each layer of a causal LM, also without weights on the meta device.

Configs name these sizes in many ways, and some models repeat or expand keys and values first, so the shapes are those
that the attention function receives. Models whose layers do not all attend exactly once, or carry a state, are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.context_limit import carries_state
from brorl.model.model_shape import setting
from brorl.model.settings import ForwardChoice
from brorl.model.tree_attention import HookedPass, HooksError, tree_attention


class KVShape(NamedTuple):
    """Keys and values of one token in one layer."""

    num_heads: int  # key-value heads
    key_dim: int  # numbers per key
    value_dim: int  # numbers per value; differs from `key_dim` in DeepSeek's latent attention

    @property
    def size(self) -> int:
        """Numbers per token."""
        return self.num_heads * (self.key_dim + self.value_dim)


class _Recorder:
    """Records the shapes of keys and values; its attention output is zeros."""

    longest = 1

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: list[KVShape] = []

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        self.layers.append(layer)
        self.shapes.append(KVShape(key_TKD.shape[1], key_TKD.shape[2], value_TKD.shape[2]))
        return query_THD.new_zeros(*query_THD.shape[:2], value_TKD.shape[2])


@torch.no_grad()
def kv_shapes(model: PreTrainedModel) -> Sequence[KVShape]:
    """Run a causal LM in evaluation mode on one token and return the shape of each layer's keys and values, in order.

    Raises:
        HooksError: If a layer has no attention that can be hooked, calls it more than once, or needs attention that is
            not computed here, or if it carries a state.
    """
    if carries_state(model.config):
        raise HooksError.of(
            model, "its layers carry a state from token to token (recurrent ones, or short convolutions)"
        )
    recorder = _Recorder()
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.device(model.device), tree_attention(model):
            HookedPass(model).row_logits(zero, zero, recorder, zero)
    except HooksError as error:
        raise HooksError.of(model, error) from error
    if len(set(recorder.layers)) < len(recorder.layers):
        raise HooksError.of(model, "a layer calls its attention more than once")
    if recorder.layers != list(range(model.config.get_text_config().num_hidden_layers)):
        raise HooksError.of(model, "not all of its layers are attention layers")
    return recorder.shapes


def shapes_or_guess(model: PreTrainedModel, forward: ForwardChoice = "auto") -> tuple[Sequence[KVShape], bool]:
    """Return the shapes of a model on the meta device, and whether it takes the flat path, where they are a guess.

    The guess is the number of key-value heads and their size in the model's config. It is needed too where the model
    cannot run on the meta device.

    Args:
        model: The model; it becomes one of bfloat16 in evaluation mode.
        forward: How rollouts go through the model.

    Raises:
        HooksError: If the model's attention cannot be hooked, and `forward` is `tree`.
    """
    config: Any = model.config.get_text_config()
    heads = setting(config, "num_attention_heads") or 1
    head_dim = setting(config, "head_dim") or config.hidden_size // heads
    guess = KVShape(setting(config, "num_key_value_heads") or heads, head_dim, head_dim)
    guessed = [guess] * config.num_hidden_layers
    if forward == "flat":
        return guessed, True
    try:
        return kv_shapes(model.eval().to(torch.bfloat16)), False  # matmuls of experts need bfloat16
    except HooksError:
        if forward == "tree":
            raise
        return guessed, True
    except Exception:  # some routers of experts read values, which the meta device does not have
        return guessed, False
