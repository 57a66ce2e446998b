"""Kernels in Triton: on a GPU, or where there is none, interpreted on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from brorl.model import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton")
if DEVICE == "cpu":  # and TRITON_INTERPRET is set, in conftest
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _with_bounds_of_loops(tensor: type, scope: object) -> None:
        """Let a number of a kernel be the bound of a loop, which fails with NumPy 2.4."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _with_bounds_of_loops
    _dot = interpreter.InterpreterBuilder.create_dot

    def _with_bfloat16(builder: object, a: object, b: object, *others: object) -> object:
        """Multiply bfloat16, of which the interpreter would multiply the bits."""
        if a.dtype == triton.language.bfloat16:
            kinds = triton.language.bfloat16, triton.language.float32, None
            a, b = (interpreter.TensorHandle(_as_float32(x.data, *kinds), kinds[1]) for x in (a, b))
        return _dot(builder, a, b, *others)

    def _as_float32(data: np.ndarray, *kinds: object) -> np.ndarray:
        return interpreter._convert_float(np.ascontiguousarray(data), *kinds).view(np.float32)

    interpreter.InterpreterBuilder.create_dot = _with_bfloat16


@contextmanager
def kernels_on_this_machine() -> Iterator[None]:
    """Use the kernels inside the block, also on a CPU."""
    quiet = np.errstate(all="ignore")  # the interpreter computes with NumPy
    with pytest.MonkeyPatch.context() as patch, kernels.using_triton(True), torch.no_grad(), quiet:
        patch.setattr(kernels, "TRITON_DEVICES", {DEVICE})
        patch.setattr(kernels, "_choice", "off")  # those in C
        yield
