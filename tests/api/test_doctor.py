"""The report on this machine: which level is active and why, and what that means."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

import brorl
from brorl.api import doctor as module
from brorl.api.doctor import Diagnosis, doctor
from brorl.cli import main
from brorl.errors import UserError
from brorl.verification.sandbox.level import Attack, Level, choose_level


def shown(found: Diagnosis) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(found)
    return " ".join(captured.get().split())


def pretend(monkeypatch: pytest.MonkeyPatch, levels: list[Level]) -> None:
    """Replace the probes of this machine."""
    by_name = {level.name: level for level in levels}
    holding = [level for level in levels if level.problem is None]

    def choose(_wish: str) -> Level:
        if not holding:
            raise UserError("no sandbox for untrusted code works on this machine; use another one")
        return holding[0]

    monkeypatch.setattr(module, "probe_level", by_name.__getitem__)
    monkeypatch.setattr(module, "choose_level", choose)
    monkeypatch.setattr(module.sys, "platform", "linux")


@pytest.mark.linux
def test_the_level_in_force_is_the_one_that_a_run_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        expected = choose_level("auto").name
    except UserError:
        expected = None
    assert doctor().level == expected
    capsys.readouterr()
    assert main(["doctor"]) == (0 if expected else 1)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"brorl {brorl.__version__}: starting"
    assert "Sandbox of untrusted code" in out


def test_a_lower_level_is_in_force_where_the_first_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    attacks = (Attack("read /etc/passwd", True, "OSError: [Errno 1]"), Attack("start a process", True, "OSError"))
    pretend(monkeypatch, [Level("landlock", (), "the kernel has no Landlock"), Level("seccomp", attacks, None)])
    found = doctor()
    text = shown(found)
    assert found.level == "seccomp"
    assert "landlock: the kernel has no Landlock" in text
    assert "read /etc/passwd not tried contained" in text
    assert "active: seccomp" in text
    assert "Linux 5.13" not in text  # the fix of a level is for a machine without any


def test_without_a_level_the_exit_code_is_1_and_the_fixes_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = (Attack("read /etc/passwd", False, "root:x:0:0"),)
    pretend(
        monkeypatch, [Level("landlock", (), "no Landlock"), Level("seccomp", broken, "read /etc/passwd: root:x:0:0")]
    )
    text = shown(doctor())
    assert "read /etc/passwd not tried not contained: root:x:0:0" in text
    assert "for landlock: Linux 5.13 or later" in text
    assert "for seccomp: a kernel with seccomp filters" in text
    assert main(["doctor"]) == 1
    assert "active: none" in capsys.readouterr().out


def test_another_system_shows_why_it_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [])
    monkeypatch.setattr(module.sys, "platform", "darwin")
    found = doctor()
    assert found.level is None
    assert "no sandbox for untrusted code works on this machine" in shown(found)


KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Jul 11 2024\nGCC version:  gcc version 12.3.0\n"
OPEN_KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"


@pytest.mark.parametrize(("kernel", "cuda"), [(KERNEL, "13.0"), (OPEN_KERNEL, None)])
def test_a_card_that_torch_cannot_use_is_named_with_the_fix(
    kernel: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(kernel.format("570.86.15"))
    monkeypatch.setattr(module, "_NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA was initialized"))
    monkeypatch.setattr(torch, "__version__", "2.9.9")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    pretend(monkeypatch, [Level("landlock", (), None), Level("seccomp", (), None)])
    build = "without CUDA" if cuda is None else "for CUDA 13.0"
    assert f"(driver 570.86.15), but torch 2.9.9, built {build}, cannot use it; install" in shown(doctor())
    (tmp_path / "version").unlink()
    assert "NVIDIA" not in shown(doctor())
