"""The reference policy: the weights that training started from, or was last reset to.

Only trainable parameters are kept; frozen ones and buffers are shared, so with adapters a reference costs no more than
the adapters. The state of another model is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.sharding import is_sharded, laid_out_as, local_tensor


class ReferencePolicy:
    """A snapshot of a model's trainable parameters.

    Args:
        model: The model; its current weights become the reference. Of a sharded model each rank keeps its shards.
        offload: Keep the snapshot in the memory of the CPU (pinned, for a CUDA device), and copy it to the device for
            each use.
    """

    def __init__(self, model: PreTrainedModel, offload: bool = False) -> None:
        self._sharded = is_sharded(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights = {name: _empty_like(p, offload) for name, p in self._parameters.items()}
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Take the model's current weights as the reference."""
        for name, parameter in self._parameters.items():
            local_tensor(self._weights[name]).copy_(local_tensor(parameter))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the reference's weights into the model, and restore the model's own at the end, even if the block raises.

        The model's own weights come back bit by bit. Nothing that keeps a gradient may be computed meanwhile.
        """
        with self._shards_in_place() if self._sharded else self._pointers_in_place():
            yield

    @contextmanager
    def _shards_in_place(self) -> Iterator[None]:
        """Exchange the contents of the shards: FSDP keeps pointers to them."""
        shards = {name: local_tensor(p.detach()) for name, p in self._parameters.items()}
        own = {name: shard.clone() for name, shard in shards.items()}
        try:
            for name, shard in shards.items():
                shard.copy_(local_tensor(self._weights[name]))
            yield
        finally:
            for name, shard in shards.items():
                shard.copy_(own[name])

    @contextmanager
    def _pointers_in_place(self) -> Iterator[None]:
        """Exchange the pointers of the weights, which copies nothing."""
        # All on the device before the first exchange: if memory does not suffice, the model is as it was.
        reference = {n: w.to(self._parameters[n].device, non_blocking=True) for n, w in self._weights.items()}
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = reference[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the reference's weights by name."""
        return dict(self._weights)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state_dict`.

        Raises:
            ValueError: If names or shapes are those of another model.
        """
        expected = {name: tuple(w.shape) for name, w in self._weights.items()}
        given = {name: tuple(w.shape) for name, w in state.items()}
        if expected != given:
            differing = sorted(n for n in expected.keys() | given.keys() if expected.get(n) != given.get(n))[0]
            raise ValueError(
                f"the reference is of another model: {differing} should have shape {expected.get(differing)}, and has "
                f"{given.get(differing)}; resume with the model, and the adapters, that the run started with"
            )
        for name, weight in self._weights.items():
            local_tensor(weight).copy_(local_tensor(laid_out_as(state[name], self._parameters[name])))


def _empty_like(parameter: Tensor, offload: bool) -> Tensor:
    if not offload:
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.device.type == "cuda")
