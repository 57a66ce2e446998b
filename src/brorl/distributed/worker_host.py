"""The process of a worker: an actor that makes the worker, and then makes calls on it.

In: a function that makes the worker. Out: for each call a small receipt and a payload, as two objects of the object
store. The driver reads the receipt at once. The payload stays where it was made until the driver fetches it.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from typing import Any, NamedTuple

import ray


class Started(NamedTuple):
    """The receipt of a start.

    Attributes:
        host: Name and address of the machine.
        pid: The process id there.
        receipt: The return value of the worker's `start`.
    """

    host: str
    pid: int
    receipt: Any


class Raised(NamedTuple):
    """The receipt of a call that raised an exception; the process is intact."""

    error: Exception


class WorkerHost:
    """Holds one worker; Ray makes this class an actor.

    The worker's method `start` returns a receipt; every other method returns a receipt and a payload.
    """

    def start(self, make: bytes) -> tuple[Started | Raised, None]:
        """Make and start the worker; an exception in an actor's constructor would lose its type.

        Args:
            make: The pickled function that makes the worker.
        """
        try:
            self._worker = pickle.loads(make)()
            machine = f"{socket.gethostname()} at {ray.util.get_node_ip_address()}"
            return Started(machine, os.getpid(), self._worker.start()), None
        except Exception as error:
            return _raised(error), None

    def call(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method of the worker.

        Args:
            method: Its name.
            arguments: Its arguments.

        Returns:
            The method's receipt and payload; `Raised` and None if the method raised an exception.
        """
        try:
            receipt, payload = getattr(self._worker, method)(*arguments)
        except Exception as error:
            return _raised(error), None
        return receipt, payload


def _raised(error: Exception) -> Raised:
    """Return the receipt of an exception; pickling drops its traceback, so the text of it becomes a note."""
    error.add_note(f"In a worker on {socket.gethostname()}:\n{''.join(traceback.format_exception(error))}")
    return Raised(error)
