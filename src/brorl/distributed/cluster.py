"""The machines of a run: starts or joins Ray, checks the machines, and reserves CPUs and GPUs for each process.

Missing machines, CPUs or GPUs raise an error before anything is loaded. `close` ends every process of the run, but a
cluster that the run joined keeps running.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayTaskError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from brorl.activity import Echo
from brorl.distributed.settings import ClusterSettings, Kind
from brorl.errors import UserError, first_line
from brorl.format import counted
from brorl.storage import TemporaryFolder

_PLACING_S = 120.0
POLL_S = 0.2  # Python handles a signal that precedes a wait only after the wait, so short waits keep Ctrl-C working
_ANSWER_S = 5.0
_PACKAGES = ("brorl", "torch", "transformers", "numpy", "ray")  # must have the same version on all machines
_PROGRAM = """
import sys
if not sys.stdin.read(1):
    restored = "\\r\\x1b[2K\\x1b[?25h" if sys.stderr.isatty() else ""  # remove the status line, show the cursor
    print(restored + sys.argv[1], file=sys.stderr)
"""


class RayCluster:
    """Connects to Ray and decides where each process runs.

    `echo` receives lines for the user, `note` receives Ray's messages, and `advice` (how to continue) is printed if Ray
    dies.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        echo: Echo = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
        advice: str = "Rerun the command.",
    ) -> None:
        self.settings = settings
        self.echo = echo
        self._note = note
        self._advice = advice
        self._exit_message: subprocess.Popen[bytes] | None = None
        self._folder: TemporaryFolder | None = None
        self._connected = False
        self._groups: dict[Kind, PlacementGroup] = {}
        self._parts: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start or join the cluster, wait for its machines, and check them. The first call reserves their resources."""
        self.connect()
        self._wait_for_machines()
        _check_versions()
        self._check_resources()
        if not self._groups:
            self._reserve()

    def options(self, kind: Kind, index: int) -> dict[str, Any]:
        """Return the actor options that place process `index` (from 0) of a kind on its reserved resources."""
        group = self._groups.get("rollout" if kind == "learner" and self.settings.colocated else kind)
        if group is None:  # nothing is reserved for this kind
            return {**self.settings.request(kind), "scheduling_strategy": "SPREAD"}
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return {**self.settings.request(kind), "scheduling_strategy": place}

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a module-level function in another process of the cluster and return its result."""
        result = ray.remote(function).options(num_cpus=0).remote(*arguments)
        while not ray.wait([result], timeout=POLL_S)[0]:
            pass
        try:
            return ray.get(result)
        except RayTaskError as error:
            raise error.cause from error

    def on_release(self, end: Callable[[], None]) -> None:
        """Register a function for `release` to call; the last one registered is called first."""
        self._parts.append(end)

    def release(self) -> None:
        """End the processes of the run and free their resources. Ray keeps running."""
        while self._parts:
            self._parts.pop()()
        while self._groups:
            remove_placement_group(self._groups.popitem()[1])

    def close(self) -> None:
        """End everything that this object started."""
        if ray.is_initialized():
            self.release()
        if self._connected:
            ray.shutdown()
            self._connected = False
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._exit_message is not None:
            self._exit_message.communicate(b"withdrawn")
            self._exit_message = None

    @property
    def num_machines(self) -> int:
        """Number of machines in the cluster."""
        return len(_machines())

    def connect(self) -> None:
        """Start or join the cluster. Do nothing if already connected."""
        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns on machines with GPUs
        with _without_stop_signals():
            if self.settings.address is None:
                self._start_here()
            else:
                _join(self.settings.address)
        self._connected = True
        _send_messages_of_ray(self._note)
        self._exit_message = exit_message(
            "brorl: the command was killed, or Ray ended it because one of Ray's own processes died (raylet or "
            f"gcs_server; the machine may have run out of memory). {self._advice}"
        )

    def _start_here(self) -> None:
        """Start a cluster on this machine."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default, workers yield to all other processes
        short = Path("/tmp")  # socket paths have at most 107 characters
        parent = short if short.is_dir() else Path(tempfile.gettempdir())
        self._folder = TemporaryFolder.new(parent, "brorl-ray-")
        try:
            _connect("local", include_dashboard=False, _temp_dir=str(self._folder.path))
        except Exception as error:  # Ray raises a plain Exception if it takes too long to start
            raise UserError(f"Ray did not start: {error}") from error

    def _wait_for_machines(self) -> None:
        """Wait until all machines have joined."""
        deadline = monotonic() + self.settings.join_timeout_s
        announced = False
        while (missing := self.settings.nodes - len(_machines())) > 0:
            join = f"ray start --address={ray.get_runtime_context().gcs_address}"
            if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
                join = f"RAY_AUTH_MODE=token {join}"
            if not announced:
                self.echo(f"waiting for {counted(missing, 'machine')}; run this on each of them: {join}")
                announced = True
            if monotonic() > deadline:
                raise UserError(
                    f"cluster.nodes = {self.settings.nodes}, but only {self.settings.nodes - missing} joined within "
                    f"{self.settings.join_timeout_s:g} s; run `{join}` on the others while the run waits, or lower "
                    "cluster.nodes"
                )
            sleep(POLL_S)

    def _check_resources(self) -> None:
        """Check that the cluster has enough CPUs and GPUs for all processes."""
        settings = self.settings
        available = {name: int(sum(node["Resources"].get(name, 0) for node in _machines())) for name in ("CPU", "GPU")}
        numbers = f"cluster.rollout_workers ({settings.rollout_workers})"
        gpus = "cluster.gpus_per_rollout_worker"
        if settings.learner_ranks:
            numbers += f", cluster.learner_ranks ({settings.learner_ranks})"
            gpus += ", cluster.gpus_per_learner_rank"
        for name, needed, lower in (
            ("CPU", settings.needed_cpus, f"{numbers}, cluster.verifier_workers, cluster.cpus_per_worker"),
            ("GPU", settings.needed_gpus, f"{numbers}, {gpus}"),
        ):
            if available[name] < needed:
                raise UserError(
                    f"the run needs {counted(needed, name)}, but the cluster has {available[name]} on "
                    f"{counted(self.num_machines, 'machine')}; lower {lower}, or add machines"
                )

    def _reserve(self) -> None:
        """Reserve CPUs and GPUs for all processes."""
        kinds: tuple[Kind, ...] = ("learner", "rollout", "verifier")
        for kind in kinds:
            bundles = self.settings.bundles(kind)
            if bundles:
                together = kind == "learner" and self.settings.gpus_per_learner_rank > 0
                self._groups[kind] = placement_group(bundles, "PACK" if together else "SPREAD")
        deadline = monotonic() + _PLACING_S
        for kind, group in self._groups.items():
            while not group.wait(POLL_S):
                if monotonic() > deadline:
                    raise UserError(
                        f"Ray could not place {len(group.bundle_specs)} {kind} processes with "
                        f"{group.bundle_specs[0]} within {_PLACING_S:g} s; other programs use the cluster, or no "
                        "machine has these resources: wait for those programs, or lower the settings cluster.*_per_*"
                    )


@contextmanager
def _without_stop_signals() -> Iterator[None]:
    """Block SIGTERM and SIGHUP in processes that start within the block. Keep this program's SIGTERM handler.

    `scancel` and `timeout` send SIGTERM to all processes of a run, and a closed terminal sends SIGHUP, but the run
    needs its processes until it has saved a checkpoint. They inherit the blocked signals. On Linux the kernel kills
    them if this program dies. Elsewhere, Ray ends them with SIGTERM, so nothing is blocked.
    """
    handler = signal.getsignal(signal.SIGTERM)
    blocked = {signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked) if sys.platform == "linux" else None
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_versions() -> None:
    """Check that all other machines have the same package versions as this one."""
    packages = _PACKAGES

    def read() -> dict[str, str]:  # Ray sends this function's code, since brorl may be missing there
        import platform
        from importlib import metadata

        versions = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return versions

    here = ray.get_runtime_context().get_node_id()
    answer_of = {}
    for node in _machines():
        if node["NodeID"] != here:
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            machine = f"machine {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            answer_of[machine] = ray.remote(read).options(num_cpus=0, scheduling_strategy=on_node).remote()
    for machine, answer in answer_of.items():
        versions: dict[str, str] = ray.get(answer)
        check_versions(machine, versions, read())


def check_versions(machine: str, versions: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check that a machine has the expected package versions."""
    for name in sorted(expected):
        if versions.get(name) != expected[name]:
            has = f"{name} {versions[name]}" if name in versions else f"no {name}"
            command = f"run there: pip install {name}=={expected[name]}"
            fix = f"recreate its environment with Python {expected[name]}" if name == "python" else command
            raise UserError(f"{machine} has {has}, but this machine has {name} {expected[name]}; {fix}")


def _machines() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _connect(address: str, **options: Any) -> None:
    """Connect this program to Ray at HOST:PORT or `auto`; `local` starts Ray. `options` go to `ray.init`."""
    # Workers import modules only from directories on this program's path.
    script = str(Path(sys.argv[0]).resolve().parent)
    job = _OwnPath(_py_driver_sys_path=[script] if script in sys.path else [])
    ray.init(address, log_to_driver=False, configure_logging=False, job_config=job, **options)


class _OwnPath(JobConfig):
    """Keeps Ray from adding the current directory to the path, where it would come before installed packages."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _join(address: str) -> None:
    """Connect this program to a running cluster."""
    try:
        if address != "auto":  # Ray would keep trying for minutes
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"expected HOST:PORT, not {address!r}")
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        _connect(address)
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


def _send_messages_of_ray(note: Callable[[str], None]) -> None:
    """Forward Ray's messages about dead processes instead of printing them."""

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 (Ray passes it)
        for line in data["lines"]:
            note(line)

    worker.print_to_stdstream = keep


def exit_message(line: str) -> subprocess.Popen[bytes]:
    """Start a small process that prints a line to stderr if this process ends without sending it input.

    This is needed because Ray ends this process without an exception when one of Ray's own processes dies.
    """
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, line]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
