"""Attention over trees, hooked into Hugging Face decoder models without changing them.

The tokens are packed, [1, T], with explicit positions, and a context computes their attention: every token attends to
its prompt and its prefix. For the prompt `a b` with the responses `c d` and `c e`,

    tokens a b c d e    positions 0 1 2 3 3    d sees a b c d, and e sees a b c e

Attention sinks, dropout and anything else that a context cannot compute raise an error. `forward.check_hooks` rejects
any other model whose output differs.

Notation: H query heads, K key-value heads, G = H / K, D head dimension (E for values, which may differ), S prompt
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.arrays import IntArray
from brorl.errors import UserError
from brorl.model.context_limit import carries_state, counts_tokens_of_a_pass, other_span, position_limit
from brorl.model.device import to_device
from brorl.model.kernels import in_blocks
from brorl.model.logits import RowLogits, row_logits

PREFILL_TOKENS = 16384  # prompt tokens that an engine computes at a time, which bounds the activations
_NAME = "brorl_tree"
_NEUTRAL_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
     "logits_to_keep", "is_causal", "position_embeddings", "layer_idx", "output_router_logits"}
)  # fmt: skip


class HooksError(UserError):
    """The model's attention cannot be replaced by tree attention."""

    @classmethod
    def of(cls, model: PreTrainedModel, reason: object) -> HooksError:
        """Return the error for an architecture, with the reason."""
        return cls(
            f"{type(model).__name__} cannot be hooked: {reason}; set engine.forward: auto, or choose a decoder with "
            "full attention (Llama, Qwen, Mistral, ...)"
        )


class AttentionContext:
    """The attention of packed tokens, layer by layer."""

    longest: int  # tokens of the longest context that a token attends to
    has_windows = False  # whether `attend` computes sliding windows

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, window: int | None = None, /
    ) -> Tensor:
        """Return a layer's attention, shape [T, H, E], from scaled queries. Values are [T, K, E].

        With a window of w tokens, a token attends to the last w tokens of its sequence, including itself.
        """
        raise NotImplementedError

    def of_heads(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Return the attention, [1, T, H, E], of queries [1, H, T, D], keys [1, K, T, D] and values [1, K, T, E]."""
        name = type(module).__name__
        if softcap is not None:
            raise HooksError(f"{name} needs softcap, which tree attention does not compute")
        if not self.has_windows:
            if window is not None and self.longest > window:
                raise HooksError(
                    f"{name} has a sliding window of {window} tokens, but this context has {self.longest}; shorten "
                    "prompts or max_new_tokens"
                )
            window = None
        layer: int = module.layer_idx  # type: ignore[assignment]
        # [1, H, T, D] views of [T, H, D] memory: these transposes copy nothing.
        inputs = query[0].transpose(0, 1) * scale, key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self.attend(layer, *inputs, window)[None]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    brorl_context: AttentionContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention with the context of the pass. Compiled layers trace this function."""
    if brorl_context is None:
        raise HooksError(f"{type(module).__name__} does not pass its forward arguments to its attention")
    unknown = {n: v for n, v in extra.items() if n not in _NEUTRAL_ARGUMENTS and v is not None and v is not False}
    if unknown or dropout or attention_mask is not None:
        what = ", ".join([*unknown, *(["dropout"] if dropout else [])]) or "an attention mask"
        raise HooksError(f"{type(module).__name__} needs {what}, which tree attention does not compute")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = brorl_context.of_heads(module, query, key, value, scale, sliding_window, softcap)
    return output.contiguous(), None  # some models take views of the output


AttentionInterface.register(_NAME, _attend)  # no mask has this name, so transformers does not build one


def cast_by_autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors on one device to the autocast dtype if autocast is on; otherwise, return them unchanged."""
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return inputs
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in inputs)


class SwappedAttention(AbstractContextManager[None]):
    """Gives a model the named attention inside a `with` block, and then restores its own."""

    def __init__(self, model: PreTrainedModel, implementation: str = _NAME) -> None:
        self._config: Any = model.config
        self._inside, self._before = implementation, implementation

    def __enter__(self) -> None:
        self._before = self._config._attn_implementation
        self._config._attn_implementation = self._inside

    def __exit__(self, *error: object) -> None:
        self._config._attn_implementation = self._before


def tree_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Compute the attention of `model` with contexts inside the block, and then restore its own attention."""
    return SwappedAttention(model)


class ModelPass:
    """A forward pass over packed tokens with the model's own modules, inside `tree_attention(model)`.

    `whole_logits` sets whether all logits are computed here. Otherwise at most `max_logits` are; see `logits`.
    """

    def __init__(self, model: PreTrainedModel, *, whole_logits: bool = True, max_logits: int | None = None) -> None:
        self._model = model
        self._whole_logits, self._max_logits = whole_logits, max_logits

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._model.device

    def row_logits(
        self, token_T: Tensor, position_T: Tensor, context: AttentionContext, rows: Tensor | None
    ) -> RowLogits:
        """Return the logits of the tokens in `rows`, shape [R, V], or what they are computed from if there are many.

        `position_T` holds the position of each token in its sequence. `rows` selects the tokens whose logits are
        returned; None for all.
        """
        check_positions(self._model, context.longest)

        def forward() -> Tensor:
            logits: Tensor = self._model(
                input_ids=token_T[None],
                position_ids=position_T[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,  # 0 keeps all
                brorl_context=context,
            ).logits
            return logits

        num_rows = token_T.numel() if rows is None else rows.numel()
        limits: dict[str, Any] = {"whole_logits": self._whole_logits, "max_logits": self._max_logits}
        logits = row_logits(self._model, forward, num_rows, **limits)
        return replace(logits, row=logits.row[0])


def check_positions(model: PreTrainedModel, longest: int) -> None:
    """Check that a packed token can have a context of `longest` tokens, and that no rotation depends on the batch."""
    if counts_tokens_of_a_pass(model.config):
        raise HooksError(f"{type(model).__name__} scales queries by their place in the forward pass")
    span = other_span(model.config)  # layers pass their windows to the attention
    if span is not None and longest > span.tokens:
        raise HooksError(
            f"{type(model).__name__} has a {span.name} of {span.tokens} tokens, but this context has "
            f"{longest}; shorten prompts or max_new_tokens"
        )
    limit = position_limit(model.config)
    if limit is not None and longest > limit.tokens:
        raise HooksError(
            f"{type(model).__name__} uses {limit.name} RoPE, which depends on the longest context of the batch "
            f"above {limit.tokens} tokens, but this one has {longest}; shorten prompts or max_new_tokens"
        )


class PromptCache(NamedTuple):
    """Keys and values of P prompts, padded on the right to the longest."""

    key: list[Tensor]  # per layer, shape [P, K, S, D]
    value: list[Tensor]  # per layer, shape [P, K, S, D]
    length: IntArray  # prompt lengths in tokens, shape [P]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values in bytes."""
        return sum(x.numel() * x.element_size() for x in (*self.key, *self.value))

    @property
    def device(self) -> torch.device:
        """The device of the keys and values."""
        return self.key[0].device

    def select(self, prompts: IntArray | slice) -> PromptCache:
        """Return the cache of the given prompts, in their order."""
        chosen = prompts if isinstance(prompts, slice) else to_device(prompts, self.device)
        return PromptCache([k[chosen] for k in self.key], [v[chosen] for v in self.value], self.length[prompts])

    def for_kernels(self) -> PromptCache:
        """Return the cache with keys in blocks, [P, K, S / 16, D, 16], as the C kernels read them."""
        return self._replace(key=[in_blocks(k) for k in self.key], value=[v.contiguous() for v in self.value])


class PromptContext(AttentionContext):
    """Causal attention within each of P packed prompts; stores their keys and values."""

    has_windows = True

    def __init__(self, length_P: IntArray, device: torch.device) -> None:
        self.longest = int(length_P.max())
        real_PS = np.arange(self.longest) < length_P[:, None]
        self._ragged = not real_PS.all()
        self._real_index = to_device(np.flatnonzero(real_PS), device)
        self._shape = real_PS.shape
        self._length = length_P
        self._masks: dict[int, Tensor] = {}  # one for each window that is shorter than a prompt
        self._key: list[Tensor] = []
        self._value: list[Tensor] = []

    def cache(self) -> PromptCache:
        """Return the keys and values of all layers computed so far."""
        return PromptCache(self._key, self._value, self._length)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, window: int | None = None, /
    ) -> Tensor:
        """Attend causally within each prompt. No real token attends to the padding on the right."""
        q = self._padded(query_THD)
        k, v = self._stored(layer, key_TKD, value_TKD)
        mask = self._mask(window, q.device)
        attend = partial(nn.functional.scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None)
        output = attend(q, k, v, scale=1.0, enable_gqa=True)
        flat = output.transpose(1, 2).flatten(0, 1)
        return flat[self._real_index] if self._ragged else flat

    def _stored(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the prompts' padded keys and values, and return them."""
        k, v = self._padded(key_TKD), self._padded(value_TKD)
        assert layer <= len(self._key)
        if layer == len(self._key):  # otherwise a backward pass is recomputing a checkpointed layer
            self._key.append(k)
            self._value.append(v)
        return k, v

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return which keys each query sees, shape [S, S]; None if each sees all keys up to its own."""
        if window is None or window >= self.longest:
            return None
        if window not in self._masks:
            seen = torch.ones(self.longest, self.longest, dtype=torch.bool, device=device).tril_()
            self._masks[window] = seen.triu_(1 - window)
        return self._masks[window]

    def _padded(self, x_TKD: Tensor) -> Tensor:
        if self._ragged:
            padded = x_TKD.new_zeros(self._shape[0] * self._shape[1], *x_TKD.shape[1:])
            x_TKD = padded.index_copy(0, self._real_index, x_TKD)
        x_PSKD: Tensor = x_TKD.unflatten(0, self._shape)
        return x_PSKD.transpose(1, 2)


def prefill(model_pass: ModelPass, prompts: list[list[int]] | list[tuple[int, ...]]) -> tuple[PromptCache, Tensor]:
    """Compute the keys and values of P non-empty prompts, and the logits after each prompt, shape [P, V]."""
    length_P = np.array([len(p) for p in prompts])
    context = PromptContext(length_P, model_pass.device)
    arrays = np.concatenate(prompts), np.concatenate([np.arange(n) for n in length_P]), length_P.cumsum() - 1
    token_T, position_T, last_P = (to_device(array, model_pass.device) for array in arrays)
    logits_PV = model_pass.row_logits(token_T, position_T, context, last_P).whole()
    return context.cache(), logits_PV


class KVShape(NamedTuple):
    """Keys and values of one token in one layer."""

    num_heads: int  # key-value heads
    key_dim: int  # numbers per key
    value_dim: int  # numbers per value; differs from `key_dim` in DeepSeek's latent attention

    @property
    def size(self) -> int:
        """Numbers per token."""
        return self.num_heads * (self.key_dim + self.value_dim)


class _Recorder(AttentionContext):
    """Records the shapes of keys and values. Its attention outputs are zeros."""

    longest = 1
    has_windows = True

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: list[KVShape] = []

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, _window: int | None = None, /
    ) -> Tensor:
        self.layers.append(layer)
        self.shapes.append(KVShape(key_TKD.shape[1], key_TKD.shape[2], value_TKD.shape[2]))
        return query_THD.new_zeros(*query_THD.shape[:2], value_TKD.shape[2])


@torch.no_grad()
def kv_shapes(model: PreTrainedModel) -> Sequence[KVShape]:
    """Run a causal LM in evaluation mode on one token, and return the shape of each layer's keys and values in order.

    Raise a `HooksError` if a layer has no attention that can be hooked, calls its attention more than once, needs a
    kind of attention that is not supported here, or carries a state.
    """
    if carries_state(model.config):
        raise HooksError.of(
            model, "its layers carry a state from token to token (recurrent ones, or short convolutions)"
        )
    recorder = _Recorder()
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.device(model.device), tree_attention(model):
            ModelPass(model).row_logits(zero, zero, recorder, zero)
    except HooksError as error:
        raise HooksError.of(model, error) from error
    if len(set(recorder.layers)) < len(recorder.layers):
        raise HooksError.of(model, "a layer calls its attention more than once")
    if recorder.layers != list(range(model.config.get_text_config().num_hidden_layers)):
        raise HooksError.of(model, "not all of its layers are attention layers")
    return recorder.shapes


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let the decoder layers of a causal LM keep only their inputs. The backward pass recomputes the rest.

    Gradients are equal up to rounding. Sampling and evaluation do not change.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"the layers of {type(model).__name__} cannot be checkpointed; set engine.gradient_checkpointing: "
            "false, and lower engine.nodes_per_pass if memory is short"
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # A layer looks up its attention when it runs, which can be after the `tree_attention` block ends: with Hugging
        # Face's own switch, the gradient would be wrong.
        return nullcontext(), SwappedAttention(model, model.config._attn_implementation)

    def run(forward: Callable[..., Any], *args: Any) -> Any:
        # Layers are not random, so no random state is kept.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    for layer in layers:
        layer._gradient_checkpointing_func = run
        layer.gradient_checkpointing = True
