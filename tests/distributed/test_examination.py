"""The faults of a cluster: none on a sound one, and exactly one line with a fix for each thing that is broken."""

import socket
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from brorl.distributed.connection import (
    NodeFacts,
    find_faults,
    gather_facts,
    own_file,
    version_faults,
)  # fmt: skip

VERSIONS = {"python": "3.11.7", "brorl": "1.0", "torch": "2.13.0", "ray": "2.60.0", "CUDA": "13.0", "NCCL": "2.30"}


def node(address: str) -> NodeFacts:
    return NodeFacts(address, VERSIONS)


SOUND, RUNS = [node("10.0.0.1"), node("10.0.0.2"), node("10.0.0.3")], Path("/runs")


def versions_without(name: str) -> dict[str, str]:
    return {package: version for package, version in VERSIONS.items() if package != name}


def with_node(**changes: object) -> list[NodeFacts]:
    first, second, third = SOUND
    return [first, replace(second, **changes), third]


def test_a_sound_cluster_has_no_faults() -> None:
    assert find_faults(SOUND, RUNS) == []
    assert find_faults(SOUND[:1], RUNS) == []


@pytest.mark.parametrize(
    ("nodes", "problem", "fix"),
    [
        (with_node(versions=VERSIONS | {"torch": "2.11.0"}), "has torch 2.11.0", "pip install torch==2.13.0"),
        (with_node(versions=VERSIONS | {"python": "3.12.1"}), "has python 3.12.1", "with Python 3.11.7"),
        (with_node(versions=VERSIONS | {"CUDA": "12.8"}), "has CUDA 12.8", "a build of torch for CUDA 13.0"),
        (with_node(versions=versions_without("brorl")), "has no brorl, and the head", "pip install brorl==1.0"),
        (with_node(folder_problem="it is missing"), "/runs: it is missing", "mount the same shared storage"),
        (with_node(folder_problem="it is not the same folder"), "/runs: it is not the same", "mount the same"),
        (with_node(refused={"10.0.0.3": "timed out"}), "10.0.0.2 cannot connect to 10.0.0.3", "ports"),
    ],
)  # fmt: skip
def test_each_fault_has_one_line_and_one_fix(nodes: list[NodeFacts], problem: str, fix: str) -> None:
    [fault] = find_faults(nodes, RUNS)
    assert problem in fault.problem
    assert fix in fault.fix
    assert "\n" not in str(fault)


def test_the_versions_of_a_machine_are_compared_with_a_standard() -> None:
    here = {"python": "3.11.7", "torch": "2.13.0"}
    assert list(version_faults("machine a", here, "this machine", here)) == []
    (fault,) = version_faults("machine b", {**here, "torch": "2.12.0"}, "this machine", here)
    assert str(fault) == (
        "machine b has torch 2.12.0, and this machine has torch 2.13.0; run there: pip install torch==2.13.0"
    )
    (fault,) = version_faults("machine c", {"python": "3.11.7"}, "this machine", here)
    assert str(fault).startswith("machine c has no torch, and this machine has torch 2.13.0; ")


def test_a_folder_is_shared_if_both_sides_see_each_others_files(tmp_path: Path) -> None:
    assert gather_facts("a", tmp_path, "token", {}).folder_problem == "it is missing, or it is not the same folder"
    (tmp_path / "token").write_text("another")
    assert gather_facts("a", tmp_path, "token", {}).folder_problem == "its files have another content"
    (tmp_path / "token").write_text("token")
    assert gather_facts("a", tmp_path, "token", {}).folder_problem is None
    assert own_file(tmp_path, "token", "a").read_text() == "a"


def test_a_closed_port_is_a_refused_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = {"127.0.0.1": server.getsockname()[1]}
        assert gather_facts("a", tmp_path, "token", ends).refused == {}
    assert "refused" in gather_facts("a", tmp_path, "token", ends).refused["127.0.0.1"].lower()


def test_machines_are_tried_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together = Barrier(5, timeout=30)

    def unreachable(end: tuple[str, int], timeout: float) -> socket.socket:
        together.wait()
        raise TimeoutError(f"timed out after {timeout} s: {end}")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    ports = {f"10.0.0.{i}": 7000 + i for i in range(5)}
    assert gather_facts("a", tmp_path, "token", ports).refused == {
        name: f"timed out after 3.0 s: {(name, port)}" for name, port in ports.items()
    }
