"""CUDA graphs without CUDA: the operators of a step, recorded with their tensors, and called again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made


class RecordedSteps:
    """Records steps: a replay calls the same operators with the same numbers of Python, on the tensors at their places.

    Like a graph it knows nothing of what Python would do in another call of the step, and writes what it makes where
    the recorded step made it.

    Args:
        spoil: Called after each replay, for instance to change what it wrote.
    """

    def __init__(self, spoil: Callable[[], object] = lambda: None) -> None:
        self.captures = self.replays = 0
        self._spoil = spoil

    def __call__(self, steps: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Run and record steps; return their replays."""
        self.captures += 1
        for step in steps:
            step()
        return [self._recorded(step) for step in steps]

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        with _Recorder() as recorder:
            step()

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for function, args, kwargs, made in recorder.calls:
                outputs = function(*args, **kwargs)
                for place, output in zip(tree_leaves(made), tree_leaves(outputs), strict=True):
                    # an operator that returned a view or an input does so again
                    if isinstance(output, Tensor) and output.data_ptr() != place.data_ptr():
                        place.copy_(output)
            self._spoil()

        return replay
