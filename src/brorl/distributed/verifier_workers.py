"""Verifier workers as Ray actors, each with its own verifiers and their processes.

The verdicts are those of local verification. The responses are cut into batches, and a free worker takes the next
batch. A batch whose worker was lost is verified again. After a second loss, its responses are unverified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from brorl.activity import Echo
from brorl.distributed.supervisor import Supervisor, WorkerCall, WorkerPoolConfig
from brorl.format import counted
from brorl.prompts.prompt import Prompt
from brorl.verdict import Verdict, unverified_verdict
from brorl.verification.verifier import TrialResponses, Verifier

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
