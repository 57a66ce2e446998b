"""`brorl doctor --cluster` on a running cluster of one machine, and without one."""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from brorl.cli import main

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
def test_a_sound_cluster(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", address, "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "No faults" in text
    assert metadata.version("ray") in text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_machine_with_another_version(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from brorl.distributed import connection as examination

    (head,) = examination.examine_cluster(address, tmp_path)
    strange = [head, replace(head, address="10.9.9.9", versions={**head.versions, "torch": "1"})]
    monkeypatch.setattr("brorl.api.doctor.examine_cluster", lambda *_: strange)
    assert main(["doctor", "--cluster", address]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "1 fault" in text
    assert "10.9.9.9 has torch 1" in text


@pytest.mark.slow
def test_no_cluster_no_folder_no_ray(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--cluster", address, "--folder", str(tmp_path / "none")]) == 2
    assert "cannot write into the shared folder" in capsys.readouterr().err
    for nowhere in ("127.0.0.1:1", "nonsense"):
        assert main(["doctor", "--cluster", nowhere, "--folder", str(tmp_path)]) == 2
        assert f"cannot join a Ray cluster at {nowhere}" in capsys.readouterr().err
    for name in [n for n in sys.modules if n == "ray" or n.startswith("ray.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["doctor", "--cluster", "10.255.255.1:6379"]) == 2
    assert "pip install 'brorl[ray]'" in capsys.readouterr().err
