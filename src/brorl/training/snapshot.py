"""A copy of a model's trainable parameters that a checkpoint keeps.

Only trainable parameters are kept; frozen ones and buffers are shared, so with adapters a snapshot costs no more than
the adapters. The state of another model is rejected.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.model.sharding import laid_out_as, local_tensor


class Snapshot:
    """A copy of a model's trainable parameters, at first of its current weights.

    Args:
        model: The model. Of a sharded model each rank keeps its shards.
        offload: Keep the copy in the memory of the CPU (pinned, for a CUDA device).
    """

    name: ClassVar[str]  # in the state of a learner

    def __init__(self, model: PreTrainedModel, offload: bool = False) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights = {name: empty_like(p, offload) for name, p in self._parameters.items()}
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Take the model's current weights."""
        for name, parameter in self._parameters.items():
            local_tensor(self._weights[name]).copy_(local_tensor(parameter))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by name."""
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
                f"the {self.name} is of another model: {differing} should have shape {expected.get(differing)}, and "
                f"has {given.get(differing)}; resume with the model, and the adapters, that the run started with"
            )
        for name, weight in self._weights.items():
            local_tensor(weight).copy_(local_tensor(laid_out_as(state[name], self._parameters[name])))


class AveragedWeights(Snapshot):
    """The exponential moving average (EMA) of a model's weights over its updates."""

    name = "ema"

    @torch.no_grad()
    def add(self, decay: float, updates: int) -> None:
        """Add the weights after an update: average <- d average + (1 - d) weights.

        Over the first 1 / (1 - decay) updates it is their plain mean, so the first weights do not linger.

        Args:
            decay: d, 0 to 1.
            updates: Number of updates so far, at least 1.
        """
        new = max(1 - decay, 1 / updates)
        for name, parameter in self._parameters.items():
            local_tensor(self._weights[name]).lerp_(local_tensor(parameter), new)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the average and the model's weights; a second call restores both bit by bit."""
        for name, parameter in self._parameters.items():
            model, average = local_tensor(parameter), local_tensor(self._weights[name])
            own = model.clone()
            model.copy_(average)
            average.copy_(own)


def empty_like(parameter: Tensor, offload: bool) -> Tensor:
    """Return an empty copy of a parameter; with `offload` in the memory of the CPU, pinned for a CUDA device."""
    if not offload:
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.device.type == "cuda")
