"""CUDA graphs without CUDA: the operators of a step, recorded with their tensors, and called again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _Recorder(TorchDispatchMode):
    """Records calls of operators, and the tensors in memory that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.allocated: list[Tensor] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        # the tensors' memory, without the autograd graph that they get after this
        self.calls.append((function, *tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, made))))
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(made):
            if storage_of(tensor) not in given | self._known:
                self._known.add(storage_of(tensor))
                self.allocated.append(tensor.detach())
        return made


def tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedSteps:
    """Records steps: a replay calls the same operators with the same numbers of Python, on the tensors at their places.

    Like a graph it knows nothing of what Python would do in another call of the step, and writes what it makes where
    the recorded step made it. Tensors that steps allocate hold NaN after the capture, as one that has executed nothing,
    and after a replay of steps of a different capture, which would use the same memory.

    Args:
        spoil: Called after each replay, for instance to change what it wrote.
    """

    def __init__(self, spoil: Callable[[], object] = lambda: None) -> None:
        self.captures = self.replays = 0
        self._spoil = spoil
        self._allocated: list[list[Tensor]] = []  # by capture

    def __call__(self, steps: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Run and record steps; return their replays."""
        self.captures += 1
        for step in steps:
            step()
        own: list[Tensor] = []
        self._allocated.append(own)
        try:
            return [self._recorded(step, own) for step in steps]
        finally:
            erase(own)

    def _recorded(self, step: Callable[[], None], own: list[Tensor]) -> Callable[[], None]:
        with _Recorder() as recorder:
            step()
        own += recorder.allocated

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for others in self._allocated:
                if others is not own:
                    erase(others)
            for function, args, kwargs, made in recorder.calls:
                outputs = function(*args, **kwargs)
                for place, output in zip(tree_leaves(made), tree_leaves(outputs), strict=True):
                    # an operator that returned a view or an input does so again
                    if isinstance(output, Tensor) and output.data_ptr() != place.data_ptr():
                        place.copy_(output)
            self._spoil()

        return replay


@torch.no_grad()
def erase(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
