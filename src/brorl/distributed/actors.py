"""The Ray actors that sample and verify on a cluster, and the weights they read.

Weights are put into the object store once. On the machine that stores them, the tensors share the store's memory.
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
from brorl.distributed.supervisor import ActorCall, PoolConfig, Supervisor
from brorl.errors import LearnerLostError
from brorl.format import counted
from brorl.model.device import free_unused, to_host
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Engine, SampleTask, TaskResult, split_prompt_seed
from brorl.tree import RolloutTree
from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.verifier import TrialResponses, Verifier


@dataclass(frozen=True)
class RemoteWeights:
    """Named tensors in the object store, read on every iteration. Sending this object elsewhere copies nothing."""

    # Ray's reference to the weights' `stored_form`. The weights exist as long as a process holds the reference and its
    # owner (the process that called `put`, or the actor) is alive.
    ref: Any

    @classmethod
    def put(cls, weights: Iterable[tuple[str, Tensor]]) -> RemoteWeights:
        """Copy weights into the object store. GPU weights go through the host."""
        return cls(ray.put(stored_form(weights)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Read the weights as read-only tensors. If they were lost with their machine, raise a `LearnerLostError`."""
        try:
            stored = ray.get(self.ref)
        except ObjectLostError as error:
            raise LearnerLostError(
                f"the learner's weights were lost with its machine ({type(error).__name__})"
            ) from error
        for name, shape, dtype, data in stored:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(data)
            yield name, flat.view(dtype).reshape(shape)


def stored_form(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> list[tuple[str, torch.Size, torch.dtype, Any]]:
    """Return weights as `RemoteWeights` stores them: (name, shape, dtype, bytes), with floats cast to `dtype`.

    If an actor returns this form, its caller gets a reference to it.
    """
    on_host = ((name, to_host(tensor, dtype)) for name, tensor in weights)
    return [(name, tensor.shape, tensor.dtype, _bytes(tensor)) for name, tensor in on_host]


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's memory as a byte array, which the object store neither pickles nor copies twice."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class EngineActor:
    """The engine in one actor. A learner rank may use the same GPU between calls."""

    def __init__(self, build: Callable[[], Engine], threads: int, shares_gpu: bool = False) -> None:
        torch.set_num_threads(threads)
        self._engine = build()
        self._shares_gpu = shares_gpu

    def load(self, weights: RemoteWeights, version: int) -> tuple[None, None]:
        """Load weights."""
        self._engine.load_weights(weights, version)
        return None, None

    def sample(self, task: SampleTask) -> tuple[tuple[int, float], list[RolloutTree]]:
        """Sample a task. The receipt is (weights version, seconds); the payload is the trees."""
        start = perf_counter()
        trees = self._engine.sample(task)
        free_unused(self._shares_gpu)
        return (self._engine.version, perf_counter() - start), trees


class RolloutActors:
    """Samples tasks on rollout workers; see `SamplingPool`.

    `build` makes the same engine in every actor and must be picklable. Actors get new tasks only during calls to this
    pool. A caller that samples ahead must limit how many tickets are open.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        pool_config: PoolConfig,
        threads: int = 1,
        echo: Echo = lambda _: None,
        shares_gpus: bool = False,
    ) -> None:
        self.supervisor = Supervisor(partial(EngineActor, build, threads, shares_gpus), pool_config, echo)

    def submit(self, task: SampleTask) -> int:
        """Queue a task; see `SamplingPool`."""
        return self.supervisor.submit(ActorCall("sample", (task,), _title(task)))

    def done(self, timeout_s: float | None = None) -> list[TaskResult]:
        """Wait for tasks; see `SamplingPool`. The list is empty if no task is open or the timeout expires.

        If an engine raised an exception, re-raise it here; the other tasks continue.
        """
        return [TaskResult(call.ticket, call.payload, *call.receipt) for call in self.supervisor.finished(timeout_s)]

    def discard(self, tickets: Iterable[int]) -> None:
        """Forget tasks; see `SamplingPool`."""
        self.supervisor.discard(tickets)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; see `SamplingPool`.

        Idle actors load them immediately, busy ones after their task. `RemoteWeights` are not copied again.
        """
        remote = weights if isinstance(weights, RemoteWeights) else RemoteWeights.put(weights)
        self.supervisor.prepare(ActorCall("load", (remote, version), f"loading the weights of version {version}"))

    def close(self) -> None:
        """End all actors."""
        self.supervisor.close()


def _title(task: SampleTask) -> str:
    """Describe a task for messages: `sampling prompts 4 to 7 with seed 0`."""
    seed, first = split_prompt_seed(task.seed_P[0])
    last = first + len(task.prompts) - 1
    return f"sampling {f'prompt {first}' if last == first else f'prompts {first} to {last}'} with seed {seed}"


_LOST = "a verifier worker was lost"


class VerifierActor:
    """The verifiers in one actor, by domain. Their processes end with the actor."""

    def __init__(self, build: Callable[[], Mapping[str, Verifier]]) -> None:
        self._verifiers = build()

    def verify(self, domain: str, items: Sequence[tuple[Prompt, str]]) -> tuple[None, list[Verdict]]:
        """Verify responses in one domain."""
        return None, self._verifiers[domain].verify_all(items)


class VerifierActors:
    """Verifies on several actors. Each one caches verdicts for later responses with the same answer.

    The responses are split into batches, and an idle actor takes the next batch. If a batch's actor is lost, the batch
    is verified again; after a second loss, its responses are unverified. `build` runs in each actor, returns the
    verifiers by domain, and must be picklable.
    """

    def __init__(
        self,
        build: Callable[[], Mapping[str, Verifier]],
        pool_config: PoolConfig,
        batch_size: int = 64,
        echo: Echo = lambda _: None,
    ) -> None:
        self._batch_size = batch_size
        self.supervisor = Supervisor(partial(VerifierActor, build), pool_config, echo)

    def verify(self, domain: str, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses in one domain, each distinct pair once; see `Verifier.verify_all`."""
        size = self._batch_size
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        batch_of = {self.supervisor.submit(_job(domain, batch)): batch for batch in batches}
        verdicts_of: dict[int, list[Verdict]] = {}
        try:
            while len(verdicts_of) < len(batch_of):
                for done in self.supervisor.finished():
                    lost = [unverified_verdict(_LOST)] * len(batch_of[done.ticket])
                    verdicts_of[done.ticket] = lost if done.is_lost else done.payload
        finally:
            self.supervisor.discard(batch_of.keys() - verdicts_of.keys())
        return [verdict for ticket in batch_of for verdict in verdicts_of[ticket]]

    def close(self) -> None:
        """End all actors and their processes."""
        self.supervisor.close()


@dataclass(frozen=True)
class RemoteVerifier:
    """Verifies responses in one domain, on actors."""

    local: Verifier  # the verifier in this process; it checks references before the actors start
    domain: str
    actors: VerifierActors  # their verifier for the domain is built like `local`

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify responses on the actors; see `Verifier`."""
        return self.actors.verify(self.domain, items)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """In this process, find references that no response can match; see `Verifier`."""
        return self.local.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Return responses for a trial; see `Verifier`."""
        return self.local.trial_responses(reference, others)


def _job(domain: str, batch: Sequence[tuple[Prompt, str]]) -> ActorCall:
    ids = sorted({prompt.id for prompt, _ in batch})
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    title = f"verifying {counted(len(batch), 'response')} to prompt {ids[0]!r}{more}"
    return ActorCall("verify", (domain, batch), title, max_losses=1)
