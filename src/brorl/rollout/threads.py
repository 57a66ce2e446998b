"""The CPU threads of torch in a run."""

from __future__ import annotations

import os

import torch

from brorl.config.settings import TrainConfig
from brorl.model.kernels import use_kernels
from brorl.model.load import choose_device

_SMALL = 10_000_000  # weights; with fewer, threads wait for each other longer than they work once a core is shared
_AT_START = torch.get_num_threads()


def set_threads_and_kernels(config: TrainConfig, num_weights: int) -> None:
    """Set the threads of torch to `engine.threads`, or choose them by the size of the model; set the kernels."""
    use_kernels(config.engine.compile)
    chosen = 1 if _computes_here(config) and num_weights < _SMALL else _all_threads()
    torch.set_num_threads(config.engine.threads or chosen)


def numbers_of_threads(config: TrainConfig) -> list[int]:
    """Return the numbers of threads to compare: one and all; none if the model is elsewhere or there is one core."""
    return [1, _all_threads()] if _computes_here(config) and _all_threads() > 1 else []


def _computes_here(config: TrainConfig) -> bool:
    """Whether the model computes on the CPU of this process."""
    return not config.cluster.enabled and choose_device(config.device).type == "cpu"


def _all_threads() -> int:
    """Return the default of torch, at most the cores that this process may use."""
    return min(_AT_START, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else _AT_START
