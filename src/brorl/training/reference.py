"""The reference policy: the weights that training started from, or was last reset to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from brorl.model.sharding import is_sharded, local_tensor
from brorl.training.snapshot import Snapshot


class ReferencePolicy(Snapshot):
    """A snapshot that can take the model's place for a forward pass; an offloaded one is copied for each use."""

    name = "reference"

    def __init__(self, model: PreTrainedModel, offload: bool = False) -> None:
        super().__init__(model, offload)
        self._sharded = is_sharded(model)

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
