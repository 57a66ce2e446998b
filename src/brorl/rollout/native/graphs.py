"""CUDA graphs of a step of decoding: recorded at first use, compared with the eager step, and replayed.

A step is a function without arguments that reads and writes tensors at fixed addresses, and that gives the same if it
is run twice. What a graph cannot do runs eagerly, and one line says so.
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
_MOST = 256  # graphs, each with a few MiB of its own; with more, that which was not used for longest is dropped
# Operators after which the host must know a result of the device.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim",
    "equal", "bincount", "repeat_interleave", "_pin_memory",
}  # fmt: skip
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with a mask they count its entries
_COPIES = {"_to_copy", "copy_", "lift_fresh"}
Step = Callable[[], None]
Capture = Callable[[Step], Step]  # runs a step as often as needed, records it, and returns its replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: libraries keep memory of their own for each stream."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: they are replayed one after the other.

    A pool ends with its last graph, so graphs that come after it need another one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Warm up on another stream, as libraries allocate at first use, then record the kernels of the step."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # it restores the stream of the caller even if the capture fails
                step()
                graph = torch.cuda.CUDAGraph()
                # Other threads, such as those of verifiers, may use the device meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
        replay: Step = graph.replay
        return replay


class _Inspection(TorchDispatchMode):
    """Finds what a graph refuses or would repeat without its meaning: a wait of the host, or a copy from it.

    A capture that fails halfway leaves the allocator of CUDA in doubt, so a step is inspected before it is recorded.
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
        of_host = any(x.dim() or name in _COPIES for x in tensors if x.device.type != self._device.type)
        if self.reason is None and here and (waits or of_host):
            self.reason = f"{name} {'lets the host wait' if waits else 'reads or writes memory of the host'}"
        return made


def graphs_on(device: torch.device, choice: GraphChoice, echo: Echo) -> StepGraphs | None:
    """Return what records steps; None if they are not wanted, the device has no graphs, or a trial fails."""
    if choice == "off" or device.type != "cuda":
        return None
    graphs, number = StepGraphs(choice, echo, partial(CudaCapture, device)), torch.zeros(1, device=device)

    def step() -> None:
        number.fill_(1)

    graphs.bind([number.data_ptr()])
    graphs.run("trial", step, number)
    return graphs if graphs.enabled else None


class StepGraphs:
    """The recorded steps of a decoder.

    Args:
        choice: `on` makes a failure an error; with `auto` the steps run eagerly after it, as a line says.
        echo: Receives the line.
        new_capture: Makes what records the steps; once for all steps that read and write the same tensors.
    """

    def __init__(self, choice: GraphChoice, echo: Echo, new_capture: Callable[[], Capture]) -> None:
        self.enabled = True  # whether steps are recorded; it never becomes true again
        self._choice, self._echo, self._new_capture = choice, echo, new_capture
        self._capture: Capture | None = None
        self._replays: dict[Hashable, Step] = {}
        self._addresses: Sequence[int] = ()

    def bind(self, addresses: Sequence[int]) -> None:
        """Forget the graphs if the tensors that they read and write are elsewhere now."""
        if addresses != self._addresses:
            self._replays.clear()
            self._capture, self._addresses = None, addresses

    def run(self, key: Hashable, step: Step, output: Tensor) -> None:
        """Run a step that writes `output`, or replay it; the key decides its kernels and shapes, beside addresses.

        Raises:
            UserError: If the step cannot be recorded or gives other numbers, and graphs are required.
        """
        replay = self._replays.pop(key, None)
        if replay is not None:
            self._replays[key] = replay  # behind all others: the first one is the oldest in use
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
        """Run everything eagerly from now on, and say why; an error if graphs are required."""
        if not self.enabled:
            return
        if self._choice == "on":
            raise UserError(
                f"engine.cuda_graphs = on, and a step of decoding cannot be a CUDA graph: {reason}; set "
                "engine.cuda_graphs: auto"
            )
        self.enabled = False
        self._replays.clear()
        self._echo(f"decoding starts its kernels one by one, without CUDA graphs: {reason}")

    def _recorded(self, key: Hashable, step: Step, output: Tensor) -> str | None:
        """Record a step that has just run; return the reason if it cannot be replayed."""
        expected = output.clone()
        output.zero_()
        try:
            self._capture = self._capture or self._new_capture()
            replay = self._capture(step)
            output.zero_()
            replay()
        except Exception as error:  # a model's own code can do anything that a graph refuses
            return f"{type(error).__name__}: {first_line(error)}"
        if not agrees(output, expected):
            return "its logits change"
        if len(self._replays) == _MOST:
            del self._replays[next(iter(self._replays))]
        self._replays[key] = replay
        return None
