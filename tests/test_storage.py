"""Paths that no file can have do not exist. Temporary folders of killed processes are removed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from brorl.storage import TemporaryFolder, exists, is_file, is_folder, remove_abandoned
from run_support import command

PREFIX = "brorl-test-"


@pytest.mark.linux
def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from brorl.storage import TemporaryFolder;"
        "print(TemporaryFolder.new(Path(sys.argv[1]), sys.argv[2]).path, flush=True); os.kill(os.getpid(), 9)"
    )
    killed_command = [sys.executable, "-c", program, str(tmp_path), PREFIX]
    made = subprocess.run(killed_command, capture_output=True, text=True, check=False)
    assert made.returncode == -9, made.stderr
    used = TemporaryFolder.new(tmp_path, PREFIX)
    killed, used_path = Path(made.stdout.strip()), used.path
    other, new = tmp_path / f"{PREFIX}without-lock", tmp_path / f"{PREFIX}new"
    for folder in (other, new):
        folder.mkdir()
    (new / "used").touch()
    for folder in (killed, used_path, other):
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path, PREFIX)
    assert not killed.exists()
    assert used_path.exists()
    assert other.exists()
    assert new.exists()
    assert used.descriptor is not None
    os.close(used.descriptor)
    remove_abandoned(tmp_path, PREFIX)
    assert not used_path.exists()


@pytest.fixture
def name(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of more than 255 bytes, which Linux, macOS and Windows reject."""
    monkeypatch.chdir(tmp_path)
    Path("responses.jsonl").write_text('{"id": "countdown:1", "response": "1"}\n')
    return "a" * int(rng.integers(256, 2000))


def test_a_name_that_is_too_long_does_not_exist(name: str, tmp_path: Path) -> None:
    assert not any(check(path) for check in (exists, is_file, is_folder) for path in (name, tmp_path / name / "b"))


def test_files_and_folders_exist(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert (exists(file), is_file(file), is_folder(file)) == (True, True, False)
    assert (exists(tmp_path), is_file(tmp_path), is_folder(str(tmp_path))) == (True, False, True)
    assert not exists(tmp_path / "other")


def test_other_errors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    for check in (exists, is_file, is_folder):
        with pytest.raises(PermissionError):
            check(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("data", "{name}.jsonl"), "recipe '{name}.jsonl' is neither a file nor a built-in recipe"),
        (("data", "{name}"), "recipe '{name}' is neither a file nor a built-in recipe"),
        (("check", "{name}"), "recipe '{name}' is neither a file nor a built-in recipe"),
        (("check", "quickstart", "--data.sources={name}.jsonl"), "there is no file or folder {name}.jsonl"),
        (("train", "{name}.yaml"), "recipe '{name}.yaml' is neither a file nor a built-in recipe"),
        (("verify", "{name}.jsonl", "--data=quickstart"), "there is no file or folder {name}.jsonl"),
        (("verify", "{name}"), "{name} does not belong to a run; name its questions"),
        (("verify", "responses.jsonl", "--data={name}.jsonl"), "there is no file or folder {name}.jsonl"),
        (("verify", "responses.jsonl", "--data={name}.yaml"), "recipe '{name}.yaml' is neither a file nor a built-in"),
        (("verify", "responses.jsonl", "--data=quickstart", "--output={name}/x"), "there is no folder {name}"),
        (("verify", "responses.jsonl", "--data={path: none.jsonl, name: {name}}"), "there is no file or folder none"),
        (("eval", "{name}"), "{name}: the name is too long; choose a different path"),
        (("resume", "{name}"), "{name}/config.yaml: the name is too long; choose a different path"),
        (("check", "--model={name}"), "{name}: the name is too long; choose a different path"),
    ],
)
def test_a_name_that_is_too_long_is_an_error_of_one_line(name: str, arguments: tuple[str, ...], said: str) -> None:
    outcome = command(*(argument.replace("{name}", name) for argument in arguments))
    assert outcome.code == 2
    assert said.replace("{name}", name) in outcome.err
    assert outcome.err.count("\n") == 1
