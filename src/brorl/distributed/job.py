"""A job of a worker, and its result.

In: the name of a method of a worker, and its arguments. Out: the receipt and the payload that the method returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from brorl.distributed.worker_host import Raised


@dataclass(frozen=True)
class Job:
    """A call of a method of any worker.

    Attributes:
        method: Its name.
        arguments: Its arguments.
        title: The work in messages: `sampling prompt 3`.
        max_losses: Workers that may be lost on the job before it is given up; None for no limit.
    """

    method: str
    arguments: tuple[Any, ...]
    title: str
    max_losses: int | None = None


class Finished(NamedTuple):
    """A finished job.

    Attributes:
        ticket: The number that `submit` returned.
        receipt: The receipt that the method returned.
        payload: The payload that the method returned.
        lost: Why the job was given up; None if it was done.
    """

    ticket: int
    receipt: Any
    payload: Any
    lost: str | None = None


class Result(NamedTuple):
    """The result of a job before its payload is fetched; see `Finished`.

    Attributes:
        ticket: The number that `submit` returned.
        job: The job.
        receipt: The receipt that the method returned.
        payload: The reference of the payload.
        lost: Why the job was given up; None if it was done.
    """

    ticket: int
    job: Job
    receipt: Any
    payload: Any
    lost: str | None = None

    def fetch(self) -> Finished:
        """Fetch the payload.

        Raises:
            RayError: If it was lost.
        """
        has_payload = self.lost is None and not isinstance(self.receipt, Raised)
        return Finished(self.ticket, self.receipt, ray.get(self.payload) if has_payload else None, self.lost)
