"""CUDA graphs of the learner's passes: one for the forward pass, and one for the backward pass.

A small model's pass keeps the host busy for longer than the device. As two graphs, it takes the host two launches and
the copies of its inputs. The backward graph adds to the gradients of the parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node, get_gradient_edge
from transformers import PreTrainedModel

from brorl.errors import first_line
from brorl.model.cuda_graphs import GraphStore, Step
from brorl.model.device import copy_to, to_device
from brorl.model.rounding import agrees

MAX_PASSES = 32  # recorded passes to keep; they share their memory
_MAX_KEYS = 1024  # keys to remember of passes that are not recorded
_EAGER = "brorl: eager"  # marks autograd nodes of eager passes
Compute = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # from a pass's inputs on the device to its outputs


@dataclass(eq=False)
class RecordedPass:
    """A recorded pass, with the tensors at fixed addresses that it reads and writes."""

    inputs: list[Tensor]
    outputs: list[Tensor]  # written by `forward`
    output_grads: list[Tensor]  # read by `backward`
    trained: list[Tensor]  # the parameters that `backward` adds gradients to
    forward: Step
    backward: Step | None = None  # None if the pass was recorded without gradients

    def run_forward(self) -> tuple[Tensor, ...]:
        """Run the forward pass on the current inputs, and return copies of the outputs."""
        self.forward()
        return tuple(output.clone() for output in self.outputs)


class PassGraphs:
    """Runs passes of a model, and records those that occur more than once.

    Each new recording is compared with an eager pass. After a failure, all passes run eagerly, and a message says why.

    Args:
        model: The model, on one device. Parameters keep their addresses between updates; a pass with parameters at
            different addresses has a recording of its own.
        store: Keeps the recordings.
    """

    def __init__(self, model: PreTrainedModel, store: GraphStore[RecordedPass]) -> None:
        self._model = model
        self._store = store
        self._tensors = [*model.parameters(), *model.buffers()]
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients: dict[Tensor, Tensor] = {}  # at fixed addresses, made when first needed
        self._occurred: dict[Hashable, None] = {}  # keys of passes that have run eagerly, the oldest first
        self.num_runs = 0  # forward passes so far; each overwrites what the backward pass of the one before needs
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)  # makes outputs differentiable

    def of(self, model: PreTrainedModel) -> PassGraphs:
        """Return an object like this one for a copy of the model."""
        return PassGraphs(model, self._store.emptied())

    def records(self, model: PreTrainedModel) -> bool:
        """Return whether passes of a model are recorded. A copy of the model needs an object of its own."""
        return model is self._model and self._store.enabled

    def clear(self) -> None:
        """Drop all recordings, and the memory of their gradients."""
        self._store.clear()
        self._gradients.clear()

    def run(self, key: Hashable, arrays: Sequence[NDArray[Any]], compute: Compute) -> tuple[Tensor, ...]:
        """Return the outputs of `compute` for inputs with these numbers, differentiable if gradients are enabled.

        The key and the shapes determine what `compute` does, apart from the numbers. The caller runs the backward pass
        before the next forward pass.

        Raises:
            UserError: If graphs are required, but the pass cannot be recorded or its replay gives different results.
        """
        key = self._whole_key(key, arrays)
        recorded = self._store.get(key)
        if recorded is None and self._store.enabled and key in self._occurred and not self._has_autograd_graph():
            recorded = self._record(key, arrays, compute)
        if recorded is None:
            self._occurred.pop(key, None)
            self._occurred[key] = None
            if len(self._occurred) > _MAX_KEYS:
                del self._occurred[next(iter(self._occurred))]
            return self._run_eagerly(arrays, compute)
        for tensor, array in zip(recorded.inputs, arrays, strict=True):
            copy_to(tensor, array)
        self.num_runs += 1
        if recorded.backward is None:
            return recorded.run_forward()
        outputs: tuple[Tensor, ...] = _Replay.apply(self, recorded, self._anchor)  # type: ignore[no-untyped-call]
        return outputs

    def _whole_key(self, key: Hashable, arrays: Sequence[NDArray[Any]]) -> Hashable:
        device = self._model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        modes = dtype, torch.is_grad_enabled(), self._model.training
        return key, modes, tuple(a.shape for a in arrays), tuple(x.data_ptr() for x in self._tensors)

    def place_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Move the gradients of parameters to fixed addresses. New ones are 0."""
        new = []
        for parameter in parameters:
            gradient = self._gradients.get(parameter)
            if gradient is None:
                gradient = self._gradients[parameter] = torch.zeros_like(parameter)
            if parameter.grad is not gradient:
                if parameter.grad is None:
                    new.append(gradient)
                else:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        if new:
            torch._foreach_zero_(new)

    def _run_eagerly(self, arrays: Sequence[NDArray[Any]], compute: Compute) -> tuple[Tensor, ...]:
        nodes = self._gradient_nodes() if torch.is_grad_enabled() else []
        for node in nodes:
            node.metadata[_EAGER] = True  # type: ignore[index]  # the stubs call it a method
        return compute([to_device(array, self._model.device) for array in arrays])

    def _has_autograd_graph(self) -> bool:
        """Return whether the autograd graph of an eager pass is alive.

        A pass recorded now would share the nodes that add to its gradients. They run on the eager pass's stream, which
        a capture does not allow.
        """
        return any(_EAGER in node.metadata for node in self._gradient_nodes())  # type: ignore[operator]

    def _gradient_nodes(self) -> list[Node]:
        """Return the autograd nodes that add to the gradients. New ones are made if no autograd graph has any."""
        return [get_gradient_edge(parameter).node for parameter in self._trained]

    def _record(self, key: Hashable, arrays: Sequence[NDArray[Any]], compute: Compute) -> RecordedPass | None:
        """Record a pass, and compare its replay with an eager pass. After a failure, refuse all recordings.

        A pass with NaNs is not recorded: a model that diverged is reported elsewhere.
        """
        recorded = reason = None
        try:
            with self._gradients_aside():
                expected = self._eager_results(arrays, compute)
                if not any(bool(output.isnan().any()) for output in expected.outputs):
                    recorded = self._capture(arrays, compute, expected)
                    reason = self._difference(recorded, expected)
        except Exception as error:  # a model's code can do anything that graphs reject, and memory can run out
            reason = f"{type(error).__name__}: {first_line(error)}"
        finally:
            torch.clear_autocast_cache()  # casts of weights may lie in the graphs' memory
        if reason is not None:
            recorded = None
            self._gradients.clear()
            self._store.refuse(reason)
        elif recorded is not None:
            self._store.add(key, recorded)
        return recorded

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Put the parameters' gradients aside inside the block, if gradients are enabled."""
        if not torch.is_grad_enabled():
            yield
            return
        kept = []
        for parameter in self._trained:
            gradient = parameter.grad
            # recordings write to the gradients at fixed addresses
            kept.append(
                gradient.clone() if gradient is not None and gradient is self._gradients.get(parameter) else gradient
            )
        self._clear_gradients()
        try:
            yield
        finally:
            for parameter, gradient in zip(self._trained, kept, strict=True):
                parameter.grad = gradient

    def _eager_results(self, arrays: Sequence[NDArray[Any]], compute: Compute) -> _Results:
        outputs = compute([to_device(array, self._model.device) for array in arrays])
        trained: list[Tensor] = []
        if torch.is_grad_enabled():
            torch.autograd.backward(outputs, _example_gradients(outputs))
            trained = [parameter for parameter in self._trained if parameter.grad is not None]
        results = _Results([output.detach() for output in outputs], trained, _norms(trained))
        self._clear_gradients()
        return results

    def _capture(self, arrays: Sequence[NDArray[Any]], compute: Compute, expected: _Results) -> RecordedPass:
        inputs = [to_device(array, self._model.device).clone() for array in arrays]
        output_grads = _example_gradients(expected.outputs)
        outputs: list[Tensor] = []

        def forward() -> None:
            torch.clear_autocast_cache()  # the casts of the weights belong to this pass
            outputs[:] = compute(inputs)

        def backward() -> None:
            torch.autograd.backward(outputs, output_grads)
            torch.clear_autocast_cache()

        steps = [forward, backward] if torch.is_grad_enabled() else [forward]
        self.place_gradients(expected.trained)
        replays = self._store.capture(steps)
        return RecordedPass(inputs, [x.detach() for x in outputs], output_grads, expected.trained, *replays)

    def _difference(self, recorded: RecordedPass, expected: _Results) -> str | None:
        """Replay a pass and return what differs from the expected results; None if they agree."""
        outputs = recorded.run_forward()
        if recorded.backward is not None:
            self._clear_gradients()
            self.place_gradients(recorded.trained)
            recorded.backward()
        dtype = torch.bfloat16 if torch.is_autocast_enabled(self._model.device.type) else self._model.dtype
        for got, output in zip(outputs, expected.outputs, strict=True):
            impossible = output.isneginf()  # tokens that cannot be drawn
            same = torch.equal(got.isneginf(), impossible)
            if not same or not agrees(got.masked_fill(impossible, 0), output.masked_fill(impossible, 0), dtype):
                return "the log-probs change"
        if recorded.trained and not agrees(_norms(recorded.trained), expected.norms, dtype, floor=0.1):
            return "the gradients change"
        return None

    def _clear_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None


class _Results(NamedTuple):
    """The results of an eager pass."""

    outputs: list[Tensor]
    trained: list[Tensor]  # the parameters with a gradient
    norms: Tensor  # norms of their gradients


def _example_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of the outputs to compare passes with."""
    return [torch.linspace(0.5, 1.5, len(x), dtype=x.dtype, device=x.device) for x in outputs]


def _norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norms of the parameters' gradients, shape [number of parameters]."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.empty(0)


class _Replay(torch.autograd.Function):
    """A recorded pass. Its backward pass adds to the gradients of the parameters as a side effect."""

    @staticmethod
    def forward(ctx: Any, graphs: PassGraphs, recorded: RecordedPass, _anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, ctx.recorded, ctx.run = graphs, recorded, graphs.num_runs
        return recorded.run_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        recorded: RecordedPass = ctx.recorded
        if ctx.run != ctx.graphs.num_runs:
            raise RuntimeError("a recorded pass is overwritten by the next one; run its backward pass first")
        for tensor, grad in zip(recorded.output_grads, grads, strict=True):
            tensor.copy_(grad)
        ctx.graphs.place_gradients(recorded.trained)
        assert recorded.backward is not None
        recorded.backward()
        return None, None, None
