"""CUDA graphs of a step of decoding: recorded at first use, compared with the eager step, and replayed.

A step is a function without arguments that reads and writes tensors at fixed addresses, and that gives the same if it
is run twice. What a graph cannot do runs eagerly, and one line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from brorl.activity import Echo
from brorl.errors import UserError, first_line
from brorl.model.hook_check import agrees

GraphChoice = Literal["auto", "on", "off"]
_MOST = 256  # graphs, each with a few MiB of its own; with more, the oldest are dropped
Step = Callable[[], None]


class Capture(Protocol):
    """Records a step, and returns a function that repeats it."""

    def __call__(self, step: Step) -> Step:
        """Run the step as often as needed, record it, and return its replay."""
        ...


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: they are replayed one after the other."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Warm up on another stream, as libraries allocate at first use, then record the kernels of the step."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of verifiers, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay


def graphs_on(device: torch.device, choice: GraphChoice, echo: Echo) -> StepGraphs | None:
    """Return what records steps; None if they are not wanted, the device has no graphs, or a trial fails.

    Raises:
        UserError: If graphs are required, and the trial fails.
    """
    if choice == "off" or device.type != "cuda":
        return None
    graphs, number = StepGraphs(choice, echo), torch.zeros(1, device=device)

    def step() -> None:
        number.fill_(1)

    graphs.run("trial", step, number)
    return graphs if graphs.enabled else None


class StepGraphs:
    """The recorded steps of a decoder.

    Args:
        choice: `on` makes a failure an error; with `auto` the steps run eagerly after it, in the same sizes.
        echo: Receives the line about that.
        capture: Records a step; None to make a `CudaCapture` when the first is recorded.

    Attributes:
        enabled: Whether steps are recorded; it never becomes true again.
    """

    def __init__(self, choice: GraphChoice, echo: Echo, capture: Capture | None = None) -> None:
        self.enabled = True
        self._choice, self._echo, self._capture = choice, echo, capture
        self._replays: dict[Hashable, Step] = {}
        self._addresses: Sequence[int] = ()

    def bind(self, addresses: Sequence[int]) -> None:
        """Forget the graphs if the tensors that they read and write are elsewhere now."""
        if addresses != self._addresses:
            self._replays.clear()
            self._addresses = addresses

    def run(self, key: Hashable, step: Step, output: Tensor) -> None:
        """Run a step, or replay it.

        Args:
            key: What decides the kernels and the shapes of the step, beside its addresses.
            step: The step.
            output: What it writes; it is compared when the step is recorded.

        Raises:
            UserError: If the step cannot be recorded or gives other numbers, and graphs are required.
        """
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        step()
        if not self.enabled or not torch.isfinite(output).all():  # a model that diverged is reported elsewhere
            return
        reason = self._recorded(key, step, output)
        if reason is not None:
            self.refuse(reason)
            step()

    def refuse(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why.

        Raises:
            UserError: If graphs are required.
        """
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
            self._capture = self._capture or CudaCapture()
            replay = self._capture(step)
            output.zero_()
            replay()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own code can do anything that a graph refuses
            return f"{type(error).__name__}: {first_line(error)}"
        if not agrees(output, expected):
            return "its logits change"
        if len(self._replays) == _MOST:
            del self._replays[next(iter(self._replays))]
        self._replays[key] = replay
        return None
