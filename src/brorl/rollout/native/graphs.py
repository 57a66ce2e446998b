"""CUDA graphs of decoding steps: recorded at first use, compared with the eager step, and replayed.

A step is an idempotent function without arguments that reads and writes tensors at fixed addresses. If a graph cannot
record a step, all steps run eagerly, and a message reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brorl.activity import Echo
from brorl.errors import UserError, first_line
from brorl.model.forward import agrees

GraphChoice = Literal["auto", "on", "off"]
_MAX_GRAPHS = 256  # graphs to keep, a few MiB each; the least recently used one is dropped first
# Operators that make the host wait for a result from the device.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim",
    "equal", "bincount", "repeat_interleave", "_pin_memory",
}  # fmt: skip
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with a mask, the host waits for the count
_COPIES = {"_to_copy", "copy_", "lift_fresh"}
Step = Callable[[], None]
Capture = Callable[[Step], Step]  # runs a step as often as needed, records it, and returns the replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures on a device: always the same, since libraries keep memory per stream."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """Records CUDA graphs that share one memory pool, since they are replayed one after another.

    A pool is released with its last graph, so later graphs need a new pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Warm up on a side stream, since libraries allocate at first use, then record the step's kernels."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # restores the caller's stream even if the capture fails
                step()
                graph = torch.cuda.CUDAGraph()
                # Other threads, such as verifiers, may use the device during the capture.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
        replay: Step = graph.replay
        return replay


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
    written = torch.zeros(1, device=device)

    def step() -> None:
        written.fill_(1)

    graphs.bind([written.data_ptr()])
    graphs.run("trial", step, written)
    return graphs if graphs.enabled else None


class StepGraphs:
    """The recorded steps of a decoder.

    Args:
        choice: With `on`, a failure is an error. With `auto`, steps run eagerly after a failure.
        echo: Receives a line about the failure.
        new_capture: Creates a `Capture` for all steps that read and write the same tensors.
    """

    def __init__(self, choice: GraphChoice, echo: Echo, new_capture: Callable[[], Capture]) -> None:
        self.enabled = True  # whether steps are recorded; once False, always False
        self._choice = choice
        self._echo = echo
        self._new_capture = new_capture
        self._capture: Capture | None = None
        self._replays: dict[Hashable, Step] = {}
        self._addresses: Sequence[int] = ()

    def bind(self, addresses: Sequence[int]) -> None:
        """Drop the graphs if the tensors that they read and write have moved."""
        if addresses != self._addresses:
            self._replays.clear()
            self._capture = None
            self._addresses = addresses

    def run(self, key: Hashable, step: Step, output: Tensor) -> None:
        """Run or replay a step that writes `output`. The key and the addresses determine the step's kernels and shapes.

        Raises:
            UserError: If graphs are required, but the step cannot be recorded or its replay gives different results.
        """
        replay = self._replays.pop(key, None)
        if replay is not None:
            self._replays[key] = replay  # move to the end: graphs at the front are dropped first
            replay()
            return
        if not self.enabled:
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
        """From now on, run everything eagerly, and report why. Raise an error if graphs are required."""
        if not self.enabled:
            return
        if self._choice == "on":
            raise UserError(
                f"engine.cuda_graphs = on, but a decoding step cannot be recorded as a CUDA graph: {reason}; set "
                "engine.cuda_graphs: auto"
            )
        self.enabled = False
        self._replays.clear()
        self._echo(f"decoding launches its kernels one by one, without CUDA graphs: {reason}")

    def _recorded(self, key: Hashable, step: Step, output: Tensor) -> str | None:
        """Record a step that has just run. If it cannot be replayed, return the reason."""
        expected = output.clone()
        output.zero_()
        try:
            self._capture = self._capture or self._new_capture()
            replay = self._capture(step)
            output.zero_()
            replay()
        except Exception as error:  # a model's code can do anything that graphs reject
            return f"{type(error).__name__}: {first_line(error)}"
        if not agrees(output, expected):
            return "its logits change"
        if len(self._replays) == _MAX_GRAPHS:
            del self._replays[next(iter(self._replays))]
        self._replays[key] = replay
        return None
