"""What ranks do in the tests of a model that rank 0 reads alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from brorl.errors import UserError
from brorl.model.flex_attention import FlexContext
from brorl.model.forward import check_packed
from brorl.model.load import load_model
from brorl.model.settings import LoraSettings
from brorl.model.sharding import full_tensor, shard
from brorl.model.tree_path import TreeForward
from brorl.training.ranks import Ranks, load_on_first_rank

CPU = torch.device("cpu")
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    folder: Path
    dtype: torch.dtype = torch.float32
    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False
    transposed: bool = False  # whether matrices are in memory column by column

    def load(self) -> PreTrainedModel:
        torch.manual_seed(0)  # of new adapters
        model = load_model(str(self.folder), CPU, self.dtype, self.lora, self.gradient_checkpointing)
        for parameter in model.parameters():
            if self.transposed and parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        return model


@dataclass(frozen=True)
class Described:
    """Everything about a model that a rank must have right.

    Tensors are bytes, but for the logits: a rank computes them with weights of another layout in memory.
    """

    parameters: dict[str, tuple[Any, ...]]
    buffers: dict[str, tuple[Any, ...]]
    same_objects: list[list[str]]
    modules: list[tuple[str, str, bool]]
    dropouts: list[float]
    config: dict[str, Any]
    logits: FloatArray = field(compare=False)


def describe(model: PreTrainedModel) -> Described:
    config = {name: value for name, value in vars(model.config).items() if not name.startswith("_abc")}
    names: dict[int, list[str]] = {}
    for name, p in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(p), []).append(name)
    values = [value for module in model.modules() for name, value in vars(module).items() if "dropout" in name]
    return Described(
        {name: (p.requires_grad, *_exact(full_tensor(p))) for name, p in model.named_parameters()},
        {name: _exact(buffer) for name, buffer in model.named_buffers()},
        sorted(names.values()),
        [(name, _kind(module), module.training) for name, module in model.named_modules()],
        [value for value in values if isinstance(value, float)]
        + [module.p for module in model.modules() if isinstance(module, nn.Dropout)],
        config,
        _logits(model),
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # a sharded module is of a subclass


def _exact(tensor: Tensor) -> tuple[Any, ...]:
    tensor = tensor.detach().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes()


def _logits(model: PreTrainedModel) -> FloatArray:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(12).view(2, 6) % 11, use_cache=False).logits
    return logits.double().numpy()


def loaded(ranks: Ranks, loading: Loading) -> tuple[Described, list[bool]]:
    """Return the sharded model, and for each parameter whether it was on the meta device before."""

    def load() -> tuple[PreTrainedModel, str]:
        assert ranks.rank == 0
        return loading.load(), "a fact"

    model, weights, facts = load_on_first_rank(ranks, load, loading.lora, loading.gradient_checkpointing)
    assert facts == "a fact"
    assert bool(weights) == (ranks.rank == 0)
    on_meta = [p.is_meta for p in model.parameters()]
    shard(model, weights, CPU)
    assert not weights
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    return describe(model), on_meta


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of all tensors on the CPU that live at once."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._add(one.to_local() if isinstance(one, DTensor) else one)
        return result

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))


def memory(ranks: Ranks, loading: Loading) -> tuple[int, int, int]:
    """Return the peak of the bytes while a model is loaded and sharded; the bytes of the shards, and of buffers."""
    loaded = [loading.load()] if ranks.rank == 0 else []
    with CountedMemory([p for model in loaded for p in model.parameters()]) as counted:
        model, weights, _ = load_on_first_rank(ranks, lambda: (loaded.pop(), None))
        shard(model, weights, CPU)
    shards = [p.to_local().untyped_storage().nbytes() for p in model.parameters()]
    return counted.peak, sum(shards), sum(b.nbytes for b in model.buffers())


def failure(ranks: Ranks, loading: Loading | None) -> str:
    """Return the error of a rank. Rank 0 fails: with the model, or without one, as a faulty program."""

    def load() -> tuple[PreTrainedModel, None]:
        if loading is None:
            raise KeyError("a fault")
        return loading.load(), None

    try:
        load_on_first_rank(ranks, load)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def checked_packed(ranks: Ranks, loading: Loading, factor: float, compiled: bool) -> str:
    """Check packed passes, with an attention times a factor, on a sharded model; return the error."""
    model, weights, _ = load_on_first_rank(ranks, lambda: (loading.load(), None))
    shard(model, weights, CPU)
    attend, original = FlexContext.of_heads, torch.compile
    with (
        patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),  # it refuses gradients on a CPU
        patch.object(FlexContext, "of_heads", lambda *args: factor * attend(*args)),
        patch("torch.compile", lambda function, **options: original(function, **{"backend": "aot_eager", **options})),
    ):
        try:
            check_packed(model, TreeForward(packed=True, compiled=compiled))
        except UserError as error:
            return str(error)
    return "gradients" if any(p.grad is not None for p in model.parameters()) else ""
