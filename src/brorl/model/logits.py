"""Logits of the rows of a forward pass: whole if there are few, otherwise in blocks of at most 2^26.

The output embedding is called as a module, so bias, adapters, tied and frozen weights, shards and autocast need no
special handling. A model that changes its logits afterwards (soft-capping, a scale) needs whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from brorl.errors import UserError

MAX_LOGITS = 1 << 27  # more are computed in blocks
LOGITS_PER_BLOCK = 1 << 26
# compiled code keeps only the logits and their gradient; larger blocks add to the weight gradient less often
COMPILED_LOGITS_PER_BLOCK = 1 << 29
LOGITS_PER_DRAW = 1 << 24  # a draw needs several temporaries the size of its logits, one of them in float64
MASSES_PER_DRAW = 1 << 21  # masses searched in one draw: those of all blocks, then of the tokens in one block


def tokens_per_mass(vocabulary: int) -> int:
    """Return the tokens per block of a draw, about the square root of the vocabulary: 512 for 151,936 tokens."""
    return 1 << (vocabulary.bit_length() + 1) // 2


def logit_bytes_per_row(vocabulary: int, itemsize: int) -> int:
    """Return the engine's bytes for one row's logits, their softmax, and one temporary of the same size."""
    return 3 * vocabulary * max(4, itemsize)


@dataclass(frozen=True)
class RowLogits:
    """The logits of R rows, or the output embedding's inputs from which they are computed."""

    row: Tensor  # logits, shape [R, V], or inputs of the output embedding, shape [R, h]
    embedding: nn.Module | None = None  # the output embedding; None if `row` contains the logits
    vocabulary: int = 0  # outputs of the embedding, V; 0 without one

    def whole(self) -> Tensor:
        """Return all logits, shape [R, V]."""
        logits_RV: Tensor = self.row if self.embedding is None else self.embedding(self.row)
        return logits_RV


def row_logits(
    model: PreTrainedModel,
    forward: Callable[[], Tensor],
    num_rows: int,
    *,
    whole_logits: bool = False,
    max_logits: int | None = None,
) -> RowLogits:
    """Call `forward`, which runs the model and returns its logits. Skip the output embedding if there would be many.

    The result has the shape that `forward` returns. If `embeds_last` is false for the model, `whole_logits` is
    required.
    """
    vocabulary: int = model.config.get_text_config().vocab_size
    if whole_logits or num_rows * vocabulary <= (max_logits or MAX_LOGITS):
        return RowLogits(forward())
    embedding = model.get_output_embeddings()
    assert embedding is not None  # `embeds_last` has found it
    with _skipped(embedding) as skipped:
        row = forward()
    if not skipped.is_output(row):
        raise UserError(
            f"{type(model).__name__} changes its logits after its output embedding and needs whole logits; pass "
            "whole_logits=True, or let choose_forward find it"
        )
    return RowLogits(row, embedding, vocabulary)


@torch.no_grad()
def embeds_last(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are the unchanged output of its output embedding; works on the meta device."""
    embedding = model.get_output_embeddings()
    if embedding is None:
        return False
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    # Given a full mask, the model skips its checks, which read values that do not exist on the meta device.
    mask = {"attention_mask": torch.zeros(1, 1, 1, 1, device="meta")} if model.device.type == "meta" else {}
    with _skipped(embedding) as skipped:
        try:
            with torch.device(model.device):
                logits: Tensor = model(input_ids=token, use_cache=False, **mask).logits
        except Exception:  # e.g. a cast or a scale that does not match the shape of the inputs
            return False
    return skipped.is_output(logits)


@contextmanager
def computed_whole(model: PreTrainedModel) -> Iterator[None]:
    """Run a model's output embedding inside the block, even while `row_logits` skips it.

    This lets a hook at the start of one forward pass run a second, full pass.
    """
    embedding = model.get_output_embeddings()
    forward = None if embedding is None else embedding.__dict__.get("forward")
    skipped = getattr(forward, "__self__", None)
    if embedding is None or not isinstance(skipped, _Skipped):
        yield
        return
    with replaced_forward(embedding, skipped.previous):
        yield


class _Skipped:
    """Records the inputs of an output embedding, which returns them unchanged. `previous` is its `forward` override."""

    def __init__(self, embedding: nn.Module) -> None:
        self.previous: Callable[..., Any] | None = embedding.__dict__.get("forward")
        self._inputs: list[tuple[Tensor, int]] = []

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        if hidden._is_view():
            hidden = hidden.clone()  # FSDP2 warns about an output that is a view
        self._inputs.append((hidden, hidden._version))
        return hidden

    def is_output(self, logits: Tensor) -> bool:
        """Return whether a model's output is its output embedding's input: the same tensor, unchanged."""
        if len(self._inputs) != 1:
            return False
        hidden, version = self._inputs[0]
        return logits is hidden and hidden._version == version


@contextmanager
def _skipped(embedding: nn.Module) -> Iterator[_Skipped]:
    """Make an output embedding return its input inside the block."""
    skipped = _Skipped(embedding)
    with replaced_forward(embedding, skipped.forward):
        yield skipped


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Give a module a different `forward` inside the block; None means its class's method."""
    previous = module.__dict__.get("forward")
    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, previous)


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward  # assigning to the attribute takes several times as long
