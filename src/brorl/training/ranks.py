"""The processes (ranks) that share a learner: they connect, sum numbers, load the model and divide the responses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from brorl.arrays import FloatArray
from brorl.errors import FirstRankError, UserError, first_line
from brorl.model.chunks import TreeSlice
from brorl.model.load import Blueprint
from brorl.model.settings import LoraSettings

T = TypeVar("T")
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Ranks:
    """The processes of a learner; every method is collective."""

    rank: int = 0  # number of this process, starting at 0
    size: int = 1  # number of processes

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    def maximum(self, value: int) -> int:
        """Return the largest of the ranks' integers."""
        if self.size == 1:
            return value
        largest = torch.tensor(value)  # on the CPU, so the device does not have to wait
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def call_on_first_rank(self, work: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on every rank. The result must be picklable.

        Raises:
            FirstRankError: On the other ranks, if the function fails with a `UserError` on rank 0.
            RuntimeError: On the other ranks, if it fails with any other exception.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                kind = FirstRankError if isinstance(error, UserError) else RuntimeError
                name = "" if kind is FirstRankError else f"{type(error).__name__}: "
                outcome[1] = kind(f"learner rank 0 on machine {socket.gethostname()}: {name}{error}")
                torch.distributed.broadcast_object_list(outcome)
                raise
        torch.distributed.broadcast_object_list(outcome)
        result, failure = outcome
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]


ALONE = Ranks()


def join(rank: int, size: int, address: str, port: int, backend: Backend = "gloo", timeout_s: float = 1800.0) -> Ranks:
    """Connect to the other processes of a learner, and return once all are connected.

    Args:
        rank: Number of this process, starting at 0.
        size: Number of processes.
        address: Host of rank 0.
        port: A free port on rank 0's host.
        backend: `nccl` for CUDA devices, one per process; `gloo` for CPUs.
        timeout_s: Timeout here and in later exchanges, in seconds; a process that does not answer is an error.

    Raises:
        UserError: If the processes cannot connect.
    """
    if size == 1:
        return ALONE
    try:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,  # gloo sends small numbers on the CPU
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"rank {rank} of {size} could not reach the other learner ranks at {address}:{port} within {timeout_s:g} s "
            f"({first_line(error)}); check that {size} ranks were started and that {address} is reachable on this port"
        ) from error
    return Ranks(rank, size)


def deal(costs: Sequence[FloatArray], num_ranks: int) -> list[list[TreeSlice]]:
    """Divide the responses of all trees, in order, into one part per rank, of nearly equal cost.

    Example: for two trees with 3 and 1 responses of equal cost on 2 ranks, rank 0 gets responses 0 and 1 of the first
    tree, and rank 1 gets response 2 and the second tree. At most R - 1 trees are split. A loss is a sum over responses,
    so the gradients of a tree's parts add up to the tree's gradient. The second rank recomputes the prompt and shared
    tokens.

    Args:
        costs: Cost of each distinct response of each tree, above 0, shape [L].
        num_ranks: Number of ranks, R.

    Returns:
        The pieces of each rank; some ranks have none if there are fewer responses than ranks. A rank's cost differs
        from the mean by less than the most expensive response.
    """
    if not costs:
        return [[] for _ in range(num_ranks)]
    cost = np.concatenate(costs)
    middle = np.cumsum(cost) - cost / 2
    rank = np.minimum((middle * num_ranks / cost.sum()).astype(np.int64), num_ranks - 1)
    ends = np.cumsum([cost_L.size for cost_L in costs])
    pieces_R: list[list[TreeSlice]] = [[] for _ in range(num_ranks)]
    for index, (cost_L, end) in enumerate(zip(costs, ends.tolist(), strict=True)):
        rank_L = rank[end - cost_L.size : end]
        # a piece begins where the rank changes: ranks [0, 0, 1] give the pieces 0 to 2 and 2 to 3
        starts = np.flatnonzero(np.diff(rank_L, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), cost_L.size], strict=True):
            pieces_R[rank_L[start]].append(TreeSlice(index, start, stop))
    return pieces_R


def load_on_first_rank(
    ranks: Ranks,
    load: Callable[[], tuple[PreTrainedModel, T]],
    lora: LoraSettings | None = None,
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, dict[str, Tensor], T]:
    """Load a model on rank 0, and build it without weights on the others; collective.

    `load` loads the model into CPU memory, with the given adapters and checkpointing. It also returns facts about the
    model that all ranks need.

    Returns:
        The model with its parameters on the meta device, its weights by name (none on the other ranks), and the facts.

    Raises:
        FirstRankError: On the other ranks, if rank 0 cannot load the model.
    """
    loaded: list[PreTrainedModel] = []

    def work() -> tuple[Blueprint, T]:
        model, facts = load()
        loaded.append(model)
        return Blueprint.of(model, lora, gradient_checkpointing), facts

    blueprint, facts = ranks.call_on_first_rank(work)
    if not loaded:
        return blueprint.build(), {}, facts
    [model] = loaded
    return model, blueprint.take_weights(model), facts
