"""The files of a run are whole or absent, and go back to a step exactly."""

import fcntl
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import brorl
from brorl.algorithms.groups import Group
from brorl.errors import StorageError, UserError
from brorl.prompts.prompt import Prompt, stored_reference
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import SamplingRecord, StepRecord
from brorl.storage import replace_file
from brorl.tree import RolloutTree
from brorl.verdict import Verdict

RESPONSES = [[5, 1], [5, 1], [5, 6, 1], [6, 6, 6, 6], [5, 1]]
LOGPROBS = {(5,): -0.1, (5, 1): -0.25, (5, 6): -1.5, (5, 6, 1): -2.25, (6,): -3.0, (6, 6): -0.5}
LOGPROBS |= {(6, 6, 6): -0.75, (6, 6, 6, 6): -0.125}


def stored_group() -> Group:
    logprobs = [[LOGPROBS[tuple(r[: i + 1])] for i in range(len(r))] for r in RESPONSES]
    tree = RolloutTree.from_responses((2, 3), RESPONSES, logprobs, [r[-1] == 1 for r in RESPONSES])
    verdicts = [
        Verdict(True, 1.0, "5", "correct", 0.1),
        Verdict(False, 0.25, "5+6", "wrong value 11", 0.1),
        Verdict(False, 0.0, None, "truncated", 0.0),
    ]
    prompt = Prompt("p-1", "2 3:", (2, 3), "2 3 -> 5", "countdown")
    reward_L = np.array([v.score - 0.5 for v in verdicts])
    return replace(Group.from_verdicts(prompt, tree, verdicts), reward_L=reward_L, texts=["5", "5+6", "6666"])


def test_metrics_are_read_back_and_a_torn_last_line_is_not(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_metrics() == []
    records = [
        StepRecord(
            step=i, end_reason="\u00e9\n", sampling=SamplingRecord(samples=i, reward=i / 3, terms={"brief": None})
        )
        for i in range(3)
    ]
    for record in records:
        directory.append_metrics(record)
    assert repr(directory.read_metrics()) == repr(records)  # a NaN does not equal itself
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 3, "val')
    assert repr(directory.read_metrics()) == repr(records)  # a NaN does not equal itself


def test_a_long_reference_is_not_repeated_in_every_row(tmp_path: Path, rng: np.random.Generator) -> None:
    """Files grow with the beginning of a long reference, not with its length, and still tell references apart."""
    group = stored_group()
    directory = RunDirectory(tmp_path)
    sizes, stored = [], []
    for place, length in enumerate((2_000, 1_000_000, 1_000_000)):
        reference = "".join(map(chr, rng.integers(97, 123, length)))
        prompt = replace(group.prompt, reference=reference)
        directory.write_responses("rollouts", place, [replace(group, prompt=prompt)])
        directory.write_held_out([prompt])
        rows = pq.read_table(tmp_path / f"rollouts/step-{place:06d}.parquet").to_pylist()
        (held_out,) = directory.read_held_out()
        assert {row["reference"] for row in rows} == {held_out["reference"]}
        stored.append(held_out["reference"])
        assert stored[-1].startswith(reference[:2_000])
        assert (stored[-1] == reference) == (length == 2_000)
        sizes.append((tmp_path / "held_out.json").stat().st_size)
    assert "(1,000,000 characters" in stored[1]
    assert max(sizes) < 3_000
    same = reference[:2_000] + "".join(map(chr, rng.integers(97, 123, 998_000)))
    assert stored_reference(same) != stored_reference(reference)


def test_rewind_removes_what_came_after(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    group = stored_group()
    for step in range(5):
        directory.append_metrics(StepRecord(step=step, evaluation_unverified=2))
        directory.write_responses("rollouts", step, [group])
        if step % 2 == 0:
            directory.write_responses("evaluations", step, [group])
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 5')
    for folder in ("rollouts", "evaluations"):
        (tmp_path / folder / ".step-000005.parquet.tmp").write_bytes(b"half")
    kept = [p.read_bytes() for p in sorted((tmp_path / "rollouts").glob("step-00000[012].parquet"))]

    directory.rewind(2)
    lines = directory.metrics_file.read_text().splitlines()
    assert lines == [f'{{"step": {i}, "evaluation_unverified": 2}}' for i in range(3)]
    names = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert names == [f"step-00000{i}.parquet" for i in range(3)]
    assert [p.read_bytes() for p in sorted((tmp_path / "rollouts").iterdir())] == kept
    names = sorted(p.name for p in (tmp_path / "evaluations").iterdir())
    assert names == ["step-000000.parquet", "step-000002.parquet"]

    directory.rewind(-1)
    assert directory.read_metrics() == []
    assert not [*(tmp_path / "rollouts").iterdir(), *(tmp_path / "evaluations").iterdir()]


def test_what_cannot_be_written_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    """A folder stands where the file should be: a real failure of the operating system, also for root."""
    directory = RunDirectory(tmp_path)
    directory.metrics_file.mkdir()
    with pytest.raises(StorageError, match=r"could not write .*metrics\.jsonl: Is a directory"):
        directory.append_metrics(StepRecord(step=0))
    directory.rollouts.write_text("a file")
    with pytest.raises(StorageError, match=r"could not write .*rollouts"):
        directory.write_responses("rollouts", 1, [])
    (tmp_path / "env.json").mkdir()
    with pytest.raises(StorageError, match=r"could not write .*env\.json"):
        directory.write_environment("cpu")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_lock_on_a_directory_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of the lock removes the directory, or makes a new one, while another process waits to open it."""
    path = tmp_path / "run"
    for made_anew in (False, True):
        path.mkdir(exist_ok=True)
        lock = fcntl.flock

        def remove_first(descriptor: int, how: int, made_anew: bool = made_anew, lock: Any = lock) -> None:
            path.rename(tmp_path / f"removed-{made_anew}")
            if made_anew:
                path.mkdir()
            lock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", remove_first)
        with pytest.raises(UserError, match="has just removed"), RunDirectory(path).locked():
            pass
        monkeypatch.undo()


def test_replace_file_keeps_the_old_content_if_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "file"
    replace_file(target, b"old")
    (tmp_path / ".file.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    (tmp_path / ".file.tmp").rmdir()
    replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_other_arithmetic_than_that_of_the_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.arithmetic_line("cpu") is None
    monkeypatch.setattr("brorl.model.fused_ops.fastest_product", lambda: "mkl")
    monkeypatch.setattr("brorl.model.kernels.kernels", lambda: None)
    directory.write_environment("cpu")
    assert directory.arithmetic_line("cpu") is None
    monkeypatch.setattr("brorl.model.fused_ops.fastest_product", lambda: "onednn")
    assert "(matrix products: mkl so far, onednn now)" in (directory.arithmetic_line("cpu") or "")
    monkeypatch.setattr("brorl.model.kernels.kernels", lambda: "something")
    assert "onednn now; kernels: of PyTorch so far, compiled now)" in (directory.arithmetic_line("cpu") or "")


def test_kernels_in_c_are_not_compiled_for_a_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.model.load.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("brorl.model.kernels.kernels", None)
    directory = RunDirectory(tmp_path)
    directory.write_environment("auto")
    assert json.loads((tmp_path / "env.json").read_text())["arithmetic"] == {}
    assert directory.arithmetic_line("auto") is None


def test_the_commit_of_the_model_stays_when_a_run_is_resumed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for given in ("3f2a", None):
        directory.write_environment("cpu", model_commit=given)
        assert json.loads((tmp_path / "env.json").read_text())["model_commit"] == "3f2a"


def test_a_package_that_runs_from_its_sources_has_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PYTHONPATH=src python -m brorl` works without an installation, which is what has metadata."""
    distribution = metadata.distribution

    def not_installed(name: str) -> metadata.Distribution:
        if name == "brorl":
            raise metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(metadata, "distribution", not_installed)
    RunDirectory(tmp_path).write_environment("cpu")
    packages = json.loads((tmp_path / "env.json").read_text())["packages"]
    assert packages["brorl"] == brorl.__version__
    assert packages["numpy"] == np.__version__
