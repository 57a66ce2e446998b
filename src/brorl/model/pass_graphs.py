"""CUDA graphs of the learner's passes: one for the forward pass, and one for the backward pass.

A small model's pass keeps the host busy for longer than the device. As two graphs, it takes the host two launches and
the copies of its inputs. The backward graph adds to the gradients of the parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from brorl.errors import first_line
from brorl.model.cuda_graphs import GraphStore, Step
from brorl.model.device import to_device
from brorl.model.rounding import agrees

MAX_PASSES = 32  # recorded passes to keep; they share their memory
_MAX_KEYS = 4096  # keys to remember of passes that are not recorded
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
        multiple: Sizes of passes should be multiples of this, in tokens, so that few different passes occur.
    """

    def __init__(self, model: PreTrainedModel, store: GraphStore[RecordedPass], multiple: int) -> None:
        self.multiple = multiple
        self.store = store
        self._model = model
        self._tensors = [*model.parameters(), *model.buffers()]
        self._gradients: dict[Tensor, Tensor] = {}  # at fixed addresses, made when first needed
        self._occurred: set[Hashable] = set()  # keys of passes that have run eagerly
        self.num_runs = 0  # forward passes so far; each overwrites what the backward pass of the one before needs
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)  # makes outputs differentiable

    def run(self, key: Hashable, arrays: Sequence[NDArray[Any]], compute: Compute) -> tuple[Tensor, ...]:
        """Return the outputs of `compute` for inputs with these numbers, differentiable if gradients are enabled.

        The key and the shapes determine what `compute` does, apart from the numbers. The caller runs the backward pass
        before the next forward pass.

        Raises:
            UserError: If graphs are required, but the pass cannot be recorded or its replay gives different results.
        """
        key = self._whole_key(key, arrays)
        recorded = self.store.get(key)
        if recorded is None and self.store.enabled and key in self._occurred:
            recorded = self._record(key, arrays, compute)
        if recorded is None:
            if len(self._occurred) < _MAX_KEYS:
                self._occurred.add(key)
            return compute([to_device(array, self._model.device) for array in arrays])
        for tensor, array in zip(recorded.inputs, arrays, strict=True):
            tensor.copy_(to_device(array, tensor.device), non_blocking=True)
        self.num_runs += 1
        if recorded.backward is None:
            return recorded.run_forward()
        outputs: tuple[Tensor, ...] = _Replay.apply(self, recorded, self._anchor)  # type: ignore[no-untyped-call]
        return outputs

    def clear(self) -> None:
        """Drop all recordings, and the memory of their gradients."""
        self.store.clear()
        self._gradients.clear()

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

    def _record(self, key: Hashable, arrays: Sequence[NDArray[Any]], compute: Compute) -> RecordedPass | None:
        """Record a pass, and compare its replay with an eager pass. After a failure, refuse all recordings."""
        try:
            with self._gradients_aside():
                recorded, reason = self._recorded(arrays, compute)
        except Exception as error:  # a model's code can do anything that graphs reject, and memory can run out
            recorded, reason = None, f"{type(error).__name__}: {first_line(error)}"
        if reason is not None:
            self._gradients.clear()
            self.store.refuse(reason)
        elif recorded is not None:
            self.store.add(key, recorded)
        return recorded

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Put the parameters' gradients aside inside the block."""
        parameters = [x for x in self._tensors if x.requires_grad]
        kept = [None if x.grad is None else x.grad.clone() for x in parameters]
        _clear_gradients(parameters)
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def _recorded(self, arrays: Sequence[NDArray[Any]], compute: Compute) -> tuple[RecordedPass | None, str | None]:
        """Return a recorded pass and None, or None and the reason. A pass with NaNs is not recorded, for no reason."""
        inputs = [to_device(array, self._model.device).clone() for array in arrays]
        expected = compute(inputs)
        if any(bool(output.isnan().any()) for output in expected):
            return None, None  # a model that diverged is reported elsewhere
        outputs: list[Tensor] = []
        output_grads = [torch.linspace(0.5, 1.5, len(x), dtype=x.dtype, device=x.device) for x in expected]

        def forward() -> None:
            torch.clear_autocast_cache()  # the casts of the weights belong to this pass
            outputs[:] = compute(inputs)

        def backward() -> None:
            torch.autograd.backward(outputs, output_grads)
            torch.clear_autocast_cache()

        steps = [forward]
        trained: list[Tensor] = []
        if torch.is_grad_enabled():
            steps.append(backward)
            torch.autograd.backward(expected, output_grads)
            trained = [x for x in self._tensors if x.grad is not None]
        expected, expected_norms = tuple(x.detach() for x in expected), _norms(trained)
        _clear_gradients(trained)
        self.place_gradients(trained)
        replay_forward, *replay_backward = self.store.capture(steps)
        outputs = [x.detach() for x in outputs]
        recorded = RecordedPass(inputs, outputs, output_grads, trained, replay_forward, *replay_backward)
        got = recorded.run_forward()
        _clear_gradients(trained)
        self.place_gradients(trained)
        for replay in replay_backward:
            replay()
        compared = [("log-probs", *pair) for pair in zip(got, expected, strict=True)]
        if trained:
            compared.append(("gradients", _norms(trained), expected_norms))
        dtype = torch.bfloat16 if torch.is_autocast_enabled(self._model.device.type) else self._model.dtype
        for name, values, expected_values in compared:
            # tokens that cannot be drawn have a log-prob of -inf
            if not agrees(values.nan_to_num(neginf=0.0), expected_values.nan_to_num(neginf=0.0), dtype):
                return None, f"the {name} change"
        return recorded, None


def _clear_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


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
