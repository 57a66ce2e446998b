"""CUDA graphs of decoding steps: recorded at first use, compared with the eager step, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brorl.activity import Echo
from brorl.errors import first_line
from brorl.model.cuda_graphs import Capture, CudaCapture, GraphChoice, GraphStore, Step
from brorl.model.rounding import agrees

_MAX_STEPS = 256  # recorded steps to keep, a few MiB each
# Operators that make the host wait for a result from the device.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim",
    "equal", "bincount", "repeat_interleave", "_pin_memory",
}  # fmt: skip
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with a mask, the host waits for the count
_COPIES = {"_to_copy", "copy_", "lift_fresh"}


class _Inspection(TorchDispatchMode):
    """Detects what a graph cannot record: the host waiting for the device, or access to host memory.

    A capture that fails halfway can leave CUDA's allocator in a bad state, so each step is inspected first.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self._device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        here = [x for x in tensors if x.device.type == self._device.type]
        masks = tree_leaves(args[1]) if name in _INDEXED else []
        waits = name in _WAITS or any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks)
        is_host_value = any(x.dim() or name in _COPIES for x in tensors if x.device.type != self._device.type)
        if self.reason is None and here and (waits or is_host_value):
            self.reason = f"{name} {'makes the host wait' if waits else 'reads or writes host memory'}"
        return made


def graphs_on(device: torch.device, choice: GraphChoice, echo: Echo) -> StepGraphs | None:
    """Return a step recorder; None if graphs are off, the device does not support them, or a trial fails."""
    if choice == "off" or device.type != "cuda":
        return None
    graphs = StepGraphs(choice, echo, partial(CudaCapture, device))
    return graphs if graphs.passes_trial(device) else None


class StepGraphs:
    """The recorded steps of a decoder, which are idempotent. See `GraphStore` for the arguments."""

    def __init__(self, choice: GraphChoice, echo: Echo, new_capture: Callable[[], Capture]) -> None:
        self._store: GraphStore[Step] = GraphStore("decoding", choice, echo, new_capture, _MAX_STEPS)
        self._addresses: Sequence[int] = ()

    @property
    def enabled(self) -> bool:
        """Whether steps are recorded. Once False, it stays False."""
        return self._store.enabled

    def passes_trial(self, device: torch.device) -> bool:
        """See `GraphStore.passes_trial`."""
        return self._store.passes_trial(device)

    def bind(self, addresses: Sequence[int]) -> None:
        """Drop the graphs if the tensors that they read and write have moved."""
        if addresses != self._addresses:
            self._store.clear()
            self._addresses = addresses

    def run(self, key: Hashable, step: Step, output: Tensor) -> None:
        """Run or replay a step that writes `output`. The key and the addresses determine the step's kernels and shapes.

        Raises:
            UserError: If graphs are required, but the step cannot be recorded or its replay gives different results.
        """
        replay = self._store.get(key)
        if replay is not None:
            replay()
            return
        if not self._store.enabled:
            step()
            return
        with _Inspection(output.device) as seen:
            step()
        if seen.reason is not None:
            self.refuse(seen.reason)
        elif torch.isfinite(output).all():  # a model that diverged is reported elsewhere
            reason = self._recorded(key, step, output)
            if reason is not None:
                self.refuse(reason)
                step()

    def refuse(self, reason: str) -> None:
        """See `GraphStore.refuse`."""
        self._store.refuse(reason)

    def _recorded(self, key: Hashable, step: Step, output: Tensor) -> str | None:
        """Record a step that has just run. If it cannot be replayed, return the reason."""
        expected = output.clone()
        output.zero_()
        try:
            (replay,) = self._store.capture([step])
            output.zero_()
            replay()
        except Exception as error:  # a model's code can do anything that graphs reject
            return f"{type(error).__name__}: {first_line(error)}"
        if not agrees(output, expected):
            return "its logits change"
        self._store.add(key, replay)
        return None
