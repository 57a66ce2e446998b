"""Matrix products at the rate of the processor.

PyTorch multiplies float32 matrices with MKL, which reaches half of the rate of some AMD processors. oneDNN reaches all
of it there. Which of the two is faster is measured once per process, in milliseconds; the margin is wide, so that the
choice does not change from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ProductName = Literal["mkl", "onednn"]

_TESTED = "2.13"  # the release of torch whose private operator was tried
_MIN_GAIN = 1.25  # oneDNN must be faster by this factor
_TRIAL = (512, 256, 512)  # rows, inputs and outputs of the products that are measured
_MULTIPLE = 32
_MIN_ROWS, _MIN_WIDTH = 32, 64  # oneDNN is slower for fewer rows, inputs or outputs


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, without a gradient.

    Args:
        x: Rows, shape [T, inputs].
        weight: Shape [outputs, inputs]; float32 rows are rounded to a weight in bfloat16.
        bias: Shape [outputs].
    """
    if weight.dtype is torch.bfloat16 and x.dtype is torch.float32:
        mapped = _padded(torch.nn.functional.linear, x.bfloat16(), weight, None).float()
        return mapped if bias is None else mapped.add_(bias)
    if _suits_onednn(x, weight):
        return _onednn(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def add_product(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add x weight^T + bias to `total` in place, without a gradient; arguments of `product`."""
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
    """Return x weight^T + bias, differentiable; arguments of `product`."""
    mapped: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return mapped


@cache
def fastest_product() -> ProductName:
    """Measure which product of float32 matrices is faster on this processor; MKL if oneDNN cannot be called."""
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
    """Return the fewest seconds of a few calls."""
    fewest = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        call()
        fewest = min(fewest, time.perf_counter() - start)
    return fewest


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _padded(lambda *args: torch.ops.mkldnn._linear_pointwise(*args, "none", [], ""), x, weight, bias)


def _padded(call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows and inputs that are padded to a multiple, since oneDNN generates code for every new shape."""
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
