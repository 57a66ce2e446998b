"""CUDA graphs without CUDA: the operators of a step, recorded with their tensors, and called again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


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

    Like a graph it knows nothing of what Python would do in another call of the step. Steps that are recorded together
    share the tensors that they made.

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
        made_now: dict[int, Tensor] = {}
        return [self._recorded(step, made_now) for step in steps]

    def _recorded(self, step: Callable[[], None], made_now: dict[int, Tensor]) -> Callable[[], None]:
        with _Recorder() as recorder:
            step()

        def replay() -> None:
            self.replays += 1

            def now(x: Tensor) -> Tensor:
                return made_now.get(id(x), x)

            for function, args, kwargs, made in recorder.calls:
                given, named = tree_map_only(Tensor, now, (args, kwargs))
                outputs = function(*given, **named)
                before, after = ([made], [outputs]) if isinstance(made, Tensor) else (made, outputs)
                made_now.update(
                    {id(x): y for x, y in zip(before or (), after or (), strict=True) if isinstance(x, Tensor)}
                )
            self._spoil()

        return replay
