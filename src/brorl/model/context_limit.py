"""Limits of a model's context, from its config: attention spans, scaled positions, recurrent layers.

A check of the model on a few tokens can miss all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedConfig

# Config entries other than `sliding_window` that limit how much of its context a token attends to
_OTHER_SPANS = {
    "attention_chunk_size": "chunk of attention",
    "sliding_window_size": "sliding window",
    "window_size": "window",
    "local_attention": "window",
    "local_attention_window_len": "window",
    "index_topk": "selection of attended tokens",
    "keep_window_size": "selection of attended tokens",
}


class ContextLimit(NamedTuple):
    """A context length beyond which a model computes differently."""

    name: str
    tokens: int


def attention_limit(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the smallest attention span among a model's layers; None if all layers see the whole context."""
    window, other = smallest_window(config), other_span(config)
    limits = [] if window is None else [ContextLimit("sliding window", window)]
    return _smallest(limits if other is None else [*limits, other])


def smallest_window(config: PreTrainedConfig) -> int | None:
    """Return the smallest sliding window, in tokens, that a model's layers pass to their attention, if any."""
    text_config = config.get_text_config()
    return getattr(text_config, "sliding_window", None) if _has_layers(text_config, "sliding") else None


def other_span(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the smallest attention span other than a layer's sliding window, such as a chunk, if any."""
    text_config = config.get_text_config()
    limits = []
    for key, name in _OTHER_SPANS.items():
        tokens = getattr(text_config, key, None)
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
            limits.append(ContextLimit(name, tokens))
    chunked = _has_layers(text_config, "chunked")
    return _smallest([limit for limit in limits if chunked or limit.name != _OTHER_SPANS["attention_chunk_size"]])


def _has_layers(text_config: PreTrainedConfig, kind: str) -> bool:
    """Return whether a model can have layers of this kind: False if its config lists layer kinds but not this one."""
    kinds = getattr(text_config, "layer_types", None)
    return kinds is None or any(kind in layer_kind for layer_kind in kinds)


def _smallest(limits: Sequence[ContextLimit]) -> ContextLimit | None:
    return min(limits, key=lambda limit: limit.tokens, default=None)


def position_limit(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the rotary scaling that changes once a batch's longest row exceeds some length, and that length."""
    text_config = config.get_text_config()
    parameters: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    # some models have one set per layer type
    layer_parameters = [p for p in parameters.values() if isinstance(p, dict)]
    limits = []
    for rope in layer_parameters or [parameters]:
        kind = rope.get("rope_type") or ""
        if "dynamic" in kind or kind == "longrope":
            tokens = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
            limits.append(ContextLimit(kind, tokens))
    return _smallest(limits)


def carries_state(config: PreTrainedConfig) -> bool:
    """Return whether a model's layers carry a state from token to token, like recurrences and short convolutions.

    The branches of a tree would mix their states. In a model that also has attention, the error can be small.
    """
    return any(hasattr(layer, "update_conv_state") for layer in DynamicCache(config=config).layers)


def counts_tokens_of_a_pass(config: PreTrainedConfig) -> bool:
    """Return whether a model scales queries by their index in the forward pass instead of the position passed in.

    Llama 4 does so in layers without rotations, starting at `floor_scale` tokens.
    """
    text_config = config.get_text_config()
    rotated = getattr(text_config, "no_rope_layers", None) or [1]  # a 0 marks a layer without rotations
    return bool(getattr(text_config, "attn_temperature_tuning", False)) and not all(rotated)
