"""Rollout workers and verifier workers as Ray actors, and the weights in the object store that they read.

Weights are put there once. On the machine of the store, the tensors share its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError
from torch import Tensor

from brorl.activity import Echo
from brorl.distributed.supervisor import Supervisor, WorkerCall, WorkerPoolConfig
from brorl.errors import LearnerLostError
from brorl.format import counted
from brorl.model.device import to_host
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Engine, SampledTask, SampleTask
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.verifier import TrialResponses, Verifier


@dataclass(frozen=True)
class RemoteWeights:
    """Named tensors in the object store; every iteration reads them.

    The process that passes them on never holds the weights.
    """

    # The reference of their `stored_form`. The weights live as long as a process has the reference, and the process
    # that owns it lives: the one that called `put`, or that called the actor.
    ref: Any

    @classmethod
    def put(cls, weights: Iterable[tuple[str, Tensor]]) -> RemoteWeights:
        """Copy weights into the object store.

        Args:
            weights: The weights by name; tensors on a GPU are copied to the host.
        """
        return cls(ray.put(stored_form(weights)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read the weights; the tensors are read-only.

        Raises:
            LearnerLostError: If they were lost with the machine that held them.
        """
        try:
            stored = ray.get(self.ref)
        except ObjectLostError as error:
            raise LearnerLostError(
                f"the weights of the learner were lost with its machine ({type(error).__name__})"
            ) from error
        for name, shape, dtype, data in stored:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(data)
            yield name, flat.view(dtype).reshape(shape)


def stored_form(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> list[tuple[str, torch.Size, torch.dtype, Any]]:
    """Return the value that a `RemoteWeights` refers to; an actor that returns it leaves the weights to the caller.

    Args:
        weights: The weights by name, on any device.
        dtype: Number format of their floats in the store; None for their own.
    """
    on_host = ((name, to_host(tensor, dtype)) for name, tensor in weights)
    return [(name, tensor.shape, tensor.dtype, _bytes(tensor)) for name, tensor in on_host]


def _bytes(tensor: Tensor) -> Any:
    """Return the memory of a tensor as an array, which the object store neither pickles nor copies twice."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


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


_LOST = "a verifier worker was lost"


class VerifierWorker:
    """The verifiers of one worker process; their processes end with it.

    Args:
        build: Makes the verifier of each domain.
    """

    def __init__(self, build: Callable[[], Mapping[str, Verifier]]) -> None:
        self._build = build

    def start(self) -> None:
        """Make the verifiers."""
        self._verifiers = self._build()

    def verify(self, domain: str, items: Sequence[tuple[Prompt, str]]) -> tuple[None, list[Verdict]]:
        """Verify responses of one domain."""
        return None, self._verifiers[domain].verify_all(items)


class VerifierWorkers:
    """Verifies on several workers. Each worker keeps verdicts for later responses with the same answer.

    The responses are cut into batches, and a free worker takes the next batch. A batch whose worker was lost is
    verified again; after a second loss, its responses are unverified.

    Args:
        build: Makes the verifier of each domain in a worker's process; it can be pickled.
        pool_config: The workers.
        batch_size: Most responses of a batch, 1 or more.
        echo: Receives a line for each lost worker.

    Raises:
        Exception: The error of `build`.
        WorkersLostError: If too many workers are lost during the start.
    """

    def __init__(
        self,
        build: Callable[[], Mapping[str, Verifier]],
        pool_config: WorkerPoolConfig,
        batch_size: int = 64,
        echo: Echo = lambda _: None,
    ) -> None:
        self._batch_size = batch_size
        self._supervisor = Supervisor(partial(VerifierWorker, build), pool_config, echo)

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Host name and process id of each worker that runs."""
        return [(worker.host, worker.pid) for worker in self._supervisor.started]

    def verify(self, domain: str, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses of one domain; see `Verifier.verify_all`.

        Args:
            domain: The domain.
            items: Pairs of a prompt and the text of a response; no pair occurs twice.

        Raises:
            ValueError: If a prompt's reference is malformed.
            WorkersLostError: If too many workers have been lost.
        """
        size = self._batch_size
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        batch_of = {self._supervisor.submit(_job(domain, batch)): batch for batch in batches}
        verdicts_of: dict[int, list[Verdict]] = {}
        try:
            while len(verdicts_of) < len(batch_of):
                for done in self._supervisor.finished():
                    lost = [unverified_verdict(_LOST)] * len(batch_of[done.ticket])
                    verdicts_of[done.ticket] = done.payload if done.lost is None else lost
        finally:
            self._supervisor.discard(batch_of.keys() - verdicts_of.keys())
        return [verdict for ticket in batch_of for verdict in verdicts_of[ticket]]

    def close(self) -> None:
        """End all workers and their processes."""
        self._supervisor.close()


@dataclass(frozen=True)
class RemoteVerifier:
    """The verifier of one domain, which verifies responses on workers."""

    local: Verifier  # the verifier in this process; it checks references before the workers start
    domain: str  # the domain
    workers: VerifierWorkers  # the workers; their verifier of the domain is made like `local`

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses on the workers; see `Verifier`."""
        return self.workers.verify(self.domain, items)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find references that no response can match, in this process; see `Verifier`."""
        return self.local.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial; see `Verifier`."""
        return self.local.trial_responses(reference, others)


def _job(domain: str, batch: Sequence[tuple[Prompt, str]]) -> WorkerCall:
    ids = sorted({prompt.id for prompt, _ in batch})
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    title = f"verifying {counted(len(batch), 'response')} to prompt {ids[0]!r}{more}"
    return WorkerCall("verify", (domain, batch), title, max_losses=1)
