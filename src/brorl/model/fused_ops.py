"""Decoder layer operations with handwritten gradients, which store less and launch fewer kernels.

Without gradients, they work in place on memory they own. The backward pass recomputes cheap intermediate results.
Dimensions: T tokens, h hidden size, I intermediate size, H heads, D head dimension.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from brorl.model.device import at_least_float32
from brorl.model.kernels import kernels_of, suits_triton


class Linear(NamedTuple):
    """An affine map of rows."""

    weight: Tensor  # shape [outputs, inputs]
    bias: Tensor | None  # shape [outputs]


class Norm(NamedTuple):
    """A root-mean-square norm. Source: arXiv 1910.07467."""

    weight: Tensor  # shape [h]
    epsilon: float


class Angles(NamedTuple):
    """Cosines and sines of the rotations of T tokens, each shape [T, D]. Source: arXiv 2104.09864."""

    scale: float  # factor on the queries
    query_cos: Tensor  # multiplied by the scale, as is `query_sin`
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Divide vectors by their root mean square, and multiply by a weight; shape [..., h]."""
    if torch.is_grad_enabled():
        normed: Tensor = _RmsNorm.apply(x, *norm)  # type: ignore[no-untyped-call]
        return normed
    return _rms_norm(x, *norm)


def query_key_value(
    x_Th: Tensor,
    norm: Norm,
    map_: Linear,
    query_norm: Norm | None,
    key_norm: Norm | None,
    angles: Angles,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled queries [T, H, D], keys [T, K, D] and values [T, K, D] of a layer.

    `norm` precedes the attention, `map_` contains the three maps as one, and `angles` includes the scale of the
    queries.
    """
    head_norms = (*query_norm, *key_norm) if query_norm and key_norm else (None, 0.0, None, 0.0)
    arguments = (x_Th, *norm, *map_, *head_norms, angles, num_heads)
    if torch.is_grad_enabled():
        made: tuple[Tensor, Tensor, Tensor] = _QueryKeyValue.apply(*arguments)  # type: ignore[no-untyped-call]
        return made
    if suits_triton(x_Th):
        from brorl.model.triton_kernels import rotate

        mixed = product(rms_norm(x_Th, norm), *map_).unflatten(1, (-1, angles.key_cos.shape[1]))
        norms = (*query_norm, *key_norm) if query_norm and key_norm else None
        query, key, value = _split(mixed, num_heads)
        rotate(mixed, angles.key_cos, angles.key_sin, num_heads, key.shape[1], angles.scale, norms)
        return query, key, value
    if kernels_of(x_Th) or query_norm is not None:
        return _query_key_value(*arguments)[0]
    mixed = product(rms_norm(x_Th, norm), *map_).unflatten(1, (-1, angles.key_cos.shape[1]))
    value = _split(mixed, num_heads)[2]
    turned = _rotate(mixed[:, : -value.shape[1]], angles.key_cos, angles.key_sin)  # fewer kernels than one at a time
    return turned[:, :num_heads] * angles.scale, turned[:, num_heads:], value


def add_linear(x_Th: Tensor, y: Tensor, map_: Linear) -> Tensor:
    """Return x plus an affine map of y. Without gradients, x is overwritten."""
    if torch.is_grad_enabled():
        return x_Th + linear(y, *map_)
    return add_product(x_Th, y, *map_)


def add_gated_mlp(x_Th: Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """Return x + down(silu(gate) * up) for the normed x. Without gradients, `x` is overwritten. arXiv 2002.05202."""
    if torch.is_grad_enabled():
        added: Tensor = _AddGatedMlp.apply(x_Th, *norm, *gate, *up, *down)  # type: ignore[no-untyped-call]
        return added
    normed = rms_norm(x_Th, norm)
    return add_product(x_Th, _gated(product(normed, *gate), product(normed, *up), overwrite=True), *down)


def add_joined_mlp(x_Th: Tensor, norm: Norm, gate_and_up: Linear, down: Linear) -> Tensor:
    """Compute `add_gated_mlp` with one product for `gate` and `up`, without gradients or C kernels."""
    both = product(rms_norm(x_Th, norm), *gate_and_up)
    if suits_triton(both):
        from brorl.model.triton_kernels import gated

        return add_product(x_Th, gated(both), *down)
    gate, up = both.chunk(2, 1)
    return add_product(x_Th, torch.nn.functional.silu(gate, inplace=True).mul_(up), *down)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) of each vector, in at least float32; shape [..., 1]."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_float32(x.dtype))
    return norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if kernels := kernels_of(x):
        return kernels.rms_norm(x, weight, epsilon)
    if x.device.type == "cuda":
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)  # one kernel
    scaled: Tensor = (x * _inverse_rms(x, epsilon)).to(x.dtype)
    return scaled.mul_(weight)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input, in `out` if given, and of its weight."""
    if kernels := kernels_of(x):
        return kernels.rms_norm_backward(x, weight, epsilon, grad, out)
    scale = _inverse_rms(x, epsilon)
    normed = x * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    grad = grad * weight
    inner = torch.linalg.vecdot(grad, normed).mul_(1 / x.shape[-1])[..., None]
    grad = grad.addcmul_(normed, inner, value=-1).mul_(scale)
    return grad if out is None else out.copy_(grad), grad_weight


def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of heads by the angles of their tokens, into `out` if given."""
    if kernels := kernels_of(x_THD):
        return kernels.rotate(x_THD, cos_TD, sin_TD, out)
    half = x_THD.shape[2] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    sin_T1d = sin_TD[:, None, :half]
    rotated = torch.mul(x_THD, cos_TD[:, None], out=out)
    rotated[..., :half].addcmul_(second, sin_T1d, value=-1)
    rotated[..., half:].addcmul_(first, sin_T1d)
    return rotated


def _gated(gate: Tensor, up: Tensor, *, overwrite: bool) -> Tensor:
    """Return silu(gate) * up. `gate` may be overwritten."""
    if kernels := kernels_of(gate):
        return kernels.gated(gate, up, gate if overwrite else torch.empty_like(gate))
    return torch.nn.functional.silu(gate, inplace=overwrite).mul_(up)


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu(gate) * up, and the gradients of gate and up. `grad` is overwritten."""
    if kernels := kernels_of(gate):
        gated, grad_up = kernels.gated_backward(gate, up, grad)
        return gated, grad, grad_up
    activated = torch.nn.functional.silu(gate)
    gated = activated * up
    grad_up = activated.mul_(grad)
    return gated, torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return _rms_norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_rms_norm_backward(grad, x, weight, ctx.epsilon), None


def _query_key_value(
    x: Tensor, norm: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, query_norm: Tensor | None,
    query_epsilon: float, key_norm: Tensor | None, key_epsilon: float, angles: Angles, num_heads: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """Return queries, keys and values, and the output of the map, shape [T, H + 2 K, D]."""
    mixed = product(_rms_norm(x, norm, epsilon), weight, bias).unflatten(1, (-1, angles.key_cos.shape[1]))
    query, key, value = _split(mixed, num_heads)
    if query_norm is not None and key_norm is not None:
        query, key = _rms_norm(query, query_norm, query_epsilon), _rms_norm(key, key_norm, key_epsilon)
    turned = _rotate(query, angles.query_cos, angles.query_sin), _rotate(key, angles.key_cos, angles.key_sin)
    return (*turned, value), mixed


def _split(mixed: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = (mixed.shape[1] - num_heads) // 2
    return mixed[:, :num_heads], mixed[:, num_heads:-num_kv_heads], mixed[:, -num_kv_heads:]


class _QueryKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, norm, ctx.epsilon, weight, _, query_norm, query_epsilon, key_norm, key_epsilon, angles, num_heads = arguments
        (query, key, value), mixed = _query_key_value(*arguments)
        ctx.head_epsilons = (query_epsilon, key_epsilon)
        ctx.angles = angles
        ctx.num_heads = num_heads
        ctx.save_for_backward(x, norm, weight, query_norm, key_norm, None if query_norm is None else mixed)
        return query, key, value.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, *head_norms, mixed = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        angles: Angles = ctx.angles
        grad_mixed = x.new_empty(x.shape[0], weight.shape[0] // angles.key_cos.shape[1], angles.key_cos.shape[1])
        grad_query, grad_key, grad_value = _split(grad_mixed, ctx.num_heads)
        grad_value.copy_(grads[2])
        grad_norms: list[Tensor | None] = [None, None]
        back = ((angles.query_cos, -angles.query_sin), (angles.key_cos, -angles.key_sin))
        for index, into in enumerate((grad_query, grad_key)):
            if mixed is None:
                _rotate(grads[index], *back[index], into)
                continue
            turned = _rotate(grads[index], *back[index])
            head = _split(mixed, ctx.num_heads)[index]
            _, grad_norms[index] = _rms_norm_backward(turned, head, head_norms[index], ctx.head_epsilons[index], into)
        grad = grad_mixed.flatten(1)
        normed = _rms_norm(x, norm, ctx.epsilon)
        grad_x, grad_norm = _rms_norm_backward(product(grad, weight.T), x, norm, ctx.epsilon)
        return (
            grad_x,
            grad_norm,
            None,
            product(grad.T, normed.T) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            grad_norms[0],
            None,
            grad_norms[1],
            None,
            None,
            None,
        )


class _AddGatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, epsilon: float, gate: Tensor, gate_bias: Tensor | None, up: Tensor,
        up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        normed = _rms_norm(x, norm, epsilon)
        gated, raised = product(normed, gate, gate_bias), product(normed, up, up_bias)
        ctx.save_for_backward(x, norm, gated, raised, gate, up, down)
        ctx.epsilon = epsilon
        return product(_gated(gated, raised, overwrite=False), down, down_bias).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, gated, raised, gate, up, down = ctx.saved_tensors
        needs_gate, needs_gate_bias, needs_up, needs_up_bias, needs_down, needs_down_bias = ctx.needs_input_grad[3:]
        activated, grad_gated, grad_raised = _gated_backward(product(grad, down.T), gated, raised)
        normed = _rms_norm(x, norm, ctx.epsilon)
        grad_normed = add_product(product(grad_gated, gate.T), grad_raised, up.T)
        grad_x, grad_norm = _rms_norm_backward(grad_normed, x, norm, ctx.epsilon)
        return (
            grad_x.add_(grad),
            grad_norm,
            None,
            product(grad_gated.T, normed.T) if needs_gate else None,
            grad_gated.sum(0) if needs_gate_bias else None,
            product(grad_raised.T, normed.T) if needs_up else None,
            grad_raised.sum(0) if needs_up_bias else None,
            product(grad.T, activated.T) if needs_down else None,
            grad.sum(0) if needs_down_bias else None,
        )


ProductName = Literal["mkl", "onednn"]

_TESTED = "2.13"  # the torch release whose private operator was tested
_MIN_GAIN = 1.25  # factor by which oneDNN must be faster
_TRIAL = (512, 256, 512)  # rows, inputs and outputs of the measured products
_MULTIPLE = 32
_MIN_ROWS, _MIN_WIDTH = 32, 64  # oneDNN is slower for fewer rows, inputs or outputs


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, without a gradient. Float32 rows are rounded to bfloat16 if the weight is bfloat16."""
    if weight.dtype is torch.bfloat16 and x.dtype is torch.float32:
        mapped = _padded(torch.nn.functional.linear, x.bfloat16(), weight, None).float()
        return mapped if bias is None else mapped.add_(bias)
    if _suits_onednn(x, weight):
        return _onednn(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def add_product(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add x weight^T + bias to `total` in place, without a gradient; see `product`."""
    if weight.dtype is not x.dtype or _suits_onednn(x, weight):
        return total.add_(product(x, weight, bias))
    total.addmm_(x, weight.T)
    return total if bias is None else total.add_(bias)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and x.shape[0] >= _MIN_ROWS
        and min(weight.shape) >= _MIN_WIDTH
        and x.device.type == "cpu"
        and fastest_product() == "onednn"
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, differentiable; see `product`."""
    mapped: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return mapped


@cache
def fastest_product() -> ProductName:
    """Return the float32 matrix product that measures faster on this processor; MKL if oneDNN cannot be called.

    On some AMD processors, oneDNN reaches the full rate and MKL only half. A wide margin keeps the choice from changing
    between runs.
    """
    if not torch.__version__.startswith(_TESTED) or not torch.backends.mkldnn.is_available():
        return "mkl"
    rows, inputs, outputs = _TRIAL
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    with torch.no_grad():
        try:
            onednn = _seconds(lambda: _onednn(x, weight, None))
        except (RuntimeError, AttributeError):  # a build without the operator
            return "mkl"
        mkl = _seconds(lambda: torch.nn.functional.linear(x, weight))
    return "onednn" if mkl > _MIN_GAIN * onednn else "mkl"


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of a few calls, in seconds."""
    fewest = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        call()
        fewest = min(fewest, time.perf_counter() - start)
    return fewest


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _padded(lambda *args: torch.ops.mkldnn._linear_pointwise(*args, "none", [], ""), x, weight, bias)


def _padded(call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with rows and inputs padded to a multiple of 32, because oneDNN generates code for every new shape."""
    rows, inputs = x.shape
    more_rows, more_inputs = -rows % _MULTIPLE, -inputs % _MULTIPLE
    if more_rows or more_inputs:
        x = torch.nn.functional.pad(x, (0, more_inputs, 0, more_rows))
    if more_inputs:
        weight = torch.nn.functional.pad(weight, (0, more_inputs))
    return call(x, weight, bias)[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.T) if needs_x else None,
            product(grad.T, x.T) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
