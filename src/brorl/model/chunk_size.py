"""The size of the passes of a model, and what the ranks that share it agree on; see `sharding.SyncedForward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from brorl.activity import Echo
from brorl.errors import OutOfMemoryError, first_line


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory, so all ranks start again."""


class Passes:
    """Keeps the passes of several ranks in step; here those of one process, which has nothing to agree on."""

    def finish(self) -> None:
        """Make the passes that other ranks still need; the end of a piece of work."""

    def fail(self) -> None:
        """Report that this rank ran out of memory."""

    def any(self, failed: bool) -> bool:
        """Return whether some work failed on any rank."""
        return failed


T = TypeVar("T")

MIN_NODES = 16
_MESSAGES = ("can't allocate memory", "DefaultCPUAllocator", "MPS backend out of memory")  # not of CUDA


class ChunkSize:
    """Largest number of nodes of a forward pass. It only shrinks, and changes memory, not results.

    All ranks halve together. `retries` counts how often it was halved since it was last set to 0.
    """

    def __init__(self, initial: int, echo: Echo, passes: Passes | None = None) -> None:
        self.initial = self.value = initial
        self.retries = 0
        self._echo = echo
        self._passes = passes or Passes()

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of work that reads `value`; restart it with half the nodes whenever memory runs out."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason, on_this_rank = first_line(error), not isinstance(error, PeerOutOfMemoryError)
            # Past the handler, the failed pass and its tensors are free.
            if on_this_rank:
                self._passes.fail()
            self._halve(reason)

    def once(self, work: Callable[[], object]) -> None:
        """Do some work that cannot be restarted; an error if memory runs out, on this rank or on another one."""
        reason = None
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        if self._passes.any(reason is not None):
            raise OutOfMemoryError(too_little_memory(self.value, reason or "on another rank"))

    def restrict(self, value: int) -> None:
        """Shrink to the size that an earlier part of the run ended with."""
        self.value = min(self.value, value)

    def _halve(self, reason: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()
        if self.value <= MIN_NODES:
            raise OutOfMemoryError(too_little_memory(self.value, reason))
        half = max(MIN_NODES, self.value // 2)
        self._echo(f"out of memory with {self.value} tree nodes per pass; retrying with engine.nodes_per_pass: {half}")
        self.value = half
        self.retries += 1


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch ran out of memory, on a device or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in _MESSAGES)


def too_little_memory(nodes: int, reason: str) -> str:
    """Return the error about too little memory, with the settings that save memory."""
    return (
        f"out of memory while training with {nodes} tree nodes per pass ({reason}), with no more retries; lower "
        "engine.nodes_per_pass if it is set, switch on engine.gradient_checkpointing or reference.offload, set "
        "optimizer.states: 8bit or host, train adapters (lora.rank), lower engine.memory_gib, or choose a smaller model"
    )
