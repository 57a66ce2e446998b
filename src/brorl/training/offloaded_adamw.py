"""AdamW whose two moments are in the memory of the CPU between updates: 8 bytes less per float32 weight on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brorl.model.sharding import local_tensor
from brorl.training.learner_state import MOMENTS
from brorl.training.snapshot import empty_like


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW that updates one parameter after the other, with the moments of this one on its device.

    The weights after an update, and the state, are those of `torch.optim.AdamW` bit by bit.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._update(parameter)
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        host = {kind: state[kind] for kind in MOMENTS if kind in state}
        for kind, moment in host.items():
            state[kind] = torch.empty_like(parameter, requires_grad=False)
            local_tensor(state[kind]).copy_(local_tensor(moment), non_blocking=True)
        try:
            super().step()
        finally:
            for kind in MOMENTS:
                if kind in state:
                    state[kind] = _to_host(state[kind], host.get(kind), parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of AdamW, wherever its moments are; those of one parameter at a time are copied."""
        states = state_dict["state"]
        rest = {i: {k: v for k, v in state.items() if k not in MOMENTS} for i, state in states.items()}
        super().load_state_dict({**state_dict, "state": rest})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in states.items():
            parameter = parameters[index]
            for kind in MOMENTS:
                self.state[parameter][kind] = _to_host(state[kind], None, parameter)


def _to_host(moment: Tensor, host: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a moment in the memory of the CPU, in a tensor that is there already if it is given."""
    host = empty_like(parameter, offload=True) if host is None else host
    local_tensor(host).copy_(local_tensor(moment))
    return host
