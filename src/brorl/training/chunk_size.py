"""Nodes per pass: how much goes through the model at once, halved when memory runs out.

In: a piece of work that reads the current size. Out: its result, at a size that fits. It refuses to go below the least
size, with the ways out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from brorl.errors import OutOfMemoryError, first_line

T = TypeVar("T")

LEAST_NODES = 16
_CPU_MESSAGES = ("can't allocate memory", "DefaultCPUAllocator")


class ChunkSize:
    """The most nodes of a forward pass; gets smaller and never larger, and sets memory, not results.

    Args:
        initial: Nodes to start with, >= 1.
        say: Told in a line when it is halved.

    Attributes:
        value: Nodes at present.
        retries: How often it was halved since `retries` was last set to 0.
    """

    def __init__(self, initial: int, say: Callable[[str], None]) -> None:
        self.value = initial
        self.retries = 0
        self._say = say

    def run(self, work: Callable[[], T]) -> T:
        """Do some work, again from its start with half the nodes whenever memory runs out.

        Args:
            work: Reads `value`; must be able to start again after it has failed anywhere.

        Returns:
            What `work` returns.

        Raises:
            OutOfMemoryError: If memory does not suffice for the least size.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Past the handler, the failed pass and its tensors are free.
            self._halve(reason)

    def once(self, work: Callable[[], object]) -> None:
        """Do some work that cannot start again.

        Raises:
            OutOfMemoryError: If memory runs out.
        """
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(too_little_memory(self.value, first_line(error))) from error

    def restrict(self, value: int) -> None:
        """Start from a size that an earlier part of the run was brought down to."""
        self.value = min(self.value, value)

    def _halve(self, reason: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if self.value <= LEAST_NODES:
            raise OutOfMemoryError(too_little_memory(self.value, reason))
        half = max(LEAST_NODES, self.value // 2)
        self._say(f"out of memory with {self.value} tree nodes per pass; again with engine.nodes_per_pass: {half}")
        self.value = half
        self.retries += 1


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch ran out of memory, of a device or of the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in _CPU_MESSAGES)


def too_little_memory(nodes: int, reason: str) -> str:
    """Return the line about memory that does not suffice, with what needs less of it."""
    return (
        f"out of memory while training with {nodes} tree nodes per pass ({reason}), with no more retries; lower "
        "engine.nodes_per_pass if it is set, switch on engine.gradient_checkpointing or reference.offload, train "
        "adapters (lora.rank), lower engine.memory_gib, or take a smaller model"
    )
