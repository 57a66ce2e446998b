"""AdamW with three ways to store its two moments.

- `device`: on the device, like `torch.optim.AdamW`.
- `host`: in CPU memory. Updates are bitwise identical, and each float32 weight takes 8 bytes less device memory.
- `8bit`: in 2 bytes per weight. Both moments are rounded after each update; the second is stored as its square root,
  which halves its dynamic range.

Weights and gradients keep their format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from brorl.model.moments import MOMENTS, SCALE, dequantize, is_quantized, quantize, zero_codes
from brorl.model.settings import States
from brorl.model.sharding import local_tensor
from brorl.training.learner_state import empty_like

_SLICE = 1 << 22  # weights per slice; updating one takes less than 100 MiB of temporary memory


class AdamW(torch.optim.AdamW):
    """AdamW. `host` and `8bit` update one parameter at a time, in slices of rows.

    Args:
        parameters: The trained weights.
        states: How the moments are stored between updates; see the module docstring.
        options: Passed to `torch.optim.AdamW`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], states: States = "device", **options: Any) -> None:
        super().__init__(parameters, **options)
        self._states = states
        for parameter in self._of_groups() if states != "device" else ():
            if not parameter.is_contiguous():  # `_rows` needs views
                parameter.data = parameter.data.contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        if self._states == "device":
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, its moments and its step in place, in slices of rows."""
        state = self.state[parameter]
        if not state:
            at_device = parameter.device if group["fused"] else "cpu"
            state |= {"step": torch.zeros((), device=at_device), **self._zero_moments(parameter)}
        assert parameter.grad is not None
        weights, gradients = local_tensor(parameter), local_tensor(parameter.grad).contiguous()
        beta1, beta2 = group["betas"]
        for rows in _slices(weights):
            first, second = (_read(state, kind, rows, weights.device) for kind in MOMENTS)
            adamw(
                [_rows(weights)[rows]],
                [_rows(gradients)[rows]],
                [first],
                [second],
                [],
                [state["step"].clone()],
                foreach=False,
                fused=bool(group["fused"]),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for kind, moment in zip(MOMENTS, (first, second), strict=True):
                _write(state, kind, rows, moment)
        state["step"] += 1

    def _of_groups(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _zero_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return zero moments in the stored format."""
        moments = {}
        for kind in MOMENTS:
            if is_quantized(parameter.shape, self._states):
                moments[kind], moments[kind + SCALE] = zero_codes(parameter)
            else:
                moments[kind] = empty_like(parameter, offload=self._states == "host")
                local_tensor(moments[kind]).zero_()
        return moments

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore an AdamW state, one parameter at a time. Its moments may be in any of the three formats."""
        states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {i: {"step": state["step"]} for i, state in states.items()}})
        parameters = self._of_groups()
        for index, state in states.items():
            self.state[parameters[index]] |= self._as_stored(state, parameters[index])

    def _as_stored(self, state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
        """Convert moments to the stored format; exact unless the number of bits changes."""
        has_codes = MOMENTS[0] + SCALE in state
        if has_codes == is_quantized(parameter.shape, self._states) and self._states != "host":
            return {
                name: moment.to(parameter.device, moment.dtype if moment.dtype == torch.uint8 else parameter.dtype)
                for name, moment in state.items()
                if name != "step"
            }
        moments = self._zero_moments(parameter)
        for rows in _slices(local_tensor(parameter)):
            for kind in MOMENTS:
                _write(moments, kind, rows, _read(state, kind, rows, moments[kind].device))
        return moments


def _read(state: dict[str, Tensor], kind: str, rows: slice, device: torch.device) -> Tensor:
    """Return the given rows of a stored moment, on the given device and in the weights' dtype."""
    stored = _rows(local_tensor(state[kind]))[rows].to(device, non_blocking=True)
    if kind + SCALE not in state:
        return stored
    signed = kind == "exp_avg"
    moment = dequantize(stored, _rows(local_tensor(state[kind + SCALE]))[rows].to(device), signed)
    return moment if signed else moment.square_()


def _write(state: dict[str, Tensor], kind: str, rows: slice, moment: Tensor) -> None:
    """Store the given rows of a moment."""
    stored = _rows(local_tensor(state[kind]))[rows]
    if kind + SCALE not in state:
        stored.copy_(moment)
        return
    signed = kind == "exp_avg"
    codes, scales = quantize(moment if signed else moment.sqrt(), signed)
    stored.copy_(codes)
    _rows(local_tensor(state[kind + SCALE]))[rows].copy_(scales)


def _slices(tensor: Tensor) -> Iterator[slice]:
    """Yield row slices of about `_SLICE` elements each."""
    rows, columns = _rows(tensor).shape
    size = max(1, _SLICE // max(1, columns))
    return (slice(start, start + size) for start in range(0, rows, size))


def _rows(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix: [a, b, c] -> [a b, c], [c] -> [1, c]."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 and tensor.numel() else tensor.view(1, -1)
