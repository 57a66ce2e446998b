"""The printed command starts this installation, whether its environment is active or not."""

import subprocess
import sys
from pathlib import Path

import pytest

import brorl
from brorl.format import command_name, shell_command


def test_it_is_short_in_an_active_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = make_environment(tmp_path / "env with space", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{script.parent}")
    assert command_name() == "brorl"
    (tmp_path / "brorl").write_text("another installation")
    (tmp_path / "brorl").chmod(0o755)
    assert command_name() == f"'{script}'"


@pytest.mark.parametrize(("folder", "name"), [(".", "'env with space/bin/brorl'"), ("other", "'{script}'")])
def test_it_runs_without_an_active_environment(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = make_environment(tmp_path / "env with space", monkeypatch)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    assert command_name() == name.format(script=script)
    done = subprocess.run(f"{command_name()} resume x", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "resume x\n"


def test_arguments_are_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = make_environment(tmp_path / "env", monkeypatch)
    monkeypatch.setenv("PATH", str(script.parent))
    line = shell_command("train", Path("my runs/*.yaml"), "--steps", 3)
    assert line == "brorl train 'my runs/*.yaml' --steps 3"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = subprocess.run(shell_command("resume", "my run"), shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "resume my run\n"


def test_an_installation_without_a_script_is_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    assert command_name() == f"{python} -m brorl"
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-m", "brorl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"brorl {brorl.__version__}\n"


def make_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the script of an environment, which prints its arguments, and pretend that it runs this test."""
    script = folder / "bin/brorl"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
    return script
