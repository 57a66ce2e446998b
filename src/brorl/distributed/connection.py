"""The connection to a Ray cluster and its examination, with one line and one fix for each fault."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray._private import worker
from ray.job_config import JobConfig

from brorl.errors import UserError, first_line
from brorl.wording import option

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


PACKAGES = ("brorl", "torch", "transformers", "numpy", "ray")  # whose versions must be equal on all machines
_CONNECT_TIMEOUT_S = 3.0
_FACTS_TIMEOUT_S = 120.0
_FIXES = {
    "python": "make its environment with Python {}",
    "CUDA": "install a build of torch for CUDA {} there",
    "NCCL": "install the build of torch with NCCL {} there",
}


@dataclass(frozen=True)
class NodeFacts:
    """A machine of a cluster."""

    address: str  # its IP address
    # version of each installed package, and of `python`, `CUDA` and `NCCL` where there is a GPU
    versions: Mapping[str, str]
    folder_problem: str | None = None  # why the shared folder cannot be used; None if it can
    refused: Mapping[str, str] = field(default_factory=dict)  # addresses to which it cannot connect, with the reason


@dataclass(frozen=True)
class Fault:
    """A fault of a cluster."""

    problem: str  # what is wrong, and on which machine
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


def find_faults(nodes: Sequence[NodeFacts], folder: Path) -> list[Fault]:
    """Return the faults of a cluster, whose first machine is the head, in the order in which they should be fixed."""
    head, *others = nodes
    faults = [
        f for n in others for f in version_faults(n.address, n.versions, f"the head {head.address}", head.versions)
    ]
    fix = "open all TCP ports from 1024 on between the machines of the cluster"
    faults += [
        Fault(f"{node.address} cannot connect to {end} ({reason})", fix)
        for node in nodes
        for end, reason in node.refused.items()
    ]
    fix = "mount the same shared storage at the same path on every machine, writable for this user"
    faults += [
        Fault(f"{node.address} cannot use the shared folder {folder}: {node.folder_problem}", fix)
        for node in nodes
        if node.folder_problem is not None
    ]
    return faults


def version_faults(
    machine: str, versions: Mapping[str, str], standard: str, expected: Mapping[str, str]
) -> Iterator[Fault]:
    """Yield a fault for each version of a machine that differs from that of the machine called `standard`."""
    for name in sorted(expected):
        if versions.get(name) != expected[name]:
            has = f"{name} {versions[name]}" if name in versions else f"no {name}"
            fix = _FIXES.get(name, f"run there: pip install {name}=={{}}").format(expected[name])
            yield Fault(f"{machine} has {has}, and {standard} has {name} {expected[name]}", fix)


def version_reader() -> Callable[[], dict[str, str]]:
    """Return a function that reads the versions of a machine; Ray sends its code, as brorl may be missing there."""
    packages = PACKAGES

    def read() -> dict[str, str]:
        import platform
        from importlib import metadata

        versions = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return versions

    return read


def gather_facts(address: str, folder: Path, token: str, ends: Mapping[str, int]) -> NodeFacts:
    """Gather the facts of this machine; it needs neither Ray nor a GPU.

    Args:
        address: Its address in the cluster.
        folder: The shared folder, which another machine has written `token` into.
        token: Name and content of that file.
        ends: Port of each other machine that accepts connections, by address.
    """
    import torch

    versions = version_reader()()
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with ThreadPoolExecutor(max(len(ends), 1)) as pool:  # all at once: each unreachable address takes the whole timeout
        reasons = dict(zip(ends, pool.map(_refusal, ends.items()), strict=True))
    refused = {end: reason for end, reason in reasons.items() if reason is not None}
    return NodeFacts(address, versions, _folder_problem(folder, token, address), refused)


def _refusal(end: tuple[str, int]) -> str | None:
    """Return why this machine cannot connect to an address and port; None if it can."""
    try:
        socket.create_connection(end, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return None


def _folder_problem(folder: Path, token: str, address: str) -> str | None:
    try:
        if (folder / token).read_text() != token:
            return "its files have another content"
        own_file(folder, token, address).write_text(address)
    except FileNotFoundError:
        return "it is missing, or it is not the same folder"
    except OSError as error:
        return f"it is not writable ({error.strerror or error})"
    return None


def own_file(folder: Path, token: str, address: str) -> Path:
    """Return the file that a machine writes into the shared folder."""
    return folder / f"{token}.{address}"


def examine_cluster(address: str, folder: Path) -> list[NodeFacts]:
    """Gather the facts of all machines of a running cluster, the head first.

    One task on each machine reads its versions, uses the folder and connects to the others. It leaves the cluster and
    the shared folder as they were.

    Args:
        address: HOST:PORT of its head, or `auto` for a cluster that runs on this machine.
        folder: The folder that all machines should share, an absolute path.

    Raises:
        UserError: If there is no cluster at the address, this machine cannot write into the folder, or a machine does
            not answer.
        ModuleNotFoundError: If Ray is not installed.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def order(node: Mapping[str, Any]) -> tuple[bool, str]:
        return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]

    join_cluster(address)
    try:
        with _token_file(folder) as token:
            nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=order)
            ports = {str(n["NodeManagerAddress"]): int(n["NodeManagerPort"]) for n in nodes}
            task: Any = ray.remote(num_cpus=0, max_retries=0)(gather_facts)
            waiting = {}
            for node, own in zip(nodes, ports, strict=True):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                others = {end: port for end, port in ports.items() if end != own}
                waiting[own] = task.options(scheduling_strategy=there).remote(own, folder, token, others)
            facts = [_answer(reference, own) for own, reference in waiting.items()]
            return [
                node
                if node.folder_problem or own_file(folder, token, node.address).exists()
                else replace(node, folder_problem="it is not the same folder")
                for node in facts
            ]
    finally:
        ray.shutdown()


@contextmanager
def _token_file(folder: Path) -> Iterator[str]:
    """Write a file with a new name into the folder, and remove it and those of the machines at the end."""
    token = f".brorl-doctor-{uuid4().hex}"
    try:
        (folder / token).write_text(token)
    except OSError as error:
        raise UserError(
            f"this machine cannot write into the shared folder {folder} ({error.strerror or error}); pass a folder on "
            f"shared storage: {option('folder', 'DIR')}"
        ) from error
    try:
        yield token
    finally:
        for file in folder.glob(f"{token}*"):
            file.unlink(missing_ok=True)


def _answer(reference: Any, address: str) -> NodeFacts:
    import ray

    try:
        facts: NodeFacts = ray.get(reference, timeout=_FACTS_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"the machine {address} of the cluster does not answer ({reason}); check there that brorl is installed in "
            "the environment that `ray start` used"
        ) from error
    return facts
