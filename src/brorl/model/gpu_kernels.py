"""Whether this thread computes with kernels in Triton, which comes with PyTorch for CUDA.

They compute in float32, round once, and have no gradients; `brorl.rollout.native.engine` checks them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

DEVICES = {"cuda"}
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_in_use: ContextVar[bool] = ContextVar("gpu_kernels", default=False)


@contextmanager
def gpu_kernels(use: bool) -> Iterator[None]:
    """Use the kernels inside the block, or do not."""
    token = _in_use.set(use)
    try:
        yield
    finally:
        _in_use.reset(token)


def suit(x: Tensor) -> bool:
    """Return whether the kernels are in use, and can compute with a tensor."""
    return _in_use.get() and x.device.type in DEVICES and x.dtype in DTYPES and not torch.is_grad_enabled()


def rows_of(x_RHD: Tensor) -> Tensor:
    """Return a tensor whose memory is dense within each row."""
    return x_RHD if x_RHD.stride()[1:] == (x_RHD.shape[2], 1) else x_RHD.contiguous()
