"""Engines for tests of rollout workers; a worker imports this module, and transformers only where it is needed."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from time import sleep

import torch
from torch import Tensor

from brorl.errors import OutOfMemoryError
from brorl.rollout.engine import SampleTask, split_prompt_seed
from brorl.tree import RolloutTree

HUNG, LARGE = [14], [15]  # prompts of one token that cause faults


class NativeInBothPrecisions:
    """A native engine of a small model: even seeds sample in float32, odd ones in float64.

    Args:
        seed: Seed of the weights.
        hang: The engine hangs on the prompt `HUNG` while this file exists.
    """

    def __init__(self, seed: int, hang: Path | None = None) -> None:
        from brorl.rollout.native_engine import NativeEngine
        from small_models import small_model

        self._hang = hang
        self._engines = [
            NativeEngine(small_model(seed=seed, dtype=dtype, scale=0.4), eos_token_id=0)
            for dtype in (torch.float32, torch.float64)
        ]

    @property
    def version(self) -> int:
        return self._engines[0].version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        weights = list(weights)
        for engine in self._engines:
            engine.load_weights(weights, version)

    def sample(self, task: SampleTask) -> list[RolloutTree]:
        call, number = split_prompt_seed(task.seed_P[0])
        while task.prompts[0] == HUNG and self._hang is not None and self._hang.exists():
            sleep(0.01)
        if task.prompts[0] == LARGE:
            raise OutOfMemoryError(f"no row of prompt {number} fits")
        return self._engines[call % 2].sample(task)


class Fatal:
    """An engine that ends its process when it samples."""

    version = 0

    def load_weights(self, *_: object) -> None:
        pass

    def sample(self, *_: object) -> list[RolloutTree]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []


def unbuildable() -> Fatal:
    """Fail as a model does that is too large."""
    raise OutOfMemoryError("the model does not fit")
