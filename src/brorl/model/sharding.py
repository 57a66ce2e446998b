"""Shards a model over ranks: each rank keeps part of every parameter and gathers one layer at a time.

A pass of a sharded model (FSDP2) is collective: it blocks until every rank joins in. `ShardedPassSync` makes all ranks
run the same sequence of passes.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from brorl.errors import OutOfMemoryError
from brorl.model.chunks import PassSync, PeerOutOfMemoryError
from brorl.model.logits import computed_whole
from brorl.model.source import processor_files
from brorl.model.tree_attention import SwappedAttention

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError:  # older torch versions cannot complete a pass after an error
    DefaultAllGather = DefaultReduceScatter = object  # type: ignore[assignment, misc]


def shard(model: PreTrainedModel, weights: dict[str, Tensor], device: torch.device, autocast: bool = False) -> None:
    """Shard a model on the meta device, in place, over all ranks: each decoder layer, and then the rest.

    Frozen weights are sharded too. Rank 0 sends each rank its shards, one weight at a time, and empties its `weights`.
    The `weights` of other ranks are ignored: only rank 0 ever has a whole weight. With `autocast`, parameters are
    gathered and used in bfloat16; shards, their gradients and the gradient sums over ranks stay in float32.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if autocast else MixedPrecisionPolicy()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        _sum_gradients(sharded)
    first = torch.distributed.get_rank() == 0
    for name, parameter in model.named_parameters():
        _scatter(parameter, weights.pop(name) if first else None, device)
    model.to(device)  # type: ignore[arg-type]  # FSDP pads the shards here, and never moves them afterwards


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether a model is sharded."""
    return isinstance(model, FSDPModule)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor from its shards; collective. A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard as a plain tensor that shares its memory. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Lay out a tensor like a parameter, given the whole tensor on every rank; not collective."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
        return tensor
    shard = tensor.new_empty(local_tensor(parameter).shape[0], *tensor.shape[1:], device=parameter.device)
    chunks = tensor.chunk(parameter.device_mesh.size())  # FSDP splits rows this way; the last ranks may have none
    rank = parameter.device_mesh.get_local_rank()
    if rank < len(chunks):
        shard.copy_(chunks[rank])
    return with_rows_of(parameter, shard)


def with_rows_of(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor that is split by rows across ranks, like a parameter; not collective.

    `shard` has this rank's rows. It is returned unchanged if the parameter is not sharded.
    """
    if not isinstance(parameter, DTensor):
        return shard
    whole = torch.empty(parameter.shape[0], *shard.shape[1:], device="meta")
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save_whole(model: PreTrainedModel, folder: Path, writes: bool) -> dict[str, Tensor]:
    """Write a model in Hugging Face format, or its adapters in peft's format; collective if it is sharded.

    Return the written parameters by name, on the CPU if the model is sharded. Ranks that do not write return an empty
    dict.
    """
    only_adapters = getattr(model, "_hf_peft_config_loaded", False)
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not only_adapters:
            tensor = full_tensor(parameter.detach())
            if writes:
                parameters[name] = tensor.cpu() if is_sharded(model) else tensor
    if writes and only_adapters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft may look for the base on the hub; its weights are not saved here
            model.save_pretrained(folder, state_dict=parameters)
    elif writes and is_sharded(model):
        stored = model.state_dict().keys()
        buffers = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in stored}
        model.save_pretrained(folder, state_dict=parameters | buffers)
    elif writes:
        model.save_pretrained(folder)
    if writes and not only_adapters:
        for file in processor_files(model):
            shutil.copyfile(file, folder / file.name)
    return parameters


@torch.no_grad()
def _scatter(parameter: Tensor, whole: Tensor | None, device: torch.device) -> None:
    """Materialize a sharded parameter from the meta device; collective."""
    assert isinstance(parameter, DTensor)
    size = parameter.device_mesh.size()
    rows = max(1, -(-parameter.shape[0] // size))  # rows per shard; the last shards may have fewer
    padded = torch.zeros(rows, *parameter.shape[1:], dtype=parameter.dtype, device=device)
    pieces = None
    if whole is not None:
        *full, last = whole.to(device).contiguous().split(rows)
        if last.shape[0] < rows:
            last = torch.cat([last, last.new_zeros(rows - last.shape[0], *last.shape[1:])])
        pieces = [_bytes(piece) for piece in (*full, last)]
        pieces += [torch.zeros_like(pieces[0])] * (size - len(pieces))
    torch.distributed.scatter(_bytes(padded), pieces)
    shards = with_rows_of(parameter, padded[: local_tensor(parameter).shape[0]])
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(shards, parameter.requires_grad))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes: gloo does not support every type."""
    return tensor.view(-1).view(torch.uint8)


def _sum_gradients(module: Any) -> None:
    """Sum the gradients over the ranks instead of averaging them, the default."""
    if hasattr(module, "set_gradient_divide_factor"):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    else:  # an older torch
        module.set_reduce_scatter_divide_factor(1.0)


class _Kind(IntEnum):
    """A rank's next pass. All ranks first make the pass with the largest number."""

    NONE = 0
    GRADIENT = 1  # forward and backward
    VALUES = 2  # forward without a gradient
    FAILED = 3  # no pass: the work restarts with smaller chunks, or ends


class ShardedPassSync(PassSync):
    """Makes all ranks run the same sequence of passes through a sharded model.

    Before each pass, the ranks agree on its kind with `maximum`, which returns the largest integer over all ranks. A
    rank that does not need this pass runs one over two tokens that adds zero to every gradient. Passes without a
    gradient come first, so that ranks compute their chunks in parallel even if their groups of prompts end at different
    places. A forward pass with a gradient must be followed by its backward pass.
    """

    def __init__(self, model: PreTrainedModel, maximum: Callable[[int], int]) -> None:
        self._model = model
        self._maximum = maximum
        self._attention: str = model.config._attn_implementation
        self._open: _Kind = _Kind.NONE
        self._within = False
        self._collectives = _Collectives()
        for module in model.modules():
            if isinstance(module, FSDPModule) and hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(_AllGather(self._collectives))
                module.set_custom_reduce_scatter(_ReduceScatter(self._collectives))
        model.register_forward_pre_hook(self._before, prepend=True)

    def finish(self) -> None:
        """Make the passes that other ranks still need. Afterwards, the model's parameters are shards."""
        self._reach(_Kind.NONE)
        self._back_to_shards()

    def fail(self) -> None:
        """Report that this rank ran out of memory. Other ranks raise an error in their next pass or in `finish`."""
        if self._open:
            self._complete(self._open)
            self._open = _Kind.NONE
        self._maximum(_Kind.FAILED)

    def any(self, failed: bool) -> bool:
        """Return whether work failed on any rank; collective."""
        return bool(self._maximum(int(failed)))

    def _before(self, _module: torch.nn.Module, _inputs: object) -> None:
        if self._within:
            return
        kind = _Kind.GRADIENT if torch.is_grad_enabled() else _Kind.VALUES
        self._reach(kind)
        self._back_to_shards()
        self._open = kind

    def _back_to_shards(self) -> None:
        """Free the parameters outside the layers, which a pass without a gradient leaves gathered.

        They have the dtype of the passes, and can belong to the reference. Every pass starts from shards, and weights
        are also read from shards.
        """
        root: Any = self._model
        root.reshard()
        self._collectives.made = self._collectives.left_out = 0

    def _reach(self, kind: _Kind) -> None:
        """Make passes with the other ranks until the ranks agree on a pass of this kind."""
        self._open = _Kind.NONE
        while (agreed := _Kind(self._maximum(kind))) != kind:
            if agreed == _Kind.FAILED:
                self._back_to_shards()
                raise PeerOutOfMemoryError("another rank ran out of memory")
            self._back_to_shards()
            self._open = agreed  # memory can run out in this pass too
            self._pass_without_effect(agreed)
            self._open = _Kind.NONE

    def _complete(self, kind: _Kind) -> None:
        """Make the remaining collective calls of a pass that failed."""
        root: Any = self._model
        if not hasattr(root, "reset_iter_state"):  # an older torch
            raise OutOfMemoryError(
                f"out of memory in a pass of a sharded model, which torch {torch.__version__} cannot retry; lower "
                "engine.nodes_per_pass, or install a newer torch"
            )
        self._collectives.left_out = self._collectives.made
        self._collectives.made = 0
        root.reset_iter_state()
        self._pass_without_effect(kind)
        self._back_to_shards()

    def _pass_without_effect(self, kind: _Kind) -> None:
        """Run a pass over two tokens with zero gradients."""
        self._within = True
        try:
            token = torch.zeros(1, 2, dtype=torch.long, device=self._model.device)
            with (
                SwappedAttention(self._model, self._attention),
                computed_whole(self._model),  # this rank's own pass may skip the output embedding
                torch.set_grad_enabled(kind == _Kind.GRADIENT),
            ):
                logits: Tensor = self._model(input_ids=token, use_cache=False).logits
            if kind == _Kind.GRADIENT:
                logits.backward(torch.zeros_like(logits))
        finally:
            self._within = False


@dataclass
class _Collectives:
    """Counts the collective calls of a pass, and those to skip because a failed pass already made them."""

    made: int = 0
    left_out: int = 0


class _Counted:
    """Makes a collective call, unless a failed pass already made it."""

    def __init__(self, collectives: _Collectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        self._collectives.made += 1
        if self._collectives.made > self._collectives.left_out:
            return super().__call__(output_tensor, *arguments, **named)  # type: ignore[misc]
        output_tensor.zero_()
        return None


class _AllGather(_Counted, DefaultAllGather):
    """Gathers the shards of a layer."""


class _ReduceScatter(_Counted, DefaultReduceScatter):
    """Adds up the gradients of a layer."""
