"""Weights in the object store of the cluster: put there once, and read by each worker that loads them.

The process that passes them on never holds the weights. On the machine of the store, the tensors share its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError
from torch import Tensor

from brorl.errors import LearnerLostError
from brorl.model.device import to_host


@dataclass(frozen=True)
class RemoteWeights:
    """Named tensors in the object store; every iteration reads them."""

    # The reference of their `stored_form`. The weights live as long as a process has the reference, and the process
    # that owns it lives: the one that called `put`, or that called the actor.
    ref: Any

    @classmethod
    def put(cls, weights: Iterable[tuple[str, Tensor]]) -> RemoteWeights:
        """Copy weights into the object store.

        Args:
            weights: The weights by name; tensors on a GPU are copied to the host.
        """
        return cls(ray.put(stored_form(weights)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read the weights; the tensors are read-only.

        Raises:
            LearnerLostError: If they were lost with the machine that held them.
        """
        try:
            stored = ray.get(self.ref)
        except ObjectLostError as error:
            raise LearnerLostError(
                f"the weights of the learner were lost with its machine ({type(error).__name__})"
            ) from error
        for name, shape, dtype, data in stored:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(data)
            yield name, flat.view(dtype).reshape(shape)


def stored_form(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> list[tuple[str, torch.Size, torch.dtype, Any]]:
    """Return the value that a `RemoteWeights` refers to; an actor that returns it leaves the weights to the caller.

    Args:
        weights: The weights by name, on any device.
        dtype: Number format of their floats in the store; None for their own.
    """
    on_host = ((name, to_host(tensor, dtype)) for name, tensor in weights)
    return [(name, tensor.shape, tensor.dtype, _bytes(tensor)) for name, tensor in on_host]


def _bytes(tensor: Tensor) -> Any:
    """Return the memory of a tensor as an array, which the object store neither pickles nor copies twice."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
