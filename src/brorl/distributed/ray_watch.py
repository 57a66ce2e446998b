"""A watch on Ray's own processes: if one dies, Ray ends this program without a word on what to do.

In: where the processes listen. Out: one line with the command that continues, and the end of this program with exit
code 1. What Ray itself prints goes to the log of the run.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray._private import worker

EXIT_CODE = 1
_POLL_S = 0.1  # Ray ends this program about a second after the death of the local process
_CONNECT_S = 2.0
_RETURN_S = 50.0  # in which the head of a cluster that was joined can come back; Ray gives up after 60 s


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray that this program needs.

    Attributes:
        name: Its name for the user.
        address: Its host and port.
        returns_within_s: Seconds in which it can come back.
    """

    name: str
    address: tuple[str, int]
    returns_within_s: float = 0.0


def needed_processes(joined: bool) -> list[RayProcess]:
    """Return the processes that this program is connected to; `joined` means that another program started them."""
    head, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    here = ray.get_runtime_context().get_node_id()
    [node] = [one for one in ray.nodes() if one["NodeID"] == here]
    return [
        RayProcess("the raylet of this machine", (node["NodeManagerAddress"], node["NodeManagerPort"])),
        RayProcess("the head of the cluster", (head, int(port)), _RETURN_S if joined else 0.0),
    ]


class RayWatch:
    """Watches processes in a thread until it is closed.

    Args:
        processes: The processes.
        on_loss: Called once in the thread, with the name of the process that is lost.
    """

    def __init__(self, processes: list[RayProcess], on_loss: Callable[[str], None]) -> None:
        self._processes, self._on_loss = processes, on_loss
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of Ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        last_sign = dict.fromkeys(self._processes, monotonic())
        while not self._closing.wait(_POLL_S):
            for process in self._processes:
                if _listens(process.address):
                    last_sign[process] = monotonic()
                elif monotonic() - last_sign[process] >= process.returns_within_s and not self._closing.is_set():
                    self._on_loss(process.name)
                    return


def _listens(address: tuple[str, int]) -> bool:
    """Return False if nothing listens at an address; an answer that takes long is none."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def end_program(say: Callable[[str], None], lost: str, advice: str) -> None:
    """Say what was lost and how to continue, and end this program: a call of Ray may never return."""
    try:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # show the cursor, which a live status line hides
        say(f"brorl: Ray has died: {lost} does not answer; its processes may have run out of memory. {advice}")
    finally:
        os._exit(EXIT_CODE)


def send_messages_of_ray(note: Callable[[str], None]) -> None:
    """Pass on what Ray prints about processes that died, in place of printing it."""

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 (Ray gives it)
        for line in data["lines"]:
            note(line)

    worker.print_to_stdstream = keep
