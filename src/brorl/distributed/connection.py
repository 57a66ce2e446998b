"""The connection to a Ray cluster, with errors that name the fix, and what the user reads when processes of Ray die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.job_config import JobConfig

from brorl.errors import UserError, first_line

_TIMEOUT_S = 5.0
_PROGRAM = """
import sys
if not sys.stdin.read(1):
    restored = "\\r\\x1b[2K\\x1b[?25h" if sys.stderr.isatty() else ""  # the status line is removed, the cursor shown
    print(restored + sys.argv[1], file=sys.stderr)
"""


def connect(address: str, **options: Any) -> None:
    """Connect this program to Ray.

    Args:
        address: HOST:PORT of a cluster, `auto`, or `local` to start one.
        options: More arguments of `ray.init`.
    """
    ray.init(address, log_to_driver=False, configure_logging=False, job_config=_job(), **options)


def send_messages_of_ray(note: Callable[[str], None]) -> None:
    """Pass on what Ray prints about processes that died, instead of printing it."""

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 (Ray gives it)
        for line in data["lines"]:
            note(line)

    worker.print_to_stdstream = keep


def _job() -> JobConfig:
    """Return a job whose workers import modules only from the folders of this program's path."""
    script = str(Path(sys.argv[0]).resolve().parent)
    return _OwnPath(_py_driver_sys_path=[script] if script in sys.path else [])


class _OwnPath(JobConfig):
    """A job to whose path Ray adds nothing: the current folder would come before the installed packages."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def join_cluster(address: str) -> None:
    """Connect this program to a running cluster.

    Args:
        address: HOST:PORT of its head, or `auto` for a cluster that runs on this machine.

    Raises:
        UserError: If no cluster answers there, this machine is not part of it, or it needs a token.
    """
    try:
        _check_answers(address)
        connect(address)
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"the Ray cluster at {address} needs its token; copy ~/.ray/auth_token from its first machine to this one, "
            "and set RAY_AUTH_MODE=token in the environment"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot join a Ray cluster at {address} ({first_line(error)}); run `ray start` on this machine first, and "
            "pass the HOST:PORT of the head (docs/how-to/cluster.md)"
        ) from error


def join_command() -> str:
    """Return the command that makes another machine join the cluster that this program is connected to."""
    has_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    command = f"ray start --address={ray.get_runtime_context().gcs_address}"
    return f"RAY_AUTH_MODE=token {command}" if has_token else command


def _check_answers(address: str) -> None:
    """Check that a program accepts connections at an address; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"expected HOST:PORT, not {address!r}")
    socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()


class ExitMessage:
    """Prints a line to stderr if this process ends before `withdraw` is called.

    Ray ends it without an exception when one of Ray's own processes dies. A small process prints the line then.

    Args:
        line: The line.
    """

    def __init__(self, line: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, line]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def withdraw(self) -> None:
        """Print nothing."""
        self._process.communicate(b"\n")
