"""A run over three hosts of their own network: one host is cut off, the run goes on without it, and it joins again.

The hosts are network namespaces with addresses of their own, joined by a bridge. Needs root and iproute2.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from safetensors.torch import load_file

_HEALTH = {  # a host that is cut off is lost after a few seconds
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"brorl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _run("ip", "netns", "del", name)
    return made


@dataclass
class Hosts:
    """Some hosts, of which the first is the head of a Ray cluster."""

    number: int
    ray: str  # the command
    port: int = 6379  # of the head
    subnet: str = "10.77.0"
    _folders: list[Path] = field(default_factory=list)
    _token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def head(self) -> str:
        """HOST:PORT of the head."""
        return f"{self.address(0)}:{self.port}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"{self.subnet}.{host + 1}"

    def __enter__(self) -> Self:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for host in range(self.number):
            space, outer = self._space(host), self._outer(host)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outer, "master", self._bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in range(self.number):
            pids = subprocess.run(
                ["ip", "netns", "pids", self._space(host)], capture_output=True, text=True, check=False
            )
            for pid in pids.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._space(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def join(self, host: int) -> None:
        """Start Ray on a host: the head on the first one, which the others join."""
        role = (
            ["--head", f"--port={self.port}", "--include-dashboard=false"] if host == 0 else [f"--address={self.head}"]
        )
        folder = Path(tempfile.mkdtemp(prefix="brorl-host-", dir="/tmp"))
        self._folders.append(folder)
        self.run(
            host, self.ray, "start", *role, f"--node-ip-address={self.address(host)}", "--num-cpus=1",
            "--object-store-memory=200000000", f"--temp-dir={folder}", "--disable-usage-stats",
        )  # fmt: skip

    def run(self, host: int, *command: str) -> None:
        """Run a command on a host to its end."""
        done = subprocess.run(
            self._on(host, command), capture_output=True, text=True, env=self._environment, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed on host {host}:\n{done.stdout}\n{done.stderr}")

    def start(self, host: int, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output goes to a file."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._on(host, command), stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def cut(self, host: int) -> None:
        """Take a host off the network."""
        _run("ip", "link", "set", self._outer(host), "down")

    def mend(self, host: int) -> None:
        """Bring a host back to the network."""
        _run("ip", "link", "set", self._outer(host), "up")

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **_HEALTH, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}

    @property
    def _bridge(self) -> str:
        return f"brorl-{os.getpid() % 1_000_000}"

    def _space(self, host: int) -> str:
        return f"brorl-{os.getpid()}-{host}"

    def _outer(self, host: int) -> str:
        return f"bv{os.getpid() % 1_000_000}-{host}"

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._space(host), *command]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and iproute2"),
]
BIN = Path(sys.executable).parent
STEPS = 8
SETTINGS = (
    "--steps", str(STEPS), "--rollouts_per_prompt", "64", "--prompts_per_step", "6", "--optimizer.mini_batches", "2",
    "--evaluation.every", "0", "--report", "false", "--cluster.rollout_workers", "3", "--cluster.task_timeout_s", "20",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3, str(BIN / "ray")) as three:
        for host in range(3):
            three.join(host)
        yield three


def train(hosts: Hosts, folder: Path, log: Path, nodes: int = 3) -> object:
    where = ("--cluster.nodes", str(nodes), "--cluster.address", hosts.head, "--output_dir", str(folder))
    return hosts.start(0, log, str(BIN / "brorl"), "train", "quickstart", *SETTINGS, *where)


def wait_for_step(run: object, folder: Path, step: int, log: Path) -> None:
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and any(json.loads(line)["step"] >= step for line in metrics.read_text().splitlines())):
        assert run.poll() is None, log.read_text()  # type: ignore[attr-defined]
        time.sleep(0.2)


def final_weights(folder: Path) -> dict[str, object]:
    return load_file(folder / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")


def test_a_host_that_is_cut_off_and_joins_again_changes_nothing(hosts: Hosts, tmp_path: Path) -> None:
    log = tmp_path / "calm.txt"
    calm = train(hosts, tmp_path / "calm", log)
    assert calm.wait() == 0, log.read_text()  # type: ignore[attr-defined]
    log = tmp_path / "cut.txt"
    disturbed = train(hosts, tmp_path / "cut", log)
    wait_for_step(disturbed, tmp_path / "cut", 2, log)
    hosts.cut(2)
    wait_for_step(disturbed, tmp_path / "cut", 5, log)  # it goes on without the host
    hosts.mend(2)
    hosts.join(2)
    assert disturbed.wait() == 0, log.read_text()  # type: ignore[attr-defined]
    assert hosts.address(2) in log.read_text()  # the lost workers are named
    expected, found = final_weights(tmp_path / "calm"), final_weights(tmp_path / "cut")
    assert expected.keys() == found.keys()
    assert all(bool((expected[name] == found[name]).all()) for name in expected)  # type: ignore[attr-defined]
