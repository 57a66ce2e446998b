"""The state of a learner in a checkpoint: whole tensors from one process, or shards from several ranks.

With several ranks, each writes its own shards to a folder that the `state_dict` names. A learner with any number of
ranks reads both forms. A `Snapshot` contains only trainable parameters, so with adapters it is as small as the
adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from brorl.errors import first_line
from brorl.model.moments import MOMENTS, SCALE, zero_codes
from brorl.model.sharding import is_sharded, laid_out_as, local_tensor
from brorl.runs.checkpoint import SHARDS


class Snapshot:
    """A copy of a model's trainable parameters, initially its current weights. Each rank copies its own shards.

    `offload` keeps the copy in CPU memory (pinned, for a CUDA device).
    """

    name: ClassVar[str]  # key in a learner's state

    def __init__(self, model: PreTrainedModel, offload: bool = False) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights = {name: empty_like(p, offload) for name, p in self._parameters.items()}
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the model's current weights."""
        for name, parameter in self._parameters.items():
            local_tensor(self._weights[name]).copy_(local_tensor(parameter))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the copy and the model's weights. A second call swaps them back, bit for bit."""
        for name, parameter in self._parameters.items():
            current, stored = local_tensor(parameter), local_tensor(self._weights[name])
            previous = current.clone()
            current.copy_(stored)
            stored.copy_(previous)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return dict(self._weights)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the output of `state_dict`. Raise a ValueError if it belongs to a different model."""
        expected = {name: tuple(w.shape) for name, w in self._weights.items()}
        shapes = {name: tuple(w.shape) for name, w in state.items()}
        if expected != shapes:
            differing = sorted(n for n in expected.keys() | shapes.keys() if expected.get(n) != shapes.get(n))[0]
            raise ValueError(
                f"the {self.name} belongs to a different model: {differing} should have shape "
                f"{expected.get(differing)}, but has {shapes.get(differing)}; resume with the model and adapters that "
                "the run started with"
            )
        for name, weight in self._weights.items():
            local_tensor(weight).copy_(local_tensor(laid_out_as(state[name], self._parameters[name])))


class AveragedWeights(Snapshot):
    """The exponential moving average (EMA) of a model's weights over its updates."""

    name = "ema"

    @torch.no_grad()
    def add(self, decay: float, updates: int) -> None:
        """Add the weights after an update: average <- (1 - new) average + new weights.

        Here new = max(1 - decay, 1 / updates), and `updates` includes this one. Over the first 1 / (1 - decay) updates
        the average is the plain mean of the weights, so the initial weights do not linger.
        """
        new = max(1 - decay, 1 / updates)
        for name, parameter in self._parameters.items():
            local_tensor(self._weights[name]).lerp_(local_tensor(parameter), new)


def empty_like(parameter: Tensor, offload: bool) -> Tensor:
    """Return an uninitialized tensor like a parameter. `offload` puts it on the CPU, pinned for a CUDA device."""
    if not offload:
        return torch.empty_like(parameter, requires_grad=False)
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.device.type == "cuda")


class ReferencePolicy(Snapshot):
    """A snapshot that can replace the model's weights for a forward pass. If offloaded, it is copied at each use."""

    name = "reference"

    def __init__(self, model: PreTrainedModel, offload: bool = False) -> None:
        super().__init__(model, offload)
        self._sharded = is_sharded(model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within a block, replace the model's weights with the reference weights.

        Afterwards the model's weights are restored, bit for bit, even if the block raises. The block must not compute
        anything that keeps a gradient.
        """
        with self._contents_in_place() if self._sharded else self._pointers_in_place():
            yield

    @contextmanager
    def _contents_in_place(self) -> Iterator[None]:
        """Swap the contents of the shards, because FSDP keeps pointers to them."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @contextmanager
    def _pointers_in_place(self) -> Iterator[None]:
        """Swap the pointers to the weights, without copying them."""
        # copy everything to the device before the first swap, so the model is unchanged if memory runs out
        reference = {n: w.to(self._parameters[n].device, non_blocking=True) for n, w in self._weights.items()}
        own_data = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = reference[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own_data[name]


def sharded_header(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], snapshots: Sequence[Snapshot]
) -> dict[str, Any]:
    """Return the unsharded part of a learner's state. `parameters` are the trained ones by name, in order."""
    steps = {name: float(optimizer.state[p]["step"]) for name, p in parameters.items() if p in optimizer.state}
    groups = optimizer.state_dict()["param_groups"]
    quantized = [name for name in steps if MOMENTS[0] + SCALE in optimizer.state[parameters[name]]]
    names = [snapshot.name for snapshot in snapshots]
    stored = {"steps": steps, "quantized": quantized, "param_groups": groups}
    return {SHARDS: SHARDS, "optimizer": stored, "snapshots": names}


def write_sharded(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    snapshots: Sequence[Snapshot],
) -> None:
    """Write the sharded part of a learner's state to a checkpoint's folder; collective. See `sharded_header`."""
    moments = {
        _moment(name, kind): moment
        for name, p in parameters.items()
        if p in optimizer.state
        for kind, moment in optimizer.state[p].items()
        if kind != "step"
    }
    weights = {
        f"{snapshot.name}.{name}": weight for snapshot in snapshots for name, weight in snapshot.state_dict().items()
    }
    write_shards(folder / SHARDS, moments | weights)


def in_memory(
    state: dict[str, Any], parameters: Mapping[str, Tensor], snapshots: Collection[str] = ()
) -> dict[str, Any]:
    """Return a state with its tensors in memory, laid out like this learner's parameters, in the optimizer's order.

    In a sharded state, `shards` is the path of its folder. Snapshots missing from the state are omitted. A state from a
    different model raises a ValueError.
    """
    if SHARDS not in state:
        return state | {"optimizer": _laid_out(state["optimizer"], list(parameters.values()))}
    steps: dict[str, float] = state["optimizer"]["steps"]
    if not steps.keys() <= parameters.keys():
        name = sorted(steps.keys() - parameters.keys())[0]
        raise ValueError(
            f"the optimizer state belongs to a different model: this model has no trainable tensor {name}; start from "
            "the checkpoint's own model and adapters, or without its optimizer state"
        )
    quantized = state["optimizer"]["quantized"]
    moments = {name: _moments_like(p, name in quantized) for name, p in parameters.items() if name in steps}
    like = {_moment(name, kind): moment for name in moments for kind, moment in moments[name].items()}
    stored = [snapshot for snapshot in snapshots if snapshot in state["snapshots"]]
    like |= {f"{snapshot}.{name}": p for snapshot in stored for name, p in parameters.items()}
    tensors = read_shards(Path(state[SHARDS]), like)
    restored = {
        index: {
            "step": torch.tensor(steps[name]),
            **{kind: tensors[_moment(name, kind)] for kind in moments[name]},
        }
        for index, name in enumerate(parameters)
        if name in steps
    }
    optimizer = {"state": restored, "param_groups": state["optimizer"]["param_groups"]}
    weights = {snapshot: {name: tensors[f"{snapshot}.{name}"] for name in parameters} for snapshot in stored}
    return state | {"optimizer": optimizer} | weights


def _moments_like(parameter: Tensor, quantized: bool) -> dict[str, Tensor]:
    """Return tensors with the shape, type and layout of a parameter's moments."""
    if not quantized:
        return dict.fromkeys(MOMENTS, parameter)
    codes, scales = zero_codes(parameter)
    moments = {}
    for kind in MOMENTS:
        moments[kind], moments[kind + SCALE] = codes, scales
    return moments


def _laid_out(optimizer: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Return an optimizer's state with moments laid out like the parameters, except moments of other shapes."""

    def laid_out(index: int, moments: dict[str, Tensor]) -> dict[str, Tensor]:
        if index >= len(parameters) or moments[MOMENTS[0]].shape != parameters[index].shape:
            return moments
        return {
            kind: value if kind == "step" else laid_out_as(value, parameters[index]) for kind, value in moments.items()
        }

    state = {index: laid_out(index, moments) for index, moments in optimizer["state"].items()}
    return optimizer | {"state": state}


def _moment(name: str, kind: str) -> str:
    return f"optimizer.{kind}.{name}"


def with_moments_of(other: dict[str, Any], own: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return the state `own`, including its settings, with the moments of `other`, whose shapes must match."""
    num_tensors = sum(len(group["params"]) for group in other["param_groups"])
    if num_tensors != len(parameters):
        raise ValueError(
            f"the optimizer state belongs to a different model: it has {num_tensors} trainable tensors, this model has "
            f"{len(parameters)}; start from the checkpoint's own model and adapters, or without its optimizer state"
        )
    for index, moments in other["state"].items():
        expected, shape = tuple(parameters[index].shape), tuple(moments["exp_avg"].shape)
        if expected != shape:
            raise ValueError(
                f"the optimizer state belongs to a different model: trainable tensor {index} has shape {expected}, its "
                f"moments {shape}; start from the checkpoint's own model and adapters, or without its optimizer state"
            )
    return {"state": other["state"], "param_groups": own["param_groups"]}


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's shards to a new folder that all ranks can reach; collective, and complete on return."""
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise OSError(f"could not write the shards in {folder}: {_reason(error)}") from error


def read_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors from `write_shards` on any number of ranks. `like` gives their shape, type, device and layout."""
    reader = FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"could not read the shards in {folder} ({error}); choose a different checkpoint") from error
    for name, tensor in like.items():
        metadata = stored.get(name)
        shape = tuple(metadata.size) if isinstance(metadata, TensorStorageMetadata) else None
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{folder} belongs to a different model: {name} should have shape {tuple(tensor.shape)}, but has "
                f"{shape}; resume with the model and adapters that the run started with"
            )
    tensors = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs no process group
        try:
            load(dict(tensors), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
        except CheckpointException as error:
            reason = _reason(error)
            raise ValueError(
                f"could not read the shards in {folder} ({reason}); choose a different checkpoint"
            ) from error
    return tensors


def _reason(error: CheckpointException) -> str:
    """Describe the failure of the lowest-numbered rank that failed."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(failure).__name__}: {first_line(failure)}"
