"""An operator in place of FlexAttention's kernels in compiled graphs on a CPU, where they have no backward pass.

Tracing, AOTAutograd, and the caches see FlexAttention. Inductor calls the operator instead of making a kernel. It
computes the attention of `FlexContext` with a dense mask, without a sliding window or soft-capping.
"""

from typing import Any

import torch
from torch import Tensor


def use_stand_in() -> None:
    """Replace FlexAttention's kernels in this process."""
    import torch._inductor.kernel.flex.flex_attention  # registers what is replaced here
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import fallback_handler, register_lowering

    torch.nn.attention.flex_attention._validate_device = lambda *_: None
    higher_order = torch.ops.higher_order

    @register_lowering(higher_order.flex_attention, type_promotion_kind=None)
    def forward(query: Any, key: Any, value: Any, _score: Any, _mask: Any, scale: float, *rest: Any) -> Any:
        first, stop = (x for x in rest[-1] if isinstance(x, TensorBox))  # what the mask captures, besides sizes
        return fallback_handler(torch.ops.stand_in.attend.default)(query, key, value, first, stop, scale)

    @register_lowering(higher_order.flex_attention_backward, type_promotion_kind=None)
    def backward(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        grad, scale = rest[2], rest[7]
        first, stop = (x for x in rest[-1] if isinstance(x, TensorBox))
        return *fallback_handler(torch.ops.stand_in.gradient.default)(query, key, value, first, stop, grad, scale), ()


def _weights(query: Tensor, key: Tensor, first: Tensor, stop: Tensor, scale: float) -> Tensor:
    """Return the attention weights, shape [1, H, Q, E]. Query q sees key e if first[e] <= q < stop[e]."""
    query_T1 = torch.arange(query.shape[2])[:, None]
    hidden = (query_T1 < first) | (query_T1 >= stop)
    return (scale * query @ key.mT).masked_fill(hidden, float("-inf")).softmax(-1)


def _for_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values for the query heads, in float32."""
    return x.float().repeat_interleave(num_heads // x.shape[1], 1)


@torch.library.custom_op("stand_in::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, stop: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, and zeros in place of log-sum-exps and largest scores."""
    heads = query.shape[1]
    weight = _weights(query.float(), _for_heads(key, heads), first, stop, scale)
    unused = [torch.zeros(query.shape[:3]) for _ in range(2)]
    return (weight @ _for_heads(value, heads)).to(query.dtype), *unused


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), *(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("stand_in::gradient", mutates_args=())
def _gradient(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, stop: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, and values."""
    heads = query.shape[1]
    query32, key32, value32, grad32 = query.float(), _for_heads(key, heads), _for_heads(value, heads), grad.float()
    weight = _weights(query32, key32, first, stop, scale)
    grad_weight = grad32 @ value32.mT
    grad_score = scale * weight * (grad_weight - (grad_weight * weight).sum(-1, keepdim=True))
    grad_key, grad_value = (
        x.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for x in (grad_score.mT @ query32, weight.mT @ grad32)
    )
    return (grad_score @ key32).to(query.dtype), grad_key, grad_value


@_gradient.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))
