"""The forward pass of a decoder with Llama's layers, written out in few operations.

It launches fewer kernels than the transformers modules, and computes the same function from the same parameters.
Models with a different layout, or with adapters, hooks or shards in their modules, use their own modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from brorl.model.context_limit import attention_limit
from brorl.model.fused_ops import (
    Angles,
    Linear,
    Norm,
    add_gated_mlp,
    add_joined_mlp,
    add_linear,
    linear,
    product,
    query_key_value,
    rms_norm,
)
from brorl.model.logits import MAX_LOGITS, RowLogits
from brorl.model.tree_attention import AttentionContext, ModelPass, check_positions

_LAYOUTS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_FIRST_POSITIONS = 256


def has_llama_layout(model: PreTrainedModel) -> bool:
    """Return whether the Llama pass can run a model, which must have one of a few layouts and plain modules."""
    if type(model) not in _LAYOUTS:
        return False
    config = model.config
    if config.hidden_act not in ("silu", "swish") or config.attention_dropout or attention_limit(config) is not None:
        return False
    return all(_is_plain(module) for module in model.modules())


def num_copied_weights(model: PreTrainedModel, device: str) -> int:
    """Return how many weights a pass copies for sampling: all matrices on a CPU, and the joined matrices on a GPU."""
    joined = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    only_on_cpu = {"o_proj", "down_proj", "lm_head"} if device == "cpu" else set()
    named = [(name.split(".")[-2], p) for name, p in model.named_parameters(remove_duplicate=False)]
    return sum(p.numel() for layer, p in named if layer in joined or (layer in only_on_cpu and p.dim() == 2))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a transformers or torch module has no hooks, no replaced `forward` and no checkpointing."""
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
    gate: Linear  # if `up` is None, one matrix with the rows of gate, then of up
    up: Linear | None
    down: Linear


class LlamaPass(ModelPass):
    """A pass over packed tokens from a model's parameters, or from a copy of them; requires `has_llama_layout`.

    With a `sampling_dtype`, the pass has no gradients: it copies the matrices in this dtype, arranged for products with
    few rows. All other weights keep the model's dtype.
    """

    def __init__(self, model: PreTrainedModel, sampling_dtype: torch.dtype | None = None) -> None:
        super().__init__(model)
        decoder: Any = model.get_decoder()
        self._dtype = sampling_dtype
        self._copies: list[tuple[Tensor, Tensor]] = []  # pairs: part of a copy, and the parameter it copies
        self._head_dim: int = decoder.layers[0].self_attn.head_dim
        self._scale: float = decoder.layers[0].self_attn.scaling
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._padding: int | None = decoder.embed_tokens.padding_idx  # the token whose embedding gets no gradient
        self._layers = [self._layer(layer) for layer in decoder.layers]
        self._norm = _norm(decoder.norm)
        self._head = self._joined(model.get_output_embeddings())
        self._rotary = decoder.rotary_emb
        self._cos = self._sin = self._embedding.new_empty(0, self._head_dim)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters again, to the same addresses."""
        if self._copies:
            torch._foreach_copy_([copy for copy, _ in self._copies], [source for _, source in self._copies])

    def addresses(self, num_positions: int) -> list[int]:
        """Return the addresses of the copies and the rotations, which are valid until more positions are needed."""
        self._extend(num_positions, self._embedding[:1])
        return [x.data_ptr() for x in (*(copy for copy, _ in self._copies), self._cos, self._sin)]

    def row_logits(
        self,
        token_T: Tensor,
        position_T: Tensor,
        context: AttentionContext,
        rows: Tensor | None,
        out: Tensor | None = None,
    ) -> RowLogits:
        """Run the model; see `ModelPass.row_logits`. The logits may be written to `out`, without gradients."""
        check_positions(self._model, context.longest)
        hidden_Rh = self._hidden(token_T, position_T, context, rows)
        vocabulary = self._head.weight.shape[0]
        if self._dtype is None and hidden_Rh.shape[0] * vocabulary > MAX_LOGITS:
            return RowLogits(hidden_Rh, self._model.get_output_embeddings(), vocabulary)
        weight, bias = self._head
        if out is not None and bias is None and weight.dtype is hidden_Rh.dtype is out.dtype:
            return RowLogits(torch.mm(hidden_Rh, weight.T, out=out))
        mapped = linear if torch.is_grad_enabled() else product
        return RowLogits(mapped(hidden_Rh, *self._head))

    def _hidden(self, token_T: Tensor, position_T: Tensor, context: AttentionContext, rows: Tensor | None) -> Tensor:
        """Return the normed output of the last layer for `rows` (None: all), shape [R, h]."""
        x = torch.nn.functional.embedding(token_T, self._embedding, self._padding)
        self._extend(context.longest, x)
        cos_TD, sin_TD = self._cos[position_T], self._sin[position_T]
        angles = Angles(self._scale, cos_TD * self._scale, sin_TD * self._scale, cos_TD, sin_TD)
        for index, layer in enumerate(self._layers):
            num_heads = layer.output.weight.shape[1] // self._head_dim
            inputs = query_key_value(
                x, layer.input_norm, layer.query_key_value, layer.query_norm, layer.key_norm, angles, num_heads
            )
            x = add_linear(x, context.attend(index, *inputs).flatten(1), layer.output)
            if layer.up is None:
                x = add_joined_mlp(x, layer.mlp_norm, layer.gate, layer.down)
            else:
                x = add_gated_mlp(x, layer.mlp_norm, layer.gate, layer.up, layer.down)
        return rms_norm(x if rows is None else x[rows], self._norm)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        # On a CPU, gate and up stay separate: the C kernels read each from dense memory.
        joins_mlp = self._dtype is not None and self.device.type != "cpu"
        return _Layer(
            _norm(layer.input_layernorm),
            self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            None if query_norm is None else _norm(query_norm),
            None if key_norm is None else _norm(key_norm),
            self._joined(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            self._joined(mlp.gate_proj, mlp.up_proj) if joins_mlp else self._joined(mlp.gate_proj),
            None if joins_mlp else self._joined(mlp.up_proj),
            self._joined(mlp.down_proj),
        )

    def _joined(self, *maps: Any) -> Linear:
        """Return several affine maps of the same input as one map."""
        weights, biases = [m.weight for m in maps], [m.bias for m in maps if m.bias is not None]
        if self._dtype is None:
            return Linear(_concatenated(weights), _concatenated(biases) if biases else None)
        return Linear(self._copied(weights), self._copied(biases) if biases else None)

    def _copied(self, parameters: list[Tensor]) -> Tensor:
        """Return a concatenated copy of parameters. Biases keep the model's dtype."""
        on_cpu = self.device.type == "cpu"
        is_matrix = parameters[0].dim() == 2
        if len(parameters) == 1 and (not is_matrix or (not on_cpu and parameters[0].dtype is self._dtype)):
            return parameters[0]
        shape = sum(parameter.shape[0] for parameter in parameters), *parameters[0].shape[1:]
        dtype = self._dtype if is_matrix else parameters[0].dtype
        # On a CPU, columns come first: a product with few rows reads such a weight twice as fast.
        copy = parameters[0].new_empty(shape[::-1] if on_cpu else shape, dtype=dtype)
        copy = copy.T if on_cpu and is_matrix else copy
        self._copies += zip(copy.split([parameter.shape[0] for parameter in parameters]), parameters, strict=True)
        return copy

    def _extend(self, num_positions: int, x: Tensor) -> None:
        """Compute the rotations for more positions."""
        if num_positions <= self._cos.shape[0]:
            return
        size = max(num_positions, 2 * self._cos.shape[0], _FIRST_POSITIONS)
        cos, sin = self._rotary(x, torch.arange(size, device=x.device)[None])
        self._cos, self._sin = cos[0], sin[0]


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)


def _concatenated(parameters: list[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(parameters)
