"""A run over three hosts of their own network: one host is cut off, the run goes on without it, and it joins again."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, can_make_hosts
from safetensors.torch import load_file

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
