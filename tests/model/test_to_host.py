"""Tensors on the host: cast on their device, before the copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brorl.model.device import to_host


class Copies(TorchDispatchMode):
    """Notes the format of every tensor that goes from a GPU to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and args[0].device.type == "cuda":
            self.formats.append(args[0].dtype)
        return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_the_copy_has_the_format_of_the_result(dtype: torch.dtype | None) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        floats = torch.empty(3, 4, device="cuda").requires_grad_()
        integers = torch.empty(3, device="cuda", dtype=torch.int64)
        results = [to_host(floats, dtype), to_host(integers, dtype)]
    assert [tensor.device.type for tensor in results] == ["cpu", "cpu"]
    assert [tensor.dtype for tensor in results] == copies.formats == [dtype or torch.float32, torch.int64]
