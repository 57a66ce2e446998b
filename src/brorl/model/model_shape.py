"""The sizes of a model that decide its memory, also on the meta device; see `kv_shapes` for keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.context_limit import carries_state
from brorl.model.settings import ForwardChoice
from brorl.model.tree_attention import HookedPass, HooksError, tree_attention

_TEMPORARY_LAYERS = 3


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM."""

    parameters: int  # all weights
    layers: int
    hidden: int
    inner: int  # size inside the MLP
    heads: int
    head_dim: int  # numbers of a head
    vocabulary: int

    def activation_bytes(self, trained_bytes: int = 4, computed_bytes: int = 2, head_size: int | None = None) -> int:
        """Return the bytes of a token's activations in one layer: b * (6 h + 4 m + 7 H D).

        h is the hidden size, m the size inside the MLP, and b the bytes per number, for H heads of D numbers. Where
        activations have fewer bytes than trained weights the 6 h keep those of the weights, and 2 h are added: norms
        are computed in float32 and cast.

        Args:
            trained_bytes: Bytes per number of the trained weights.
            computed_bytes: Bytes per number of the activations.
            head_size: Numbers per head, 4 for each of a key and 3 for each of a value; None for 7 D.
        """
        residual = 6 * self.hidden * trained_bytes
        if computed_bytes < trained_bytes:
            residual += 2 * self.hidden * computed_bytes
        return residual + (4 * self.inner + self.heads * (head_size or 7 * self.head_dim)) * computed_bytes

    def pass_bytes(self, tokens: int, layer_bytes: int, checkpointing: bool, trained_bytes: int = 4) -> int:
        """Return the bytes of the activations of a forward and a backward pass, without logits.

        All layers, and 3 more: gradients, intermediate results, and memory that the allocator keeps.

        Args:
            tokens: Tokens that go through the model together.
            layer_bytes: Bytes of the activations of one layer.
            checkpointing: Whether activations are computed again: a layer then keeps h numbers per token.
            trained_bytes: Bytes per number of the trained weights.
        """
        inputs = self.layers * tokens * self.hidden * trained_bytes
        kept = inputs + layer_bytes if checkpointing else self.layers * layer_bytes
        return kept + _TEMPORARY_LAYERS * layer_bytes

    @classmethod
    def of_model(cls, model: Any) -> ModelShape:
        """Read the sizes of a model, which may be on the meta device."""
        config: Any = model.config.get_text_config()
        widest = max((max(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n), default=0)
        heads = setting(config, "num_attention_heads") or 1
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=setting(config, "intermediate_size") or widest or 4 * config.hidden_size,
            heads=heads,
            head_dim=setting(config, "head_dim") or config.hidden_size // heads,
            vocabulary=config.vocab_size,
        )


def setting(config: Any, name: str) -> Any:
    """Return a setting of a config; None if it has none, or if layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has an error of its own for settings of layers
        return None


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
