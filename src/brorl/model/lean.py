"""The forward pass of a decoder with the layers of Llama, written out in few operations.

Small models and few rows spend most of their time on starting the many kernels of the modules of transformers. This
pass computes the same function from the same parameters. A model of another
layout, or with adapters, hooks or shards in its modules, goes through its own modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from brorl.model.fused_ops import Angles, Linear, Norm, add_gated_mlp, add_linear, query_key_value, rms_norm
from brorl.model.logits import MAX_LOGITS, RowLogits
from brorl.model.product import linear, product
from brorl.model.tree_attention import AttentionContext, check_positions, smallest_window

_LAYOUTS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_FIRST_POSITIONS = 256


def has_lean_layout(model: PreTrainedModel) -> bool:
    """Return whether the lean pass can compute a model: on a CPU, from plain modules."""
    if type(model) not in _LAYOUTS or model.device.type != "cpu":
        return False
    config = model.config
    if config.hidden_act not in ("silu", "swish") or config.attention_dropout or smallest_window(config) is not None:
        return False
    return all(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is of transformers or torch, with nothing attached to it, and without checkpointing."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    changed = changed or getattr(module, "gradient_checkpointing", False)
    return not changed and type(module).__module__.startswith(("torch.nn.modules.", "transformers."))


class _Layer(NamedTuple):
    input_norm: Norm
    query_key_value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


class LeanPass:
    """A forward pass over packed tokens, from a model's parameters or from a copy of them.

    Args:
        model: A causal LM for which `has_lean_layout` is true.
        sampling_dtype: Copy the matrices in this dtype, arranged for products of few rows; without gradients. All
            other numbers keep the dtype of the model. None for the parameters themselves.
    """

    def __init__(self, model: PreTrainedModel, sampling_dtype: torch.dtype | None = None) -> None:
        decoder: Any = model.get_decoder()
        self._model = model
        self._dtype = sampling_dtype
        self._head_dim: int = decoder.layers[0].self_attn.head_dim
        self._scale: float = decoder.layers[0].self_attn.scaling
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._layers = [self._layer(layer) for layer in decoder.layers]
        self._norm = _norm(decoder.norm)
        self._head = self._joined(model.get_output_embeddings())
        self._rotary = decoder.rotary_emb
        self._cos = self._sin = self._embedding.new_empty(0, self._head_dim)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._embedding.device

    def row_logits(
        self, token_T: Tensor, position_T: Tensor, context: AttentionContext, rows: Tensor | None
    ) -> RowLogits:
        """Run the model; see `PackedPass.row_logits`."""
        check_positions(self._model, context)
        hidden_Rh = self._hidden(token_T, position_T, context, rows)
        vocabulary = self._head.weight.shape[0]
        if self._dtype is None and hidden_Rh.shape[0] * vocabulary > MAX_LOGITS:
            return RowLogits(hidden_Rh, self._model.get_output_embeddings(), vocabulary)
        mapped = linear if torch.is_grad_enabled() else product
        return RowLogits(mapped(hidden_Rh, *self._head))

    def _hidden(self, token_T: Tensor, position_T: Tensor, context: AttentionContext, rows: Tensor | None) -> Tensor:
        x = torch.nn.functional.embedding(token_T, self._embedding)
        self._extend(context.longest, x)
        cos_TD, sin_TD = self._cos[position_T], self._sin[position_T]
        angles = Angles(cos_TD * self._scale, sin_TD * self._scale, cos_TD, sin_TD)
        for index, layer in enumerate(self._layers):
            num_heads = layer.output.weight.shape[1] // self._head_dim
            inputs = query_key_value(
                x, layer.input_norm, layer.query_key_value, layer.query_norm, layer.key_norm, angles, num_heads
            )
            x = add_linear(x, context.attend(index, *inputs).flatten(1), layer.output)
            x = add_gated_mlp(x, layer.mlp_norm, layer.gate, layer.up, layer.down)
        return rms_norm(x if rows is None else x[rows], self._norm)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return _Layer(
            _norm(layer.input_layernorm),
            self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            None if query_norm is None else _norm(query_norm),
            None if key_norm is None else _norm(key_norm),
            self._joined(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            self._joined(mlp.gate_proj),
            self._joined(mlp.up_proj),
            self._joined(mlp.down_proj),
        )

    def _joined(self, *maps: Any) -> Linear:
        """Return affine maps of one input as one."""
        weight = maps[0].weight if len(maps) == 1 else torch.cat([m.weight for m in maps])
        bias = None if maps[0].bias is None else torch.cat([m.bias for m in maps])
        if self._dtype is None:
            return Linear(weight, bias)
        # Columns first: a product of few rows reads such a weight twice as fast.
        transposed = weight.T.to(self._dtype, memory_format=torch.contiguous_format, copy=True)
        return Linear(transposed.T, bias)

    def _extend(self, num_positions: int, x: Tensor) -> None:
        """Compute the rotations of more positions."""
        if num_positions <= self._cos.shape[0]:
            return
        size = max(num_positions, 2 * self._cos.shape[0], _FIRST_POSITIONS)
        cos, sin = self._rotary(x, torch.arange(size, device=x.device)[None])
        self._cos, self._sin = cos[0], sin[0]


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)
