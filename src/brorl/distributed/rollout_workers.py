"""A pool of rollout workers as Ray actors, each with its own engine.

The trees of a task are fetched from the object store when `done` returns them. Weights are put there once, and each
worker loads them between two tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from brorl.activity import Echo
from brorl.distributed.supervisor import Supervisor, WorkerCall, WorkerPoolConfig
from brorl.distributed.weights import RemoteWeights
from brorl.rollout.engine import Engine
from brorl.rollout.pool import SampledTask, SampleTask
from brorl.tree import RolloutTree


class EngineWorker:
    """The engine of one worker process.

    Args:
        build: Makes the engine.
        threads: Threads of torch.
        shares_gpu: Whether a learner rank uses its GPU between two calls.
    """

    def __init__(self, build: Callable[[], Engine], threads: int, shares_gpu: bool = False) -> None:
        self._build = build
        self._threads = threads
        self._shares_gpu = shares_gpu

    def start(self) -> None:
        """Make the engine."""
        torch.set_num_threads(self._threads)
        self._engine = self._build()

    def load(self, weights: RemoteWeights, version: int) -> tuple[None, None]:
        """Load weights."""
        self._engine.load_weights(weights, version)
        return None, None

    def sample(self, task: SampleTask) -> tuple[tuple[int, float], list[RolloutTree]]:
        """Sample a task; return the version of the weights and the seconds, and the trees."""
        start = perf_counter()
        trees = self._engine.sample(task.prompts, task.num_rollouts, task.sampling, task.seed, task.first)
        if self._shares_gpu:
            torch.cuda.empty_cache()
        return (self._engine.version, perf_counter() - start), trees


class RayRolloutPool:
    """Samples tasks on rollout workers; see `SamplingPool`.

    A task that starts after `publish` has returned is sampled with the published weights, and so is the retry of a
    task whose worker was lost. The results of finished tasks stay in the object store until `done` returns them. A
    caller that samples ahead must limit the number of its open tickets.

    Args:
        build: Makes the engine in a worker's process; must be picklable, and make the same engine in every process.
        pool_config: The workers.
        threads: torch threads of each worker.
        echo: Receives a line for each lost worker.
        shares_gpus: Whether learner ranks use the GPUs of the workers between two calls.

    Raises:
        Exception: Any error of `build`.
        WorkersLostError: If too many workers are lost during the start.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        pool_config: WorkerPoolConfig,
        threads: int = 1,
        echo: Echo = lambda _: None,
        shares_gpus: bool = False,
    ) -> None:
        self._supervisor = Supervisor(partial(EngineWorker, build, threads, shares_gpus), pool_config, echo)

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Host name and process id of each worker that runs."""
        return [(worker.host, worker.pid) for worker in self._supervisor.started]

    def submit(self, task: SampleTask) -> int:
        """Queue a task; see `SamplingPool`.

        Raises:
            WorkersLostError: If too many workers have been lost.
        """
        return self._supervisor.submit(WorkerCall("sample", (task,), _title(task)))

    def done(self, timeout_s: float | None = None) -> list[SampledTask]:
        """Wait for tasks; see `SamplingPool`.

        Returns:
            The tasks that are done; none if no task is open, or after the timeout.

        Raises:
            Exception: The exception of the engine, if a task raised one; the other tasks continue.
            WorkersLostError: If too many workers have been lost.
        """
        return [SampledTask(call.ticket, call.payload, *call.receipt) for call in self._supervisor.finished(timeout_s)]

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget tasks; see `SamplingPool`."""
        self._supervisor.discard(tickets)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; see `SamplingPool`.

        Free workers load them at once, the others after their task.

        Args:
            weights: The weights by name; `RemoteWeights` are not copied again.
            version: Their version.
        """
        remote = weights if isinstance(weights, RemoteWeights) else RemoteWeights.put(weights)
        self._supervisor.prepare(WorkerCall("load", (remote, version), f"loading the weights of version {version}"))

    def close(self) -> None:
        """End all workers."""
        self._supervisor.close()


def _title(task: SampleTask) -> str:
    """Return the work of a task, with the numbers of its prompts."""
    last = task.first + len(task.prompts) - 1
    numbers = f"prompt {task.first}" if last == task.first else f"prompts {task.first} to {last}"
    return f"sampling {numbers} with seed {task.seed}"
