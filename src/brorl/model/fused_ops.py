"""Operations of a decoder layer with gradients written by hand: they store less and start fewer kernels than autograd.

Each is a function of tensors. Without gradients it works in place wherever it owns its memory. With gradients the
backward pass computes cheap intermediate results again instead of storing them.

Dimensions: T tokens, h hidden size, I intermediate size, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.model.kernels import kernels_of
from brorl.model.product import add_product, linear, product


class Linear(NamedTuple):
    """An affine map of rows."""

    weight: Tensor  # shape [outputs, inputs]
    bias: Tensor | None  # shape [outputs]


class Norm(NamedTuple):
    """A root mean square norm. Source: arXiv 1910.07467."""

    weight: Tensor  # shape [h]
    epsilon: float


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Divide vectors by their root mean square, and multiply by a weight; shape [..., h]."""
    if torch.is_grad_enabled():
        normed: Tensor = _RmsNorm.apply(x, *norm)  # type: ignore[no-untyped-call]
        return normed
    if kernels := kernels_of(x):
        return kernels.rms_norm(x, *norm)
    return _scaled(x, _inverse_rms(x, norm.epsilon), norm.weight)


def norm_linear(x_Th: Tensor, norm: Norm, map_: Linear) -> Tensor:
    """Return the affine map of the norm of x."""
    if torch.is_grad_enabled():
        mapped: Tensor = _NormLinear.apply(x_Th, *norm, *map_)  # type: ignore[no-untyped-call]
        return mapped
    return product(rms_norm(x_Th, norm), *map_)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of heads by the angles of their positions. Source: arXiv 2104.09864."""
    if torch.is_grad_enabled():
        rotated: Tensor = _Rotate.apply(x_THD, cos_TD, sin_TD)  # type: ignore[no-untyped-call]
        return rotated
    if kernels := kernels_of(x_THD):
        return kernels.rotate(x_THD, cos_TD, sin_TD)
    return _rotated(x_THD, cos_TD, sin_TD)


def add_linear(x_Th: Tensor, y: Tensor, map_: Linear) -> Tensor:
    """Return x plus an affine map of y. Without gradients x is overwritten."""
    if torch.is_grad_enabled():
        return x_Th + linear(y, *map_)
    return add_product(x_Th, y, *map_)


def add_gated_mlp(x_Th: Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """Return x plus down(silu(gate) * up) of its norm. Without gradients x is overwritten. Source: arXiv 2002.05202."""
    if torch.is_grad_enabled():
        added: Tensor = _AddGatedMlp.apply(x_Th, *norm, *gate, *up, *down)  # type: ignore[no-untyped-call]
        return added
    normed = rms_norm(x_Th, norm)
    gated, raised = product(normed, *gate), product(normed, *up)
    if kernels := kernels_of(gated):
        gated = kernels.gated(gated, raised)
    else:
        gated = torch.nn.functional.silu(gated, inplace=True).mul_(raised)
    return add_product(x_Th, gated, *down)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) of each vector, in float32 at least; shape [..., 1]."""
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()


def _scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return x * scale in the dtype of x, times the weight."""
    scaled: Tensor = (x * scale).to(x.dtype)
    return scaled.mul_(weight)


def _rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = x_THD.shape[2] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    sin_T1d = sin_TD[:, None, :half]
    out = x_THD * cos_TD[:, None]
    out[..., :half].addcmul_(second, sin_T1d, value=-1)
    out[..., half:].addcmul_(first, sin_T1d)
    return out


def _norm_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a norm's input and of its weight."""
    normed = x * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0) if needs_weight else None
    grad = grad * weight
    inner = torch.linalg.vecdot(grad, normed).mul_(1 / x.shape[-1])[..., None]
    return grad.addcmul_(normed, inner, value=-1).mul_(scale), grad_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(x, epsilon)
        ctx.save_for_backward(x, scale, weight)
        return _scaled(x, scale, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        return *_norm_gradients(grad, x, scale, weight, ctx.needs_input_grad[1]), None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        scale = _inverse_rms(x, epsilon)
        ctx.save_for_backward(x, scale, norm, weight)
        return product(_scaled(x, scale, norm), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, norm, weight = ctx.saved_tensors
        _, needs_norm, _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_weight = product(grad.T, _scaled(x, scale, norm).T) if needs_weight else None
        grad_x, grad_norm = _norm_gradients(product(grad, weight.T), x, scale, norm, needs_norm)
        return grad_x, grad_norm, None, grad_weight, grad.sum(0) if needs_bias else None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


class _AddGatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, epsilon: float, gate: Tensor, gate_bias: Tensor | None, up: Tensor,
        up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        scale = _inverse_rms(x, epsilon)
        normed = _scaled(x, scale, norm)
        gated, raised = product(normed, gate, gate_bias), product(normed, up, up_bias)
        ctx.save_for_backward(x, scale, norm, gated, raised, gate, up, down)
        return product(torch.nn.functional.silu(gated).mul_(raised), down, down_bias).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, norm, gated, raised, gate, up, down = ctx.saved_tensors
        _, needs_norm, _, needs_gate, needs_gate_bias, needs_up, needs_up_bias, needs_down, needs_down_bias = (
            ctx.needs_input_grad
        )
        activated = torch.nn.functional.silu(gated)
        grad_down = product(grad.T, (activated * raised).T) if needs_down else None
        grad_product = product(grad, down.T)
        grad_raised = activated.mul_(grad_product)
        grad_gated = torch.ops.aten.silu_backward(grad_product.mul_(raised), gated)
        normed = _scaled(x, scale, norm)
        grad_normed = product(grad_gated, gate.T).add_(product(grad_raised, up.T))
        grad_x, grad_norm = _norm_gradients(grad_normed, x, scale, norm, needs_norm)
        return (
            grad_x.add_(grad),
            grad_norm,
            None,
            product(grad_gated.T, normed.T) if needs_gate else None,
            grad_gated.sum(0) if needs_gate_bias else None,
            product(grad_raised.T, normed.T) if needs_up else None,
            grad_raised.sum(0) if needs_up_bias else None,
            grad_down,
            grad.sum(0) if needs_down_bias else None,
        )
